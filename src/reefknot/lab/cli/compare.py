"""`reefknot compare`: test whether one system is better than another, or whether the difference is noise.

A system is a model that was trained with one or more seeds (`lab/cli/systems.py`). Each task has its own comparison:
`lab/tasks/compare_texts.py` for language models and `compare_translations.py` for translators.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from reefknot.lab.cli.options import DataOption, JsonOption, print_result
from reefknot.lab.cli.systems import open_system

EXAMPLES = """\b
Examples:
  reefknot compare runs/demo/untied/seed0 runs/demo/tied/seed0
  reefknot compare runs/demo/untied runs/demo/tied --json          # all seeds of both rows
  reefknot compare A B --by documents --bands --data DIR
  reefknot compare BASELINE THREE-WAY --split valid                  # translators, by BLEU
  reefknot compare runs/demo/tied runs/demo/drill --bands --figure bands.svg
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
        typer.Option(min=1, rich_help_panel=LANGUAGE_MODELS_PANEL, help="Number of tokens in a block. [default: 500]"),
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
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Test whether trained models differ significantly: language models by perplexity, translators by BLEU.

    A system is a model that was trained with one or more seeds. The test is a paired bootstrap, over blocks or
    documents of the text for language models, and over sentences for translators. If there are several seeds, the
    interval also reflects the spread over the seeds.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.tasks import compare_systems
    from reefknot.lab.tasks.compare_scores import compare_score_files, find_score_files
    from reefknot.lab.tasks.requests import Answer, ComparisonRequest

    score_files = [find_score_files(path) for path in runs]
    systems = [] if any(score_files) else [open_system(path) for path in runs]
    if len(runs) < 2:
        raise SettingsError("compare needs at least two systems; pass two or more folders, one per system")
    if figure is not None and figure.suffix.lower() != ".svg":
        raise SettingsError(f"--figure {figure}: the figure is an SVG file; use a name that ends in .svg")

    request = ComparisonRequest(split=split, data=data, by=by, block=block, bands=bands, figure=figure)
    notify = partial(typer.echo, err=True)
    comparison: Answer
    if any(score_files):
        comparison = compare_score_files(runs, score_files, request, notify=notify)
    else:
        comparison = compare_systems(systems, request, notify=notify)
    record = comparison.record()
    text = comparison.text()
    if figure is not None:
        _plot_bands(figure, record)
        text += f"\nfigure: {figure.resolve()}"
    print_result(record, text, as_json)


def _plot_bands(figure_path: Path, comparisons: list[dict[str, Any]]) -> None:
    """Plot the difference in every frequency band as a bar, as in Figure 3 of Pappas & Henderson (2019).

    A frequency band is a group of words that occur about equally often in the training text.
    """
    from reefknot.lab.evaluation.frequency import TypeComparison
    from reefknot.lab.papers.figures.relative_loss import CAPTION, band_json, draw_bands
    from reefknot.storage.files import write_text

    baseline = comparisons[0]["a"]
    bands_by_system = {}
    for comparison in comparisons:
        target_bands = [TypeComparison(**band) for band in comparison["bands"]["target"]]
        bands_by_system[comparison["b"]] = [band_json(band) for band in target_bands]
    caption = f"Loss against {baseline}, A; lower is better. {CAPTION}"
    axis_labels = "B - A, % of A's loss", "B - A, % of B's loss"
    plot = draw_bands("bands", bands_by_system, caption, axis_labels, title_suffix=f", against {baseline}")
    figure_path.parent.mkdir(parents=True, exist_ok=True)
    write_text(figure_path, plot.svg_file)
