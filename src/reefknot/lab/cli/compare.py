"""`reefknot compare`: test whether one system is better than another, or whether the difference is noise.

A system is a model that was trained with one or more seeds (`lab/cli/systems.py`). Each task has its own comparison:
`lab/tasks/compare_texts.py` for language models and `compare_translations.py` for translators.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import (
    DataOption,
    DeviceOption,
    JsonOption,
    OtherEncodingOption,
    OtherFieldOption,
    OtherTextOption,
    print_result,
)
from reefknot.lab.cli.systems import open_system

if TYPE_CHECKING:
    from reefknot.lab.reports.drawing import Drawing
    from reefknot.lab.tasks.requests import ComparisonAnswer, System

EXAMPLES = """\b
Examples:
  reefknot compare runs/demo/untied/seed0 runs/demo/tied/seed0
  reefknot compare runs/demo/untied runs/demo/tied --json          # all seeds of both rows
  reefknot compare A B --by documents --bands --data DIR
  reefknot compare A B --text news.txt.gz                          # on another text, which both score now
  reefknot compare BASELINE THREE-WAY --split valid                  # translators, by BLEU
  reefknot compare runs/demo/tied runs/demo/drill --bands --figure bands.svg
  reefknot compare runs/demo/untied runs/demo/tied --html compare.html    # a page with the intervals
  reefknot compare plain.safetensors drill.safetensors     # scores of transformers models, from rk.hf.score_tokens
"""

LANGUAGE_MODELS_PANEL = "Language models"


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Two or more systems: run folders, or folders that hold one run per seed. All systems are compared "
            "with the first. Scores of Hugging Face models: files of rk.hf.score_tokens, or folders of such files, one "
            "per seed."
        ),
    ],
    split: Annotated[str, typer.Option(help="Text to compare the systems on: valid or test.")] = "test",
    by: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=LANGUAGE_MODELS_PANEL,
            help="Units of text that the bootstrap resamples: blocks or documents. A document begins at a heading, or "
            "after an empty line if the text has no headings. [default: blocks]",
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(min=5, rich_help_panel=LANGUAGE_MODELS_PANEL, help="Number of tokens in a block. [default: 500]"),
    ] = None,
    bands: Annotated[
        bool,
        typer.Option(
            "--bands",
            rich_help_panel=LANGUAGE_MODELS_PANEL,
            help="Also compare by frequency: group tokens by how often they, or the tokens before them, occur in the "
            "training text.",
        ),
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=LANGUAGE_MODELS_PANEL, help="Draw the differences of --bands as bars in this SVG file."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a report about the runs to this HTML file, with the differences and their intervals."),
    ] = None,
    text: OtherTextOption = None,
    field: OtherFieldOption = None,
    encoding: OtherEncodingOption = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Test whether trained models differ significantly: language models by perplexity, translators by BLEU.

    A system is a model that was trained with one or more seeds. The test is a paired bootstrap, over blocks or
    documents of the text for language models, and over sentences for translators. If there are several seeds, the
    interval also reflects the spread over the seeds.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.cli.bench.record import check_output_file
    from reefknot.lab.tasks import compare_systems
    from reefknot.lab.tasks.compare_scores import compare_score_files, find_score_files
    from reefknot.lab.tasks.requests import ComparisonRequest
    from reefknot.storage.files import write_text

    score_files = [find_score_files(path) for path in runs]
    systems = [] if any(score_files) else [open_system(path) for path in runs]
    if len(runs) < 2:
        raise SettingsError("compare needs at least two systems; pass two or more folders, one per system")
    if systems:
        _reject_repetition(run.path for system in systems for run in system.runs)
    else:
        _reject_repetition(file for score_file in score_files if score_file for file in score_file.files)
    if figure is not None and figure.suffix.lower() != ".svg":
        raise SettingsError(f"--figure {figure}: the figure is an SVG file; use a name that ends in .svg")

    check_output_file("--html", html)

    request = ComparisonRequest(
        split=split,
        data=data,
        text=text,
        field=field,
        encoding=encoding,
        device=device,
        by=by,
        block=block,
        bands=bands,
        figure=figure,
    )
    notify = partial(typer.echo, err=True)
    comparison: ComparisonAnswer
    if any(score_files):
        if html is not None or text is not None:
            option = "--text" if html is None else "--html"
            raise SettingsError(f"{option} has no effect on files of scores, which are not runs; leave it out")
        comparison = compare_score_files(runs, score_files, request, notify=notify)
    else:
        comparison = compare_systems(systems, request, notify=notify)
    record = comparison.record()
    output = comparison.text()
    if figure is not None:
        figure.parent.mkdir(parents=True, exist_ok=True)
        write_text(figure, _draw_bands(record).svg_file)
        output += f"\nfigure: {figure.resolve()}"
    if html is not None:
        _write_page(html, systems, comparison)
        output += f"\nreport: {html.resolve()}"
    print_result(record, output, as_json)


def _reject_repetition(paths: Iterable[Path]) -> None:
    """Raise an error if a run or a file of scores is in two systems. Its difference from itself is always zero."""
    from reefknot.errors import SettingsError

    seen = set()
    for path in paths:
        if path.resolve() in seen:
            raise SettingsError(f"{path} is in two of the systems; pass systems without common runs")
        seen.add(path.resolve())


def _write_page(path: Path, systems: list[System], comparison: ComparisonAnswer) -> None:
    """Write the report about the runs of all systems, with a section on the comparison."""
    from reefknot.lab.reports.comparison import build_section, list_rows
    from reefknot.lab.reports.page import write_report
    from reefknot.lab.reports.table import rows_in_recipe_order
    from reefknot.lab.runs.loading import load_run
    from reefknot.lab.runs.tables import to_csv

    # Systems are named after their rows, or after their folders if rows have equal names.
    results = [load_run(run.path) for system in systems for run in system.runs]
    row_by_folder = {result.folder: result.row for result in results}
    names = [row_by_folder[system.runs[0].path] for system in systems]
    if len(set(names)) < len(names):
        names = [str(system.path) for system in systems]

    records = comparison.record()
    plots = [_draw_bands(records)] if "bands" in records[0] else []
    section = build_section(records, names, comparison.description, plots)
    rows = rows_in_recipe_order(results)
    tables = {"comparison.csv": to_csv(list_rows(records))}
    title = f"{' and '.join(names[1:])} compared with {names[0]}"
    write_report(results, path, rows=rows, title=title, sections=[section], tables=tables)


def _draw_bands(comparisons: list[dict[str, Any]]) -> Drawing:
    """Plot the difference in every frequency band as a bar, as in Figure 3 of Pappas & Henderson (2019).

    A frequency band is a group of words that occur about equally often in the training text.
    """
    from reefknot.lab.evaluation.frequency import TypeComparison
    from reefknot.lab.papers.figures.relative_loss import CAPTION, band_json, draw_bands

    baseline = comparisons[0]["a"]
    bands_by_system = {}
    for comparison in comparisons:
        target_bands = [TypeComparison(**band) for band in comparison["bands"]["target"]]
        bands_by_system[comparison["b"]] = [band_json(band) for band in target_bands]
    caption = f"Loss against {baseline}, A; lower is better. {CAPTION}"
    axis_labels = "B - A, % of A's loss", "B - A, % of B's loss"
    return draw_bands("bands", bands_by_system, caption, axis_labels, title_suffix=f", against {baseline}")
