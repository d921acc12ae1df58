"""Grid search for settings on a validation text. It continues beyond the grid if the best value is at an edge.

This module also has helpers that long evaluations share: the beginning of a text, and progress reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.lab.runs.definition import format_perplexity, perplexity
from reefknot.lab.runs.result import Search
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary

EXTENSIONS = 4
"""Maximum number of values that a search tries beyond one end of an axis."""

Point = dict[str, float]
"""A point of the grid: one value for each setting that is searched."""

Progress = Callable[[str, float], None]
"""Callback for progress. It is called with a description of the work and the fraction that is done."""


def ignore_progress(what: str, done: float) -> None:
    """Ignore progress reports."""


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
        return _best(self.points)

    @property
    def axes(self) -> dict[str, list[float]]:
        """The values that were tried for each setting, not necessarily in every combination."""
        names = self.points[0][0]
        return {name: sorted({point[name] for point, _ in self.points}) for name in names}

    @property
    def edges(self) -> list[str]:
        """Settings whose best value is the smallest or the largest value tried, so a better one may lie beyond it."""
        return [
            name
            for name, values in self.axes.items()
            if len(values) > 1 and self.best[name] in (min(values), max(values))
        ]

    def summary(self) -> Search:
        """Return the search as it is saved with an evaluation. A loss that is not finite becomes None."""
        tried = [{**point, "nll": nll if math.isfinite(nll) else None} for point, nll in self.points]
        return Search(
            text=self.text, best=self.best, edges=tuple(self.edges), note=self.note or None, points=tuple(tried)
        )

    def table(self) -> str:
        """Return a table of perplexities. The last setting varies from left to right, the others from top to bottom.

        `*` marks the best point. `-` marks points that were not tried: beyond the grid, only one setting varies.
        """
        *downward, across = self.axes
        best = tuple(self.best.values())
        cells = {
            (values := tuple(point.values())): f"{format_perplexity(perplexity(nll))}{'*' if values == best else ' '}"
            for point, nll in self.points
        }
        rows = [[*downward, *(f"{across} {_formatted(value)}" for value in self.axes[across])]]
        for values in sorted({tried[:-1] for tried in cells}):
            tried = [cells.get((*values, value), "- ") for value in self.axes[across]]
            rows.append([*map(_formatted, values), *tried])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        lines = [f"perplexity of {self.text} (* the best)", *(line.rstrip() for line in lines)]
        if self.edges:
            edges = ", ".join(f"{name} {_formatted(self.best[name])}" for name in self.edges)
            lines.append(f"the best values ({edges}) are at the edge of the grid; there may be better values beyond it")
        return "\n".join([*lines, self.note] if self.note else lines)


def search(
    axes: Mapping[str, Sequence[float]],
    measure: Callable[[Point, Progress], float],
    split: Split,
    progress: Progress = ignore_progress,
    between: Mapping[str, tuple[float, float]] | None = None,
) -> Grid:
    """Measure the mean loss at every combination of values, then extend the axes whose best value is at an end.

    Each axis is extended in turn for as long as the loss improves. No axis is visited twice. The other settings keep
    their best values. A loss that is not finite is not an error; it counts as infinite.

    Args:
        axes: The values to try for each setting.
        measure: Function that returns the mean loss at a point.
        split: The validation text.
        progress: Callback for progress.
        between: Bounds, exclusive, that extended values of a setting stay within.
    """
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    count = len(combinations)
    free = [name for name, values in axes.items() if len(values) > 1]
    points: list[tuple[Point, float]] = []
    # Assume that every extension is tried, so that the fraction never decreases.
    total = count + EXTENSIONS * len(free)

    def report(_: str, done: float) -> None:
        progress(f"trying {count} settings or more on the {split.name} text", (len(points) + done) / total)

    def attempt(point: Point) -> None:
        nll = measure(point, report)
        points.append((point, nll if math.isfinite(nll) else math.inf))
        report("", 0.0)

    for point in combinations:
        attempt(point)
    if all(nll == math.inf for _, nll in points):
        raise NonFiniteError(f"the loss on the {split.name} text is NaN or infinite at all {count} points of the grid")
    for number, name in enumerate(free, start=1):
        best = _best(points)
        for value in extend_axis(axes[name], best[name], (between or {}).get(name)):
            attempt({**best, name: value})
            if _best(points)[name] != value:
                break
        total = len(points) + EXTENSIONS * (len(free) - number)
        report("", 0.0)
    return Grid(f"the {split.name} text, {split.tokens:,} tokens", tuple(points))


def extend_axis(values: Sequence[float], end: float, between: tuple[float, float] | None = None) -> list[float]:
    """Return values beyond `end` if it is the smallest or largest of several values; otherwise an empty list.

    New values continue the ratio of the last two values if all are positive, and otherwise their difference. Integers
    stay integers. Other values are rounded to the printed digits, so that a printed value can be passed as an option.
    """
    ordered = sorted(set(values))
    if len(ordered) < 2 or end not in (ordered[0], ordered[-1]):
        return []
    inner = ordered[1] if end == ordered[0] else ordered[-2]
    whole, positive = all(isinstance(value, int) for value in values), ordered[0] > 0
    step = end / inner if positive else end - inner
    least, greatest = between or (0.0 if positive else -math.inf, math.inf)
    extension: list[float] = []
    for _ in range(EXTENSIONS):
        exact = end * step if positive else end + step
        value = round(exact) if whole else float(f"{exact:.4g}")
        if value == end or not least < value < greatest:
            break
        extension.append(value)
        end = value
    return extension


def _best(points: Sequence[tuple[Point, float]]) -> Point:
    """Return the best point. Among equal losses it is the first, so that a search stops when nothing changes."""
    return min(points, key=lambda tried: tried[1])[0]


def _formatted(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def beginning(split: Split, tokens: int | None, vocabulary: Vocabulary) -> Split:
    """Return the first `tokens` tokens of a text, or the whole text if it is not longer.

    The numbers of words, lines and bytes are estimated in proportion, not counted.
    """
    if tokens is None or tokens >= split.tokens:
        return split
    if tokens < 1:
        raise SettingsError(f"cannot take the first {tokens} tokens of a text: must be at least 1")
    ids = split.ids[:tokens]
    share = tokens / split.tokens
    return replace(
        split,
        name=f"shortened {split.name}",
        ids=ids,
        spelled=None if split.spelled is None else split.spelled[:tokens],
        unknown=0 if vocabulary.unk is None else int((ids == vocabulary.unk).sum()),
        words=round(split.words * share),
        lines=round(split.lines * share),
        bytes=max(1, round(split.bytes * share)),
        sha256=None,
    )
