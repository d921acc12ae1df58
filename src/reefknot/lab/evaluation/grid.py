"""Grid search for evaluation settings on a validation text.

Start with `grid_search`, which measures the loss at every point, and continues beyond the grid if the best value is at
an edge:

    grid = grid_search({"theta": [0.1, 0.3, 1.0], "weight": [0.1, 0.2]}, measure, split)
    print(grid.best, grid.table())

The settings of the continuous cache (`cache.py`) and of dynamic evaluation (`dynamic.py`) are searched with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from reefknot.errors import NonFiniteError
from reefknot.lab.runs.definition import format_perplexity, perplexity
from reefknot.lab.runs.result import Search
from reefknot.lab.text.dataset import Split
from reefknot.storage.progress import ProgressCallback, ignore_progress

EXTENSIONS = 4
"""Maximum number of values that a search tries beyond one end of an axis."""

Point = dict[str, float]
"""A point of the grid: one value for each setting that is searched."""


@dataclass(frozen=True)
class Grid:
    """The mean loss at every point that was tried."""

    text: str
    """Description of the text that the loss was measured on."""
    points: tuple[tuple[Point, float], ...]
    """Points and their losses, in the order in which they were tried. A loss of NaN is stored as infinity."""
    note: str = ""
    """Which values were not tried, and why."""

    @property
    def best(self) -> Point:
        """The point with the smallest loss."""
        return _best_point(self.points)

    @property
    def axes(self) -> dict[str, list[float]]:
        """The values that were tried for each setting, not necessarily in every combination."""
        first_point, _ = self.points[0]
        axes = {}
        for name in first_point:
            tried_values = {point[name] for point, _ in self.points}
            axes[name] = sorted(tried_values)
        return axes

    @property
    def edges(self) -> list[str]:
        """Settings whose best value is the smallest or the largest value tried, so a better one may lie beyond it."""
        names = []
        for name, values in self.axes.items():
            if len(values) > 1 and self.best[name] in (min(values), max(values)):
                names.append(name)
        return names

    def summary(self) -> Search:
        """Return the search as it is saved with an evaluation. A loss that is not finite becomes None."""
        points: list[dict[str, float | None]] = []
        for point, nll in self.points:
            finite_nll = nll if math.isfinite(nll) else None
            points.append({**point, "nll": finite_nll})
        return Search(
            text=self.text, best=self.best, edges=tuple(self.edges), note=self.note or None, points=tuple(points)
        )

    def table(self) -> str:
        """Return a table of perplexities. The last setting varies from left to right, the others from top to bottom.

        `*` marks the best point. `-` marks points that were not tried: beyond the grid, only one setting varies.
        """
        # The perplexity at each point, by the values of the point.
        best_values = tuple(self.best.values())
        cells: dict[tuple[float, ...], str] = {}
        for point, nll in self.points:
            values = tuple(point.values())
            mark = "*" if values == best_values else " "
            cells[values] = f"{format_perplexity(perplexity(nll))}{mark}"

        # The rows of the table, header first.
        *row_names, column_name = self.axes
        column_values = self.axes[column_name]
        column_titles = [f"{column_name} {_format_value(value)}" for value in column_values]
        table_rows = [[*row_names, *column_titles]]
        for row_values in sorted({values[:-1] for values in cells}):
            row_titles = [_format_value(value) for value in row_values]
            row_cells = [cells.get((*row_values, value), "- ") for value in column_values]
            table_rows.append([*row_titles, *row_cells])

        # The lines of the text, with aligned columns.
        widths = [max(map(len, column)) for column in zip(*table_rows, strict=True)]
        lines = [f"perplexity of {self.text} (* the best)"]
        for table_row in table_rows:
            aligned_cells = [cell.rjust(width) for cell, width in zip(table_row, widths, strict=True)]
            lines.append("  ".join(aligned_cells).rstrip())
        if self.edges:
            edges = ", ".join(f"{name} {_format_value(self.best[name])}" for name in self.edges)
            lines.append(f"the best values ({edges}) are at the edge of the grid; there may be better values beyond it")
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


def grid_search(
    axes: Mapping[str, Sequence[float]],
    measure: Callable[[Point, ProgressCallback], float],
    split: Split,
    progress: ProgressCallback = ignore_progress,
    bounds: Mapping[str, tuple[float, float]] | None = None,
) -> Grid:
    """Measure the mean loss at every combination of values, then extend the axes whose best value is at an end.

    Each axis is extended in turn for as long as the loss improves. No axis is visited twice. The other settings keep
    their best values. A loss that is not finite is not an error; it counts as infinite.

    For example, with the axes {"a": [1, 2], "b": [0.1, 0.2]}, four points are tried. If a = 2, b = 0.1 is the best of
    them, a = 4, 8, ... are tried with b = 0.1 until the loss gets worse, and then b = 0.05, ... with the best a.

    Args:
        axes: The values to try for each setting.
        measure: Function that returns the mean loss at a point.
        split: The validation text.
        progress: Callback for progress.
        bounds: Exclusive bounds that extended values of a setting stay within.
    """
    grid_points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    grid_size = len(grid_points)
    searched_names = [name for name, values in axes.items() if len(values) > 1]
    points: list[tuple[Point, float]] = []
    # Assume that every extension is tried, so that the fraction never decreases.
    max_points = grid_size + EXTENSIONS * len(searched_names)

    def report(_: str, fraction: float) -> None:
        done_fraction = (len(points) + fraction) / max_points
        progress(f"trying {grid_size} settings or more on the {split.name} text", done_fraction)

    def try_point(point: Point) -> None:
        nll = measure(point, report)
        if not math.isfinite(nll):
            nll = math.inf
        points.append((point, nll))
        report("", 0.0)

    # Try every point of the grid.
    for point in grid_points:
        try_point(point)
    if all(nll == math.inf for _, nll in points):
        raise NonFiniteError(
            f"the loss on the {split.name} text is NaN or infinite at all {grid_size} points of the grid"
        )

    # Extend each axis for as long as the loss improves.
    bounds = bounds or {}
    for axis_number, name in enumerate(searched_names, start=1):
        best = _best_point(points)
        for value in extend_axis(axes[name], best[name], bounds.get(name)):
            try_point({**best, name: value})
            if _best_point(points)[name] != value:
                break
        remaining_axes = len(searched_names) - axis_number
        max_points = len(points) + EXTENSIONS * remaining_axes
        report("", 0.0)
    return Grid(f"the {split.name} text, {split.tokens:,} tokens", tuple(points))


def extend_axis(values: Sequence[float], edge: float, bounds: tuple[float, float] | None = None) -> list[float]:
    """Return values beyond `edge` if it is the smallest or largest of several values; otherwise an empty list.

    New values continue the ratio of the last two values if all are positive, and otherwise their difference. For
    example, the values 1, 2 and 4 continue with 8, 16, 32 and 64 beyond the edge 4. Integers stay integers.
    Other values are rounded to the printed digits, so that a printed value can be passed as an option.
    """
    sorted_values = sorted(set(values))
    if len(sorted_values) < 2 or edge not in (sorted_values[0], sorted_values[-1]):
        return []
    next_to_edge = sorted_values[1] if edge == sorted_values[0] else sorted_values[-2]
    all_integers = all(isinstance(value, int) for value in values)
    all_positive = sorted_values[0] > 0
    ratio_or_difference = edge / next_to_edge if all_positive else edge - next_to_edge
    if bounds is not None:
        minimum, maximum = bounds
    else:
        minimum = 0.0 if all_positive else -math.inf
        maximum = math.inf

    extension: list[float] = []
    last = edge
    for _ in range(EXTENSIONS):
        exact = last * ratio_or_difference if all_positive else last + ratio_or_difference
        value = round(exact) if all_integers else float(f"{exact:.4g}")
        if value == last or not minimum < value < maximum:
            break
        extension.append(value)
        last = value
    return extension


def _best_point(points: Sequence[tuple[Point, float]]) -> Point:
    """Return the best point. Among equal losses it is the first, so that a search stops when nothing changes."""
    losses = [nll for _, nll in points]
    best, _ = points[losses.index(min(losses))]
    return best


def _format_value(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
