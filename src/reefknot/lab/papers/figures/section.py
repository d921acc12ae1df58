"""Figures of the papers as HTML: as sections of the report, and as separate pages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from reefknot.errors import ReefknotError
from reefknot.lab.papers.figures import FIGURES, open_figure
from reefknot.lab.papers.figures.contract import Figure, Measured
from reefknot.lab.papers.figures.runs import among
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.page import Section
from reefknot.lab.reports.results import Result

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font-family: system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem }}
.scroll {{ overflow-x: auto }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def sections(results: Sequence[Result], *, weights: bool, data: Path | None) -> tuple[list[Section], list[str]]:
    """Return a section for each figure whose rows are among the runs, and messages about figures that failed.

    Args:
        results: The runs.
        weights: Whether to include figures that read weights or token losses.
        data: The folder of the corpora.
    """
    shown, left_out = [], []
    for name in FIGURES:
        figure = open_figure(name)
        chosen = among(figure, results)
        if chosen is None or (figure.needs and not weights):
            continue
        try:
            measured = figure.measure(chosen.runs, data=data)
            html = _body(figure, measured, figure.draw(measured), chosen.notes)
        except ReefknotError as error:
            left_out.append(f"{name} is left out: {error}")
            continue
        shown.append(Section(figure.title.partition(": ")[0], html, f"figure-{figure.slug}"))
    return shown, left_out


def page(figure: Figure, measured: Measured, notes: Sequence[str]) -> str:
    """Return a self-contained page for one figure, without scripts or network access."""
    return _PAGE.format(title=escape(figure.title), body=_body(figure, measured, figure.draw(measured), notes))


def _body(figure: Figure, measured: Measured, drawing: Drawing, notes: Sequence[str]) -> str:
    table = escape("\n".join(figure.lines(measured)))
    notes_html = "".join(f"<p>Note: {escape(note)}.</p>\n" for note in notes)
    return (
        f"<p>{escape(figure.title)}. {escape(figure.shows)}</p>\n{notes_html}"
        f"<figure>{drawing.svg}<figcaption>{escape(drawing.caption)}</figcaption></figure>\n"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(figure.title)}"><pre>{table}</pre></div>'
    )
