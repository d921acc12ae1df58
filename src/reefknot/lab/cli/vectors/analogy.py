"""`reefknot vectors analogy`: answer analogies, such as "man is to king as woman is to ...?".

The answer is the word whose vector is nearest to king - man + woman. With a file of questions, the share of correct
answers is printed instead.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import AsJson, VectorSource, open_tables, print_result, reject_options
from reefknot.lab.cli.vectors.neighbors import check_neighbors, format_neighbors

if TYPE_CHECKING:
    from reefknot.lab.evaluation.analogy import Accuracy

EXAMPLES = """\b
Examples:
  reefknot vectors analogy vectors.txt man king woman
  reefknot vectors analogy runs/demo/untied/seed0 list lists string -k 3 --json
  reefknot vectors analogy vectors.txt --questions questions-words.txt
"""


def analogy(
    ctx: typer.Context,
    source: VectorSource,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="A B C", help="Three words: A is to B as C is to ...?")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Number of answers to print.")] = 8,
    questions: Annotated[
        Path | None,
        typer.Option(help="File of questions in the format of word2vec. Prints the share of correct answers instead."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer an analogy: A is to B as C is to which word?

    The answers are the words with the highest cosine to B - A + C, in every table of the run or file. A, B and C
    themselves are left out.
    """
    from reefknot.errors import SettingsError

    if words and questions is not None:
        raise SettingsError("words and --questions FILE exclude each other; leave one of them out")
    if questions is None and len(words or []) != 3:
        raise SettingsError(
            f"an analogy has three words, not {len(words or [])}; pass three words, or --questions FILE"
        )
    if questions is not None:
        reject_options(ctx, ["k"], "with --questions, where only the first answer counts; leave -k out")
        _answer_file(source, questions, as_json)
    else:
        _answer_words(source, words or [], k, as_json)


def _answer_words(source: Path, words: list[str], k: int, as_json: bool) -> None:
    from reefknot.lab.evaluation.analogy import analogy
    from reefknot.vectors.lookup import Lookup

    answers = {}
    for name, vectors in open_tables(source).items():
        a, b, c = (vectors.words[row] for row in Lookup(vectors).require(words, str(source)))
        answers[name] = check_neighbors(analogy(vectors, a, b, c, k), vectors, (a, b, c), name)
    print_result(
        answers, "\n".join(f"{name}: {format_neighbors(nearest)}" for name, nearest in answers.items()), as_json
    )


def _answer_file(source: Path, questions: Path, as_json: bool) -> None:
    from reefknot.lab.evaluation.analogy import read_questions, score_questions

    sections = read_questions(questions)
    records: dict[str, list[dict[str, Any]]] = {}
    lines = []
    for name, vectors in open_tables(source).items():
        accuracies = score_questions(vectors, sections)
        records[name] = [{**asdict(accuracy), "accuracy": accuracy.share} for accuracy in accuracies]
        width = max(len(accuracy.name) for accuracy in accuracies)
        lines.append(name)
        lines += [f"  {accuracy.name:<{width}}  {_format_accuracy(accuracy)}" for accuracy in accuracies]
    print_result(records, "\n".join(lines), as_json)


def _format_accuracy(accuracy: Accuracy) -> str:
    skipped = accuracy.of - accuracy.asked
    left_out = f", {skipped:,} left out because of unknown words" if skipped else ""
    if accuracy.share is None:
        return f"undefined: no question could be answered{left_out}"
    return f"{accuracy.share:6.1%}  ({accuracy.right:,} of {accuracy.asked:,}{left_out})"
