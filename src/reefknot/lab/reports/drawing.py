"""Render matplotlib figures as inline SVG, SVG files or PNG, in the common style of all plots.

`Drawing` wraps a function that draws on a matplotlib `Figure`, and renders it:

    def draw(figure: Figure) -> None:
        figure.add_subplot().plot([1, 2], [3, 4], **row_style(0))

    Drawing("example", 2.8, ["our model"], draw, "A caption.").svg_file

`row_style` and `add_legend` give every row (one experiment of a recipe) its own colour, marker and line style.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from reefknot.lab.reports.footnotes import FOOTNOTE_SIGNS
from reefknot.lab.reports.rows import TableRow

# These colours are safe for colour-blind readers (after Okabe and Ito), and visible on white and on black.
COLOURS = ("#0e83c4", "#d5641c", "#12966f", "#b864a0", "#a88400", "#7d7f8c", "#5a4fcf", "#c2334d")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
POINT_STYLE = {"linestyle": "none", "markersize": 8, "fillstyle": "none", "markeredgewidth": 1.6}
"""The style of a row that is plotted as one point. Markers are hollow, so that points do not hide each other."""
_LINE_STYLES = ("-", "--", "-.", ":")
_FONTS = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"

# Placeholder that stands for the text colour of the page while matplotlib draws.
_TEXT_COLOUR = "#010203"
# A comment or a tag. Matplotlib escapes `<` and `>` in texts and in the values of attributes.
_TAG = re.compile(r"<!--.*?-->|<[^>]*>", re.DOTALL)
_FORBIDDEN_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_RC_PARAMS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.edgecolor": "#88888888",
    "axes.labelcolor": _TEXT_COLOUR,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#88888840",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "text.color": _TEXT_COLOUR,
    "xtick.color": "#888888",
    "ytick.color": "#888888",
    "xtick.labelcolor": _TEXT_COLOUR,
    "ytick.labelcolor": _TEXT_COLOUR,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
}


def describe_left_out(rows: Sequence[TableRow], reason: str) -> str:
    """Return a sentence that lists rows that are not plotted. Rows with a footnote are listed by its sign.

    The sentence begins with a space, so that it can be added to a caption. It is empty if there are no such rows.
    """
    if not rows:
        return ""
    signs: dict[str, None] = {}  # a dict keeps the order
    names = []
    for row in rows:
        _, _, last_word = row.name.rpartition(" ")
        is_sign = not last_word.strip(FOOTNOTE_SIGNS)
        if is_sign:
            signs[last_word] = None
        else:
            names.append(row.name)

    labels = names
    if signs:
        labels = [f"rows with {' or '.join(signs)}", *names]
    return f" Left out, because {reason}: {', '.join(labels)}."


def row_style(index: int) -> dict[str, Any]:
    """Return matplotlib's keyword arguments for the row with this index."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _LINE_STYLES[index % len(_LINE_STYLES)],
    }


def add_legend(figure: Figure, rows: Sequence[TableRow], plotted: Sequence[TableRow], *, points: bool = False) -> None:
    """Add a legend of the plotted rows below the plot.

    Args:
        figure: The figure.
        rows: All rows of the report. The style of a row follows from its position in them.
        plotted: The rows of this plot.
        points: Whether each row is plotted as one point instead of a line.
    """
    handles = []
    for row in plotted:
        style = row_style(rows.index(row))
        if points:
            style |= POINT_STYLE
        handles.append(Line2D([], [], **style))

    # matplotlib leaves out names that begin with an underscore.
    labels = [f" {row.name}" if row.name.startswith("_") else row.name for row in plotted]
    column_count = _count_legend_columns([row.name for row in plotted])
    figure.legend(handles, labels, loc="outside lower center", ncols=column_count, handlelength=2.6)


def _count_legend_columns(names: Sequence[str]) -> int:
    """Return the number of columns of a legend: two if all names are short."""
    longest = max(map(len, names), default=0)
    return 2 if longest <= 28 else 1


@dataclass(frozen=True)
class Drawing:
    """A plot that can be drawn as inline SVG, as an SVG file, or as PNG.

    Equal drawings produce equal bytes.
    """

    name: str
    """Prefix of all ids in the SVG, so that ids are unique in a page."""
    height: float
    """Height in inches, without the legend."""
    series: Sequence[str]
    """Names in the legend. The picture is made higher to leave space for them."""
    draw: Callable[[Figure], None]
    """Draws the plot on an empty figure."""
    caption: str
    width: float = 4.9
    """Width in inches."""

    @property
    def svg(self) -> str:
        """Inline SVG: without a prolog, with unique ids. Text stays text, in the font and colour of the page."""
        rendered = self._render("svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}).decode()
        view_box = re.search(r'viewBox="[^"]*"', rendered)
        assert view_box is not None

        # Remove the opening tag, the metadata and the style sheet.
        start_of_body = rendered.index(">", rendered.index("<svg")) + 1
        body = rendered[start_of_body:]
        body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.S)
        body = _FORBIDDEN_IN_XML.sub("\ufffd", body)
        body = _TAG.sub(self._adapt_tag, body)
        body = "\n".join(line.strip() for line in body.split("\n") if line.strip())
        caption = _FORBIDDEN_IN_XML.sub("\ufffd", self.caption)
        return f'<svg {view_box[0]} role="img" aria-label="{escape(caption)}" stroke-linejoin="round">\n{body}\n'

    def _adapt_tag(self, match: re.Match[str]) -> str:
        """Return a tag with unique ids, which leaves the font family and the text colour to the page.

        Only tags are changed, because a word may look like markup.
        """
        tag = match[0]
        if tag.startswith("<!--"):
            return tag
        tag = tag.replace("xlink:href", "href")
        tag = re.sub(r'(?<= id=")|(?<=url\(#)|(?<=href="#)', f"{self.name}-", tag)
        tag = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", tag)
        tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
        return tag.replace(_TEXT_COLOUR, "currentColor")

    @property
    def svg_file(self) -> str:
        """The content of a standalone SVG file with a white background."""
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="{_FONTS}" color="#1f2933" '
        opening_tag, body = self.svg.replace("<svg ", opening, 1).split("\n", 1)
        return f'{opening_tag}\n<rect width="100%" height="100%" fill="#ffffff"/>\n{body}'

    @property
    def png(self) -> bytes:
        """A PNG at twice the resolution of a standard screen."""
        return self._render("png", dpi=200, facecolor="white", metadata={"Software": None})

    def _render(self, format: str, **options: Any) -> bytes:
        """Draw the plot in a file format of matplotlib. `options` are arguments of `Figure.savefig`."""
        legend_lines = math.ceil(len(self.series) / _count_legend_columns(self.series))
        legend_height = 0.2 * legend_lines
        with mpl.rc_context(_RC_PARAMS | {"svg.hashsalt": self.name}), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # the browser draws the text with its own fonts
            figure = Figure(figsize=(self.width, self.height + legend_height), layout="constrained")
            self.draw(figure)
            buffer = io.BytesIO()
            figure.savefig(buffer, format=format, **options)
        return buffer.getvalue()
