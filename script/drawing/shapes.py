"""Draw the shapes of the pictures in docs/ends.md: boxes, bar charts, circles and arrows.

`picture` registers a function that draws one picture on a `Canvas`; `ends.py` defines all pictures. A picture is 700
units wide, y grows downwards, and shapes are placed by their centre.

A table is a ruled rectangle with one row per word. A matrix is a plain box, a vector a slim bar, and a step of
computation a white box. "shared" before a kind makes the shape orange, because the input end (embedding) and the
output end (classifier and loss) both hold it. "dashed" means that it is optional.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from reefknot.lab.reports.drawing import Drawing

WIDTH = 700
FAINT_COLOUR, BAR_COLOUR = "#5f6b76", "#9aa5b1"
# The fill and the outline of each kind of box.
COLOURS = {
    "table": ("#d6e4f2", "#4a6f94"),
    "matrix": ("#e4def3", "#6b5ca5"),
    "vector": ("#a9dcc8", "#2b7a62"),
    "step": ("#ffffff", "#7b8794"),
    "shared": ("#fbd09a", "#b4600a"),
}
PICTURES: dict[str, Drawing] = {}
"""Every picture, by the name of its file."""
Point = tuple[float, float]


class Shape(NamedTuple):
    """The midpoints of the sides of a shape, where arrows start and end."""

    left: Point
    right: Point
    top: Point
    bottom: Point

    @classmethod
    def around(cls, x: float, y: float, width: float, height: float) -> Shape:
        """Return the shape with this centre and size."""
        return cls((x - width / 2, y), (x + width / 2, y), (x, y - height / 2), (x, y + height / 2))


class Canvas(NamedTuple):
    """Axes on which shapes are drawn."""

    axes: Axes

    def text(self, x: float, y: float, text: str, align: str = "center", *, size: int = 12, faint: bool = True) -> None:
        """Write text that is centred vertically at y."""
        colour = {"color": FAINT_COLOUR} if faint else {}
        self.axes.text(x, y, text, size=size, ha=align, va="center", linespacing=1.25, **colour)

    def box(self, kind: str, x: float, y: float, width: float, height: float, name: str = "", note: str = "") -> Shape:
        """Draw a rectangle with its name inside and a note below.

        `kind` is a key of `COLOURS`, such as "table", with "shared" or "dashed" before it: "shared table".
        """
        *modifiers, base_kind = kind.split()
        fill, outline = COLOURS["shared" if "shared" in modifiers else base_kind]
        left, top = x - width / 2, y - height / 2
        bottom = top + height
        corner_radius = 6 if base_kind == "step" and height > 20 else 2
        corners = f"round,pad=0,rounding_size={corner_radius}"
        dash = "--" if "dashed" in modifiers else "-"
        self.axes.add_patch(FancyBboxPatch((left, top), width, height, corners, fc=fill, ec=outline, lw=1, ls=dash))
        if base_kind == "table":
            rule_ys = range(int(top) + 8, int(bottom), 8)
            self.axes.hlines(rule_ys, left, left + width, outline, lw=1, alpha=0.2)
        self.text(x, y, name, size=13, faint=False)
        note_lines = len(note.split("\n"))
        self.text(x, bottom + 4 + 7.5 * note_lines, note)
        return Shape.around(x, y, width, height)

    def chart(self, x: float, y: float, heights: Sequence[float], note: str = "", target: int | None = None) -> Shape:
        """Draw scores or a distribution: one bar per class, in colour for the target."""
        width = 11 * len(heights)
        left = x - width / 2
        centres = [left + 5.5 + 11 * index for index in range(len(heights))]
        colours = [COLOURS["vector"][1] if index == target else BAR_COLOUR for index in range(len(heights))]
        self.axes.bar(centres, [-40 * height for height in heights], 9, y + 20, color=colours)
        self.axes.hlines(y + 20, left, left + width, FAINT_COLOUR, lw=1)
        self.text(x, y + 32, note)
        return Shape.around(x, y, width + 8, 44)

    def joint(self, x: float, y: float, sign: str) -> Shape:
        """Draw a circle with the sign of an operation in it."""
        self.axes.plot(x, y, "o", ms=26, mfc="white", mec="#1f2933", mew=1)
        self.text(x, y, sign, size=15, faint=False)
        return Shape.around(x, y, 26, 26)

    def arrow(self, *points: Point, dash: str = "-") -> None:
        """Draw an arrow along straight lines through the points."""
        style = {
            "arrowstyle": "-|>,head_length=0.5,head_width=0.25",
            "mutation_scale": 12,
            "color": FAINT_COLOUR,
            "lw": 1.3,
        }
        self.axes.add_patch(FancyArrowPatch(path=Path(points), ls=dash, **style))

    def chain(self, *shapes: Shape) -> None:
        """Draw an arrow from each shape to the next, to its left or right side."""
        for start, end in pairwise(shapes):
            if start.left < end.left:
                self.arrow(start.right, end.left)
            else:
                self.arrow(start.left, end.right)


def picture(height: int) -> Callable[[Callable[[Canvas], None]], None]:
    """Register a function that draws a picture of this height, under the function's name.

    The docstring of the function is the caption:

        @picture(180)
        def word(canvas: Canvas) -> None:
            \"\"\"A word table: one row of the same dimension per word\"\"\"
    """

    def register(draw: Callable[[Canvas], None]) -> None:
        def draw_figure(figure: Figure) -> None:
            figure.set_layout_engine("none")
            axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
            axes.axis("off")
            draw(Canvas(axes))

        PICTURES[draw.__name__] = Drawing(draw.__name__, height / 72, [], draw_figure, draw.__doc__ or "", WIDTH / 72)

    return register
