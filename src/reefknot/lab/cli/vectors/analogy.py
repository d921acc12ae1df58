"""`reefknot vectors analogy`: answer analogies, such as "man is to king as woman is to ...?".

The answer is the word whose vector is nearest to king - man + woman. With a file of questions, the share of correct
answers is printed instead.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import JsonOption, VectorSourceArgument, open_tables, print_result, reject_options
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
    source: VectorSourceArgument,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="A B C", help="Three words: A is to B as C is to ...?")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Number of answers to print.")] = 8,
    questions: Annotated[
        Path | None,
        typer.Option(help="File of questions in the format of word2vec. Prints the share of correct answers instead."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer an analogy: A is to B as C is to which word?

    The answers are the words with the highest cosine to B - A + C, in every table of the run or file. A, B and C
    themselves are left out.
    """
    from reefknot.errors import SettingsError

    words = words or []
    if words and questions is not None:
        raise SettingsError("words and --questions FILE exclude each other; leave one of them out")
    if questions is None and len(words) != 3:
        raise SettingsError(f"an analogy has three words, not {len(words)}; pass three words, or --questions FILE")
    if questions is not None:
        reject_options(ctx, ["k"], "with --questions, where only the first answer counts; leave -k out")
        _answer_file(source, questions, as_json)
    else:
        _answer_words(source, words, k, as_json)


def _answer_words(source: Path, words: list[str], k: int, as_json: bool) -> None:
    """Print the answers to one analogy, in every table."""
    from reefknot.lab.evaluation.analogy import analogy
    from reefknot.vectors.lookup import Lookup

    answers_by_table = {}
    lines = []
    for table, vectors in open_tables(source).items():
        table_rows = Lookup(vectors).require(words, str(source))
        a, b, c = (vectors.words[table_row] for table_row in table_rows)
        answers = check_neighbors(analogy(vectors, a, b, c, k), vectors, (a, b, c), table)
        answers_by_table[table] = answers
        lines.append(f"{table}: {format_neighbors(answers)}")
    print_result(answers_by_table, "\n".join(lines), as_json)


def _answer_file(source: Path, questions: Path, as_json: bool) -> None:
    """Print the share of correct answers to the questions of a file, by section of the file, in every table."""
    from reefknot.lab.evaluation.analogy import read_questions, score_questions

    sections = read_questions(questions)
    records: dict[str, list[dict[str, Any]]] = {}
    lines = []
    for table, vectors in open_tables(source).items():
        accuracies = score_questions(vectors, sections)
        records[table] = [{**asdict(accuracy), "accuracy": accuracy.share} for accuracy in accuracies]
        width = max(len(accuracy.name) for accuracy in accuracies)
        lines.append(table)
        lines += [f"  {accuracy.name:<{width}}  {_format_accuracy(accuracy)}" for accuracy in accuracies]
    print_result(records, "\n".join(lines), as_json)


def _format_accuracy(accuracy: Accuracy) -> str:
    num_skipped = accuracy.of - accuracy.asked
    skipped_note = f", {num_skipped:,} left out because of unknown words" if num_skipped else ""
    if accuracy.share is None:
        return f"undefined: no question could be answered{skipped_note}"
    return f"{accuracy.share:6.1%}  ({accuracy.right:,} of {accuracy.asked:,}{skipped_note})"
