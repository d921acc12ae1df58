"""`reefknot compare`: test whether one system is better than another or the difference is noise.

Each task has its own comparison: `lab/tasks/compare_texts.py` and `compare_translations.py`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from reefknot.lab.cli.options import AsJson, Data, emit
from reefknot.lab.cli.systems import open_system

EXAMPLES = """\b
Examples:
  reefknot compare runs/demo/untied/seed0 runs/demo/tied/seed0
  reefknot compare runs/demo/untied runs/demo/tied --json          # all seeds of both rows
  reefknot compare A B --by documents --bands --data DIR
  reefknot compare BASELINE THREE-WAY --split valid                  # translators, by BLEU
  reefknot compare runs/demo/tied runs/demo/drill --bands --figure bands.svg
"""

LANGUAGE_MODELS = "Language models"


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Two or more systems: run folders, or folders with one run per seed. The first system is A."
        ),
    ],
    split: Annotated[str, typer.Option(help="Text to compare on: valid or test.")] = "test",
    by: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=LANGUAGE_MODELS,
            help="Units of text to resample: blocks or documents. Documents begin at headings, or after empty lines if "
            "there are no headings. The default is blocks.",
        ),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=LANGUAGE_MODELS, help="Number of tokens in a block. The default is 500."),
    ] = None,
    bands: Annotated[
        bool,
        typer.Option(
            "--bands",
            rich_help_panel=LANGUAGE_MODELS,
            help="Also compare by the training frequency of the target and of the token before it.",
        ),
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=LANGUAGE_MODELS, help="Draw the differences that --bands computes into this SVG file."
        ),
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Compare systems with the first one: language models by perplexity, translators by BLEU.

    Language models are compared by a paired bootstrap over blocks or documents of the text, and translators by a
    paired bootstrap over sentences. If a system was trained with several seeds, their spread widens the interval.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.tasks import compare_systems
    from reefknot.lab.tasks.requests import ComparisonRequest

    systems = [open_system(path) for path in runs]
    if len(systems) < 2:
        raise SettingsError("compare needs at least two systems; name two or more folders, each of which is one system")
    if figure is not None and figure.suffix.lower() != ".svg":
        raise SettingsError(f"--figure {figure}: the figure is an SVG file; use a name that ends in .svg")
    request = ComparisonRequest(split=split, data=data, by=by, block=block, bands=bands, figure=figure)
    answer = compare_systems(systems, request, notify=partial(typer.echo, err=True))
    record, text = answer.record(), answer.text()
    if figure is not None:
        _draw(figure, record)
        text += f"\nfigure: {figure.resolve()}"
    emit(record, text, as_json)


def _draw(path: Path, comparisons: list[dict[str, Any]]) -> None:
    """Draw bars of the differences by training frequency, as in Figure 3 of Pappas & Henderson (2019)."""
    from reefknot.lab.evaluation.frequency import TypeComparison
    from reefknot.lab.papers.figures.relative_loss import CAPTION, band_json, draw_bands
    from reefknot.storage.files import write_text

    first = comparisons[0]["a"]
    bands = {
        comparison["b"]: [band_json(TypeComparison(**band)) for band in comparison["bands"]["target"]]
        for comparison in comparisons
    }
    caption = f"Loss against {first}, A; lower is better. {CAPTION}"
    axes = "B less A, % of A's loss", "B less A, % of B's loss"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, draw_bands("bands", bands, caption, axes, title_suffix=f", against {first}").svg_file)
