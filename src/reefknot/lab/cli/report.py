"""`reefknot report`: one HTML page about some runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import AsJson, Data, emit

if TYPE_CHECKING:
    from reefknot.lab.reports.results import Result
    from reefknot.lab.reports.rows import TableRow
    from reefknot.lab.runs.stored import Stored

EXAMPLES = """\b
Examples:
  reefknot report runs/demo -o demo.html
  reefknot report runs/demo/tied/seed0 runs/demo/untied/seed0
  reefknot report runs/press2017 --figures --data DIR
  reefknot report runs/demo --words file,string,list
"""


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold runs.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Reefknot report",
    figures: Annotated[
        bool, typer.Option("--figures", help="Also the papers' figures that open weights or losses of the runs.")
    ] = False,
    words: Annotated[
        list[str] | None,
        typer.Option(help="Words to show with their neighbours, as king,queen; repeatable. [default: common ones]"),
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page: table, the papers' figures, curves, neighbours, samples, settings."""
    from reefknot.lab.papers.figures.section import sections
    from reefknot.lab.recipes.catalogue import find_recipe, shipped
    from reefknot.lab.recipes.file import read_file
    from reefknot.lab.reports.page import write_report
    from reefknot.lab.reports.results import collect
    from reefknot.lab.reports.rows import join, name_recipes
    from reefknot.lab.reports.table import from_recipe

    chosen = _words(words)
    results = collect(runs)
    known = [name for name in shipped() if any(result.recipe == name for result in results)]
    # In the order of their recipe; what it lists beside them is the business of `table`.
    listed = [row for name in known for row in from_recipe(read_file(find_recipe(name)[0], name).rows, name)]
    rows = name_recipes(row for row in join(listed, results) if row.results)
    if chosen:
        rows = _showing(rows, chosen)
    made, left_out = sections(results, weights=figures, data=data)
    for note in left_out:
        typer.echo(note, err=True)
    page = write_report(results, output, rows=rows, title=title, sections=made).resolve()
    emit({"report": str(page), "runs": len(results)}, f"report: {page}", as_json)


def _words(given: Sequence[str] | None) -> list[str]:
    """What --words names, each once."""
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.pca import EXAMPLES

    words = list(dict.fromkeys(word for each in given or [] for part in each.split(",") if (word := part.strip())))
    if given and not words:
        raise SettingsError("--words: names no word; list some, as --words king,queen")
    if len(words) > EXAMPLES:
        raise SettingsError(f"--words: {len(words)} words, and a picture has colours for {EXAMPLES}; name fewer")
    return words


def _showing(rows: Sequence[TableRow], words: Sequence[str]) -> list[TableRow]:
    """The rows with these words in place of those that training chose. One that cannot show them stays as it is, which
    is told; where none can, it is an error."""
    from reefknot.errors import DataError, ReefknotError
    from reefknot.lab.reports.embedding import with_words

    found, faults = [], {}
    for row in rows:
        try:
            found.append(with_words(row, lambda result: _look(result, words)))
        except ReefknotError as error:
            found.append(row)
            faults[row.name] = error
    if all(new is old for new, old in zip(found, rows, strict=True)):
        raise next(iter(faults.values()), DataError("--words: none of these runs is finished; leave it out"))
    for name, fault in faults.items():
        typer.echo(f"{name} shows words of its own: {fault}", err=True)
    return found


def _look(result: Result, words: Sequence[str]) -> Mapping[str, Stored]:
    """Neighbours and a picture of the words, by the weights of a run."""
    from reefknot.lab.tasks import open_run
    from reefknot.lab.tasks.word_vectors import look_at_words
    from reefknot.vectors.lookup import Lookup

    trained = open_run(result.folder)
    tables = trained.vectors()
    known = min(tables.values(), key=len)  # an input end may spell words that the output has not
    tokens = [known.words[row] for row in Lookup(known).require(words, str(result.folder))]
    return look_at_words(tables, trained.vocabulary, tokens, tied=trained.model.tied)
