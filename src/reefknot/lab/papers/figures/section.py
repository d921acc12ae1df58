"""Write figures of the papers as HTML.

`build_sections` returns sections of the report (`reefknot report`), and `render_page` returns a page of its own
(`reefknot figure`).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from reefknot.errors import ReefknotError
from reefknot.lab.papers.figures import FIGURES, open_figure
from reefknot.lab.papers.figures.contract import Figure, Measurements
from reefknot.lab.papers.figures.runs import find_figure_runs
from reefknot.lab.reports.drawing import Drawing
from reefknot.lab.reports.page import Section
from reefknot.lab.runs.loading import Result

_PAGE_TEMPLATE = """<!doctype html>
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


def build_sections(results: Sequence[Result], *, weights: bool, data: Path | None) -> tuple[list[Section], list[str]]:
    """Return a section for each figure whose rows (experiments) are among the runs, and messages about failed figures.

    Args:
        results: The runs.
        weights: Whether to include figures that read weights or token losses.
        data: The folder of the corpora.
    """
    sections = []
    messages = []
    for name in FIGURES:
        figure = open_figure(name)
        selected = find_figure_runs(figure, results)
        if selected is None or (figure.needs and not weights):
            continue
        try:
            measured = figure.measure(selected.runs, data=data)
            html = _format_body(figure, measured, figure.draw(measured), selected.notes)
        except ReefknotError as error:
            messages.append(f"{name} is left out: {error}")
            continue
        short_title, _, _ = figure.title.partition(": ")
        sections.append(Section(short_title, html, f"figure-{figure.slug}"))
    return sections, messages


def render_page(figure: Figure, measured: Measurements, notes: Sequence[str]) -> str:
    """Return a self-contained page for one figure, without scripts or network access."""
    body = _format_body(figure, measured, figure.draw(measured), notes)
    return _PAGE_TEMPLATE.format(title=escape(figure.title), body=body)


def _format_body(figure: Figure, measured: Measurements, drawing: Drawing, notes: Sequence[str]) -> str:
    """Return the description, the notes, the picture and the table of a figure as HTML."""
    table = escape("\n".join(figure.format_lines(measured)))
    notes_html = "".join(f"<p>Note: {escape(note)}.</p>\n" for note in notes)
    return (
        f"<p>{escape(figure.title)}. {escape(figure.description)}</p>\n{notes_html}"
        f"<figure>{drawing.svg}<figcaption>{escape(drawing.caption)}</figcaption></figure>\n"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(figure.title)}"><pre>{table}</pre></div>'
    )
