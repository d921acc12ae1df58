"""`reefknot analogy`: a is to b as c is to which word?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.neighbors import listed, meaningful
from reefknot.lab.cli.options import AsJson, VectorSource, emit, open_tables

if TYPE_CHECKING:
    from reefknot.lab.evaluation.analogy import Accuracy

EXAMPLES = """\b
Examples:
  reefknot analogy vectors.txt man king woman
  reefknot analogy runs/demo/untied/seed0 list lists string -k 3 --json
  reefknot analogy vectors.txt --questions questions-words.txt
"""


def analogy(
    source: VectorSource,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="A B C", help="A is to B as C is to what? Three words.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Answers to name.")] = 8,
    questions: Annotated[
        Path | None, typer.Option(help="A file of questions in word2vec's format: the share answered rightly.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Answer an analogy by the cosine to B - A + C, in every table; the three words are never the answer."""
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.analogy import analogy as answer
    from reefknot.lab.evaluation.analogy import read_questions, score_questions
    from reefknot.vectors.lookup import Lookup

    if words and questions is not None:
        raise SettingsError("both words and --questions FILE are given; leave one of them out")
    if questions is None and len(words or []) != 3:
        raise SettingsError(f"give three words (there are {len(words or [])}), or --questions FILE")
    found: dict[str, Any]
    if questions is not None:
        sections = read_questions(questions)
        scores = {name: score_questions(table, sections) for name, table in open_tables(source).items()}
        found = {name: [_record(each) for each in figures] for name, figures in scores.items()}
        emit(found, "\n".join(_told(name, figures) for name, figures in scores.items()), as_json)
        return
    assert words is not None
    found = {}
    for name, table in open_tables(source).items():
        a, b, c = (table.words[row] for row in Lookup(table).require(words, str(source)))
        found[name] = meaningful(answer(table, a, b, c, k), table, (a, b, c), name)
    emit(found, "\n".join(f"{name}: {listed(answers)}" for name, answers in found.items()), as_json)


def _record(found: Accuracy) -> dict[str, Any]:
    return {**asdict(found), "accuracy": found.share}


def _told(name: str, figures: list[Accuracy]) -> str:
    width = max(len(each.name) for each in figures)
    return "\n".join([name, *(f"  {each.name:<{width}}  {_share(each)}" for each in figures)])


def _share(found: Accuracy) -> str:
    asked = f"{found.right:,} of {found.asked:,}"
    left_out = f", {found.of - found.asked:,} left out for an unknown word" if found.asked < found.of else ""
    if found.share is None:
        return f"undefined: no question could be asked{left_out}"
    return f"{found.share:6.1%}  ({asked}{left_out})"
