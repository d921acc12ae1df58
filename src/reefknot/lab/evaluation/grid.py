"""Settings tried on a validation text, in every combination of a few values and beyond them where the best lies at an
end; and what such long work shares: the beginning of a text, word of how far things are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.lab.runs.result import Search
from reefknot.lab.runs.units import perplexity, shown
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary

EXTENSIONS = 4
"""How many values a search tries beyond the end of an axis, before it says that there may be better."""

Point = dict[str, float]
"""One value for each of the settings that are tried."""

Progress = Callable[[str, float], None]
"""Hears what is being done, and the share of it that is."""


def unheard(what: str, done: float) -> None:
    """For whoever does not want to know how far things are."""


@dataclass(frozen=True)
class Grid:
    """The mean loss at every point that was tried."""

    text: str
    """What it was measured on."""
    points: tuple[tuple[Point, float], ...]
    """In the order in which they were tried. Infinite where a point's loss was not a number."""
    note: str = ""
    """A sentence on what was not tried, and why."""

    @property
    def best(self) -> Point:
        return _best(self.points)

    @property
    def axes(self) -> dict[str, list[float]]:
        """Every value that was tried, if not in every combination."""
        names = self.points[0][0]
        return {name: sorted({point[name] for point, _ in self.points}) for name in names}

    @property
    def edges(self) -> list[str]:
        """The settings whose best value is the least or the greatest tried: a better one may lie beyond it."""
        found = []
        for name, values in self.axes.items():
            if len(values) > 1 and self.best[name] in (min(values), max(values)):
                found.append(name)
        return found

    def summary(self) -> Search:
        """Return what a saved evaluation keeps; a loss that was not a number is None."""
        tried = [{**point, "nll": nll if math.isfinite(nll) else None} for point, nll in self.points]
        return Search(
            text=self.text, best=self.best, edges=tuple(self.edges), note=self.note or None, points=tuple(tried)
        )

    def table(self) -> str:
        """Perplexities, the last setting from left to right, the others from top to bottom. * marks the best, - what
        was not tried, as the search went on in one setting alone."""
        *downward, across = self.axes
        best = tuple(self.best.values())
        cells = {
            (values := tuple(point.values())): f"{shown(perplexity(nll))}{'*' if values == best else ' '}"
            for point, nll in self.points
        }
        rows = [[*downward, *(f"{across} {_written(value)}" for value in self.axes[across])]]
        for values in sorted({tried[:-1] for tried in cells}):
            tried = [cells.get((*values, value), "- ") for value in self.axes[across]]
            rows.append([*map(_written, values), *tried])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        told = [f"perplexity of {self.text} (* the best)", *(line.rstrip() for line in lines)]
        if self.edges:
            edges = ", ".join(f"{name} {_written(self.best[name])}" for name in self.edges)
            told.append(f"the best values tried ({edges}) lie at the edge of the grid; there may be better beyond it")
        return "\n".join([*told, self.note] if self.note else told)


def search(
    axes: Mapping[str, Sequence[float]],
    measure: Callable[[Point, Progress], float],
    split: Split,
    progress: Progress = unheard,
    between: Mapping[str, tuple[float, float]] | None = None,
) -> Grid:
    """Measure the mean loss at every combination of the values; then, one setting after the other, go on beyond the end
    at which the best lies, for as long as that is better and stays `between` what has a meaning.

    The other settings are held at their best meanwhile, which no later one changes: so each has its turn once. A point
    that diverges is a bad one, not an error.
    """
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    count = len(combinations)
    free = [name for name, values in axes.items() if len(values) > 1]
    points: list[tuple[Point, float]] = []
    # With all that may follow, until it is known that it does not: so what is told never goes back.
    total = count + EXTENSIONS * len(free)

    def tell(_: str, done: float) -> None:
        progress(f"trying {count} settings or more on the {split.name} text", (len(points) + done) / total)

    def attempt(point: Point) -> None:
        nll = measure(point, tell)
        points.append((point, nll if math.isfinite(nll) else math.inf))
        tell("", 0.0)

    for point in combinations:
        attempt(point)
    if all(nll == math.inf for _, nll in points):
        raise NonFiniteError(f"none of {count} settings gives the {split.name} text a loss that is a number")
    for number, name in enumerate(free, start=1):
        best = _best(points)
        for value in further(axes[name], best[name], (between or {}).get(name)):
            attempt({**best, name: value})
            if _best(points)[name] != value:
                break
        total = len(points) + EXTENSIONS * (len(free) - number)
        tell("", 0.0)
    return Grid(f"the {split.name} text, {split.tokens:,} tokens", tuple(points))


def further(values: Sequence[float], end: float, between: tuple[float, float] | None = None) -> list[float]:
    """Values that go on beyond an end of an axis as its last two do: by their ratio where all are positive, else by
    their difference. None from its inside, nor where there is but one.

    Whole numbers stay whole; others are rounded to what is printed, so that they can be given as they are read.
    """
    ordered = sorted(set(values))
    if len(ordered) < 2 or end not in (ordered[0], ordered[-1]):
        return []
    inner = ordered[1] if end == ordered[0] else ordered[-2]
    whole, positive = all(isinstance(each, int) for each in values), ordered[0] > 0
    step = end / inner if positive else end - inner
    least, greatest = between or (0.0 if positive else -math.inf, math.inf)
    found: list[float] = []
    for _ in range(EXTENSIONS):
        exact = end * step if positive else end + step
        value = round(exact) if whole else float(f"{exact:.4g}")
        if value == end or not least < value < greatest:
            break
        found.append(value)
        end = value
    return found


def _best(points: Sequence[tuple[Point, float]]) -> Point:
    """Of equals the first that was tried, so that a search does not go on where nothing changes."""
    return min(points, key=lambda tried: tried[1])[0]


def _written(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def beginning(split: Split, tokens: int | None, vocabulary: Vocabulary) -> Split:
    """The first tokens of a text; itself where no fewer than all are asked for. Its words, lines and bytes are not
    counted but taken in proportion."""
    if tokens is None or tokens >= split.tokens:
        return split
    if tokens < 1:
        raise SettingsError(f"the first {tokens} tokens of a text were asked for: must be at least 1")
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
