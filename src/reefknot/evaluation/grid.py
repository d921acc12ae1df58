"""Settings tried on a validation text, in every combination of a few values; and what such long work shares: the
beginning of a text, word of how far things are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.evaluation.units import perplexity, shown
from reefknot.text.dataset import Split
from reefknot.text.vocabulary import Vocabulary

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
    """In the order of the axes, the last running fastest. Infinite where a point's loss was not a number."""

    @property
    def best(self) -> Point:
        return min(self.points, key=lambda tried: tried[1])[0]

    @property
    def axes(self) -> dict[str, list[float]]:
        names = self.points[0][0]
        return {name: list(dict.fromkeys(point[name] for point, _ in self.points)) for name in names}

    @property
    def edges(self) -> list[str]:
        """The settings whose best value is the least or the greatest tried: a better one may lie beyond it."""
        found = []
        for name, values in self.axes.items():
            if len(values) > 1 and self.best[name] in (min(values), max(values)):
                found.append(name)
        return found

    def record(self) -> dict[str, Any]:
        """What --json prints; a loss that was not a number is null."""
        tried = [{**point, "nll": nll if math.isfinite(nll) else None} for point, nll in self.points]
        return {"text": self.text, "best": self.best, "edges": self.edges, "points": tried}

    def table(self) -> str:
        """Perplexities, the last setting from left to right, the others from top to bottom; * marks the best."""
        *downward, across = self.axes
        best = self.best
        rows = [[*downward, *(f"{across} {value:.4g}" for value in self.axes[across])]]
        for values, tried in groupby(self.points, key=lambda each: [each[0][name] for name in downward]):
            cells = [f"{shown(perplexity(nll))}{'*' if point == best else ' '}" for point, nll in tried]
            rows.append([*(f"{value:.4g}" for value in values), *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        told = [f"perplexity of {self.text} (* the best)", *(line.rstrip() for line in lines)]
        if self.edges:
            edges = ", ".join(f"{name} {best[name]:.4g}" for name in self.edges)
            told.append(f"the best values tried ({edges}) lie at the edge of the grid; there may be better beyond it")
        return "\n".join(told)


def search(
    axes: Mapping[str, Sequence[float]],
    measure: Callable[[Point, Progress], float],
    split: Split,
    progress: Progress = unheard,
) -> Grid:
    """Measure the mean loss at every combination of the values. A point that diverges is a bad one, not an error."""
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    count = len(combinations)
    points: list[tuple[Point, float]] = []

    def tell(_: str, done: float) -> None:
        progress(f"trying {count} settings on the {split.name} text", (len(points) + done) / count)

    for point in combinations:
        nll = measure(point, tell)
        points.append((point, nll if math.isfinite(nll) else math.inf))
        tell("", 0.0)
    if all(nll == math.inf for _, nll in points):
        raise NonFiniteError(f"none of {count} settings gives the {split.name} text a loss that is a number")
    return Grid(f"the {split.name} text, {split.tokens:,} tokens", tuple(points))


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
    )
