"""`reefknot vectors analogy`: answer analogies, such as man is to king as woman is to which word?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import AsJson, VectorSource, emit, given_options, open_tables
from reefknot.lab.cli.vectors.neighbors import listed, with_direction

if TYPE_CHECKING:
    from reefknot.lab.evaluation.analogy import Accuracy

EXAMPLES = """\b
Examples:
  reefknot vectors analogy vectors.txt man king woman
  reefknot vectors analogy runs/demo/untied/seed0 list lists string -k 3 --json
  reefknot vectors analogy vectors.txt --questions questions-words.txt
"""


def analogy(
    invocation: typer.Context,
    source: VectorSource,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="A B C", help="Three words: A is to B as C is to what?")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Number of answers to print.")] = 8,
    questions: Annotated[
        Path | None,
        typer.Option(help="File of questions in the format of word2vec. The share of correct answers is printed."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer an analogy by the cosine to B - A + C, in every table. The three words are never the answer."""
    from reefknot.errors import SettingsError

    if words and questions is not None:
        raise SettingsError("words and --questions FILE exclude each other; leave one of them out")
    if questions is None and len(words or []) != 3:
        raise SettingsError(
            f"an analogy has three words, not {len(words or [])}; pass three words, or --questions FILE"
        )
    if questions is not None:
        if any(name == "k" for name, _ in given_options(invocation)):
            raise SettingsError("-k has no effect with --questions, where only the first answer counts; leave -k out")
        _answer_file(source, questions, as_json)
    else:
        _answer_words(source, words or [], k, as_json)


def _answer_words(source: Path, words: list[str], k: int, as_json: bool) -> None:
    from reefknot.lab.evaluation.analogy import analogy
    from reefknot.vectors.lookup import Lookup

    answers = {}
    for name, table in open_tables(source).items():
        a, b, c = (table.words[row] for row in Lookup(table).require(words, str(source)))
        answers[name] = with_direction(analogy(table, a, b, c, k), table, (a, b, c), name)
    emit(answers, "\n".join(f"{name}: {listed(near)}" for name, near in answers.items()), as_json)


def _answer_file(source: Path, questions: Path, as_json: bool) -> None:
    from reefknot.lab.evaluation.analogy import read_questions, score_questions

    sections = read_questions(questions)
    scores = {name: score_questions(table, sections) for name, table in open_tables(source).items()}
    records = {name: [_record(accuracy) for accuracy in table] for name, table in scores.items()}
    emit(records, "\n".join(_lines(name, table) for name, table in scores.items()), as_json)


def _record(accuracy: Accuracy) -> dict[str, Any]:
    return {**asdict(accuracy), "accuracy": accuracy.share}


def _lines(table: str, accuracies: list[Accuracy]) -> str:
    width = max(len(accuracy.name) for accuracy in accuracies)
    return "\n".join([table, *(f"  {accuracy.name:<{width}}  {_share(accuracy)}" for accuracy in accuracies)])


def _share(accuracy: Accuracy) -> str:
    skipped = accuracy.of - accuracy.asked
    left_out = f", {skipped:,} left out because of unknown words" if skipped else ""
    if accuracy.share is None:
        return f"undefined: no question could be answered{left_out}"
    return f"{accuracy.share:6.1%}  ({accuracy.right:,} of {accuracy.asked:,}{left_out})"
