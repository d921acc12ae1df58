"""Shapes for the pictures of docs/ends.md, written as SVG.

A table is a ruled rectangle (its height the words, its width the vectors), a matrix a plain box, a vector a slim bar,
a step of computation a white box. Orange is what both ends hold, dashed what is optional. Shapes are placed by their
centre on a canvas 700 wide; `_x` in a text is a subscript.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

INK, FAINT, BAR = "#1f2933", "#5f6b76", "#9aa5b1"
COLOURS = {
    "table": ("#d6e4f2", "#4a6f94"),
    "shared": ("#fbd09a", "#b4600a"),
    "matrix": ("#e4def3", "#6b5ca5"),
    "shared matrix": ("#fbd09a", "#b4600a"),
    "vector": ("#a9dcc8", "#2b7a62"),
    "step": ("#ffffff", "#7b8794"),
}
BAND_WIDTHS = (104, 36, 14)
Point = tuple[float, float]


class Shape(NamedTuple):
    """The middles of the sides of what was drawn, for arrows to start and end at."""

    left: Point
    right: Point
    top: Point
    bottom: Point

    @classmethod
    def around(cls, x: float, y: float, w: float, h: float) -> Shape:
        return cls((x - w / 2, y), (x + w / 2, y), (x, y - h / 2), (x, y + h / 2))


class Picture:
    """An SVG that is written shape by shape."""

    def __init__(self, title: str, height: int) -> None:
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {height}" width="700" height="{height}" '
            'role="img" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{FAINT}"/></marker></defs>',
            f'<rect x="0.5" y="0.5" width="699" height="{height - 1}" rx="10" fill="#ffffff" stroke="#d8dee4"/>',
        ]

    def text(self, x: float, y: float, text: str, size: int = 13, anchor: str = "middle", colour: str = INK) -> None:
        lines = text.split("\n")
        for number, line in enumerate(lines):
            base = y + size * (0.35 + 1.25 * (number - (len(lines) - 1) / 2))
            style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
            self.lines.append(f'<text x="{x:g}" y="{base:g}" {style}>{_with_subscripts(line)}</text>')

    def note(self, x: float, y: float, text: str) -> None:
        """Small text below a height."""
        self.text(x, y + 4 + 7.5 * len(text.split("\n")), text, 12, colour=FAINT)

    def draw(
        self, kind: str, x: float, y: float, w: float, h: float, name: str = "", note: str = "", dashed: bool = False
    ) -> Shape:
        """A rectangle with its name inside and a note below."""
        fill, line = COLOURS[kind]
        radius = 6 if kind == "step" and h > 20 else 2
        place = f'x="{x - w / 2:g}" y="{y - h / 2:g}" width="{w:g}" height="{h:g}" rx="{radius}"'
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.lines.append(f'<rect {place} fill="{fill}" stroke="{line}"{dash}/>')
        if kind in ("table", "shared"):
            rows = "".join(f"M{x - w / 2:g} {y - h / 2 + row:g}h{w:g}" for row in range(8, int(h), 8))
            self.lines.append(f'<path d="{rows}" stroke="{line}" stroke-opacity="0.2"/>')
        self.text(x, y, name)
        self.note(x, y + h / 2, note)
        return Shape.around(x, y, w, h)

    def chart(self, x: float, y: float, heights: Sequence[float], note: str = "", mark: int | None = None) -> Shape:
        """Scores or a distribution: one bar per class, `mark` the target's."""
        w = 11 * len(heights)
        for number, height in enumerate(heights):
            fill = COLOURS["vector"][1] if number == mark else BAR
            place = (
                f'x="{x - w / 2 + 11 * number + 1:g}" y="{y + 20 - 40 * height:g}" width="9" height="{40 * height:g}"'
            )
            self.lines.append(f'<rect {place} fill="{fill}"/>')
        self.lines.append(f'<path d="M{x - w / 2:g} {y + 20:g}h{w:g}" stroke="{FAINT}"/>')
        self.note(x, y + 20, note)
        return Shape.around(x, y, w + 8, 44)

    def joint(self, x: float, y: float, sign: str) -> Shape:
        """A circle where two things meet."""
        self.lines.append(f'<circle cx="{x:g}" cy="{y:g}" r="13" fill="#ffffff" stroke="{INK}"/>')
        self.text(x, y, sign, 15 if len(sign) == 1 else 11)
        return Shape.around(x, y, 26, 26)

    def arrow(self, *points: Point, dashed: bool = False, opacity: float = 1.0) -> None:
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        faint = f' opacity="{opacity:g}"' if opacity < 1 else ""
        style = f'fill="none" stroke="{FAINT}" stroke-width="1.3" marker-end="url(#tip)"{dash}{faint}'
        self.lines.append(f'<path d="{path}" {style}/>')

    def svg(self) -> str:
        return "\n".join([*self.lines, "</svg>", ""])

    def chain(self, *shapes: Shape) -> None:
        """Arrows from the right of each shape to the left of the next."""
        for one, other in pairwise(shapes):
            self.arrow(one.right, other.left)


def _with_subscripts(line: str) -> str:
    first, *rest = re.split(r"(?<=[A-Za-zπ])_(\w)(?![a-z0-9])", line)
    found = escape(first, quote=False)
    for low, after in zip(rest[::2], rest[1::2], strict=True):
        found += f'<tspan dy="3" font-size="75%">{low}</tspan>'
        found += f'<tspan dy="-3">{escape(after, quote=False)}</tspan>' if after else ""
    return found


PICTURES: dict[str, str] = {}
"""Every picture that was drawn, as SVG, by name."""


def picture(title: str, height: int) -> Callable[[Callable[[Picture], None]], None]:
    """Keeps what a function draws, under the function's name."""

    def register(drawing: Callable[[Picture], None]) -> None:
        canvas = Picture(title, height)
        drawing(canvas)
        PICTURES[drawing.__name__] = canvas.svg()

    return register


def bands(p: Picture, kind: str, left: float, middles: Sequence[float], name: str = "") -> list[Shape]:
    """The three bands of a table: more and more words, narrower and narrower."""
    found = []
    for w, h, y, number in zip(BAND_WIDTHS, (34, 50, 80), middles, "123", strict=True):
        inside, below = (f"{name}_{number}", "") if w > 20 else ("", f"{name}_{number}")
        found.append(p.draw(kind, left + w / 2, y, w, h, inside if name else "", below if name else ""))
    return found


def meet(p: Picture, x: float, y: float) -> Shape:
    """Where context and class vectors meet, the bias joins and the scores leave."""
    dot = p.joint(x, y, "·")
    scores = p.chart(x, y + 85, (0.5, 0.9, 0.35, 0.7, 0.2, 0.45), "scores, one per class")
    p.arrow(dot.bottom, scores.top)
    p.text(x + 8, y + 32, "+ bias", 12, "start", FAINT)
    return dot
