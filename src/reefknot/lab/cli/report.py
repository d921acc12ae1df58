"""`reefknot report`: write an HTML page about some runs (folders of trained models), or their results as CSV.

This subcommand collects the results of the runs and passes them to `lab/reports/page.py`, which writes the page, or to
`lab/runs/tables.py`, which writes CSV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import DataOption, JsonOption, print_result, reject_options

if TYPE_CHECKING:
    from reefknot.lab.reports.rows import TableRow
    from reefknot.lab.runs.loading import Result
    from reefknot.lab.runs.stored import Stored

EXAMPLES = """\b
Examples:
  reefknot report runs/demo -o demo.html
  reefknot report runs/demo/tied/seed0 runs/demo/untied/seed0
  reefknot report runs/press2017 --figures --data DIR
  reefknot report runs/demo --words file,string,list
  reefknot report runs/demo --csv -o demo.csv        # one line per run, for a spreadsheet or pandas
"""


def report(
    ctx: typer.Context,
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold runs.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write. [default: report.html, or the standard output with --csv]"),
    ] = None,
    csv: Annotated[
        bool, typer.Option("--csv", help="Write the results as CSV instead of a page, with one line per run.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="Heading of the page. [default: the title of the recipe]")] = None,
    figures: Annotated[
        bool,
        typer.Option(
            "--figures",
            help="Also draw the papers' figures that are computed from the weights or token losses of the runs.",
        ),
    ] = False,
    words: Annotated[
        list[str] | None,
        typer.Option(
            help="Words to show the nearest neighbours of, such as king,queen. Can be repeated. [default: common words]"
        ),
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML report about runs, in one file.

    It has tables of scores, figures, learning curves, nearest neighbours of words, generated text and all settings. The
    results are also in the page as CSV, and --csv writes only them.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.papers.figures.section import build_sections
    from reefknot.lab.reports.page import recipe_title, write_report
    from reefknot.lab.reports.table import rows_in_recipe_order
    from reefknot.lab.runs.loading import collect_runs

    if csv:
        reject_options(ctx, {"title", "figures", "words", "data", "as_json"}, "with --csv; leave {option} out")
        _write_csv(collect_runs(runs), output)
        return
    if output is not None and output.suffix == ".csv":
        raise SettingsError(f"-o {output}: without --csv, this is an HTML page; add --csv, or use another name")
    chosen_words = _parse_words(words)
    results = collect_runs(runs)
    _check_figures(results, figures, data)

    rows = rows_in_recipe_order(results)
    if chosen_words:
        rows = _replace_words(rows, chosen_words)

    # Draw the figures and write the page.
    figure_sections, notes = build_sections(results, weights=figures, data=data)
    for note in notes:
        typer.echo(note, err=True)
    output = output or Path("report.html")
    title = recipe_title(results) if title is None else title
    report_path = write_report(results, output, rows=rows, title=title, sections=figure_sections).resolve()
    record = {"report": str(report_path), "runs": len(results)}
    print_result(record, f"report: {report_path}", as_json)


def _write_csv(results: Sequence[Result], output: Path | None) -> None:
    """Write the results of runs as CSV to a file, or to the standard output without a file."""
    from reefknot.lab.cli.bench.record import check_output_file
    from reefknot.lab.runs.tables import result_rows, to_csv
    from reefknot.storage.files import write_text

    check_output_file("-o", output)
    table = to_csv([row for result in results for row in result_rows(result)])
    if output is None:
        typer.echo(table, nl=False)
    else:
        write_text(output, table)
        typer.echo(f"results: {output.resolve()}")


def _check_figures(results: Sequence[Result], figures: bool, data: Path | None) -> None:
    """Raise an error if --figures or --data has no effect on a report of these runs."""
    from reefknot.errors import SettingsError
    from reefknot.lab.papers.figures import FIGURES, open_figure
    from reefknot.lab.papers.figures.runs import find_figure_runs

    if data is not None and not figures:
        raise SettingsError("--data has no effect without --figures; add --figures or leave --data out")
    if not figures:
        return
    matching_figures = []
    for name in FIGURES:
        figure = open_figure(name)
        if figure.needs and find_figure_runs(figure, results) is not None:
            matching_figures.append(figure)
    if not matching_figures:
        raise SettingsError(
            "--figures has no effect: no figure that reads weights or token losses is about these runs; leave "
            "--figures out"
        )
    if data is not None and not any("data" in figure.options for figure in matching_figures):
        names = ", ".join(figure.name for figure in matching_figures)
        raise SettingsError(f"--data has no effect: the figures of these runs ({names}) read no text; leave --data out")


def _parse_words(options: Sequence[str] | None) -> list[str]:
    """Return the words in all values of --words, without repetitions: ["a,b", "b,c"] becomes ["a", "b", "c"]."""
    from reefknot.errors import SettingsError
    from reefknot.lab.evaluation.neighbors import NUM_EXAMPLES

    words: list[str] = []
    for option in options or []:
        for part in option.split(","):
            word = part.strip()
            if word and word not in words:
                words.append(word)
    if options and not words:
        raise SettingsError("--words: there is no word; list words, such as --words king,queen")
    if len(words) > NUM_EXAMPLES:
        raise SettingsError(
            f"--words: {len(words)} words, but a picture has colours for only {NUM_EXAMPLES}; list fewer words"
        )
    return words


def _replace_words(rows: Sequence[TableRow], words: Sequence[str]) -> list[TableRow]:
    """Return the rows with the neighbours of these words instead of the words that training chose.

    A row without weights, or without one of the words, stays unchanged, and a note is printed. It is an error if all
    rows stay unchanged.
    """
    from reefknot.errors import DataError, ReefknotError
    from reefknot.lab.reports.embedding import with_words

    new_rows = []
    errors_by_row: dict[str, ReefknotError] = {}
    for row in rows:
        try:
            new_rows.append(with_words(row, lambda result: _find_neighbors(result, words)))
        except ReefknotError as error:
            new_rows.append(row)
            errors_by_row[row.name] = error

    if all(new_row is row for new_row, row in zip(new_rows, rows, strict=True)):
        if errors_by_row:
            raise next(iter(errors_by_row.values()))
        raise DataError("--words: none of these runs is finished; leave --words out")
    for name, row_error in errors_by_row.items():
        typer.echo(f"{name} shows the words that training chose: {row_error}", err=True)
    return new_rows


def _find_neighbors(result: Result, words: Sequence[str]) -> Mapping[str, Stored]:
    """Compute the nearest neighbours of words, and a picture of them, from the weights of a run.

    They replace the fields of the run's result.json with the same names.
    """
    from reefknot.lab.tasks import open_run
    from reefknot.lab.tasks.word_vectors import describe_words
    from reefknot.vectors.lookup import Lookup

    trained = open_run(result.folder)
    tables = trained.vectors()
    # An input end that reads spellings may have more words than the output end. All tables have the words of the
    # smallest.
    smallest = min(tables.values(), key=len)
    table_rows = Lookup(smallest).require(words, str(result.folder))
    tokens = [smallest.words[table_row] for table_row in table_rows]
    return describe_words(tables, trained.vocabulary, tokens, tied=trained.model.tied)
