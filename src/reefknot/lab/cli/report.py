"""`reefknot report`: write an HTML page about some runs."""

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
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write the page to.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Reefknot report",
    figures: Annotated[
        bool,
        typer.Option(
            "--figures", help="Also draw figures of the papers that need the weights or token losses of runs."
        ),
    ] = False,
    words: Annotated[
        list[str] | None,
        typer.Option(
            help="Words whose neighbours are shown, such as king,queen. Can be repeated. [default: common words]"
        ),
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page with tables, figures, curves, neighbours, samples and settings."""
    from reefknot.lab.papers.figures.section import build_sections
    from reefknot.lab.recipes.file import find_recipe, read_file, shipped
    from reefknot.lab.reports.page import write_report
    from reefknot.lab.reports.results import collect_runs
    from reefknot.lab.reports.rows import add_recipe_names, join_runs
    from reefknot.lab.reports.table import rows_from_recipe

    chosen_words = _split_words(words)
    results = collect_runs(runs)
    _check_figures(results, figures, data)
    known = [name for name in shipped() if any(result.recipe == name for result in results)]
    # Rows are in the order of their recipe. Rows without runs are left out; `reefknot table` shows them.
    listed = [row for name in known for row in rows_from_recipe(read_file(find_recipe(name)[0], name).rows, name)]
    rows = add_recipe_names(row for row in join_runs(listed, results) if row.results)
    if chosen_words:
        rows = _show_words(rows, chosen_words)
    drawn, notes = build_sections(results, weights=figures, data=data)
    for note in notes:
        typer.echo(note, err=True)
    page = write_report(results, output, rows=rows, title=title, sections=drawn).resolve()
    emit({"report": str(page), "runs": len(results)}, f"report: {page}", as_json)


def _check_figures(results: Sequence[Result], figures: bool, data: Path | None) -> None:
    """Raise an error if --figures or --data has no effect on a report of these runs."""
    from reefknot.errors import SettingsError
    from reefknot.lab.papers.figures import FIGURES, open_figure
    from reefknot.lab.papers.figures.runs import find_figure_runs

    if data is not None and not figures:
        raise SettingsError("--data has no effect without --figures; add --figures or leave --data out")
    if not figures:
        return
    opened = [
        figure for figure in map(open_figure, FIGURES) if figure.needs and find_figure_runs(figure, results) is not None
    ]
    if not opened:
        raise SettingsError(
            "--figures has no effect: no figure that reads weights or token losses is about these runs; leave it out"
        )
    if data is not None and not any("data" in figure.options for figure in opened):
        names = ", ".join(figure.name for figure in opened)
        raise SettingsError(f"--data has no effect: the figures of these runs ({names}) read no text; leave it out")


def _split_words(options: Sequence[str] | None) -> list[str]:
    """Return the words that --words names, without repetitions."""
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.neighbors import EXAMPLES

    parts = [part.strip() for option in options or [] for part in option.split(",")]
    words = list(dict.fromkeys(filter(None, parts)))
    if options and not words:
        raise SettingsError("--words: there is no word; list words, such as --words king,queen")
    if len(words) > EXAMPLES:
        raise SettingsError(
            f"--words: {len(words)} words, but a picture has colours for only {EXAMPLES}; name fewer words"
        )
    return words


def _show_words(rows: Sequence[TableRow], words: Sequence[str]) -> list[TableRow]:
    """Return the rows with these words instead of the words that training chose.

    A row that cannot show the words stays unchanged, and a note is printed. It is an error if no row can show them.
    """
    from reefknot.errors import DataError, ReefknotError
    from reefknot.lab.reports.embedding import with_words

    changed, errors = [], {}
    for row in rows:
        try:
            changed.append(with_words(row, lambda result: _look_at_words(result, words)))
        except ReefknotError as error:
            changed.append(row)
            errors[row.name] = error
    if all(new is old for new, old in zip(changed, rows, strict=True)):
        raise next(iter(errors.values()), DataError("--words: none of these runs is finished; leave --words out"))
    for name, message in errors.items():
        typer.echo(f"{name} shows the words that training chose: {message}", err=True)
    return changed


def _look_at_words(result: Result, words: Sequence[str]) -> Mapping[str, Stored]:
    """Return the neighbours and the picture of words, computed from the weights of a run."""
    from reefknot.lab.tasks import open_run
    from reefknot.lab.tasks.word_vectors import look_at_words
    from reefknot.vectors.lookup import Lookup

    trained = open_run(result.folder)
    tables = trained.vectors()
    known = min(tables.values(), key=len)  # an input end that reads spellings may have more words than the output
    tokens = [known.words[row] for row in Lookup(known).require(words, str(result.folder))]
    return look_at_words(tables, trained.vocabulary, tokens, tied=trained.model.tied)
