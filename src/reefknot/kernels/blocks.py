"""How a matrix of scores is cut into blocks that fit a memory budget.

Shapes: N rows (tokens), V classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LEAST_CLASSES = 256
"""Fewer at once are not worth a product, whatever the budget."""


@dataclass(frozen=True)
class Blocks:
    """So many rows and so many classes at once.

    With all classes at once, one pass over the scores of some rows gives their losses and gradients. With fewer, the
    normalisers take a pass of their own: a third more arithmetic, for memory that does not grow with the vocabulary.
    """

    rows: int
    classes: int

    def over_rows(self, rows: int) -> Iterator[slice]:
        return _slices(rows, self.rows)

    def over_classes(self, classes: int) -> Iterator[slice]:
        return _slices(classes, self.classes)


@dataclass(frozen=True)
class Costs:
    """Bytes that blocks take, and what makes them efficient on a device."""

    score: float
    """Per score of a block."""
    row: int = 0
    """Per row of a block: copies of it, an accumulator of its gradient."""
    one_class: int = 0
    """Per class of a block: copies of its vector."""
    accumulator: int = 0
    """Where there are several blocks of rows: what the gradients of all classes are added up in."""
    fewest_rows: int = 64
    """Below it, reading and writing all class vectors for each block of rows costs more than a second pass."""
    fewest_classes: int = 1024
    multiple: int = 8
    """Blocks of rows and classes are multiples of it where they can be."""

    def of(self, rows: int, classes: int, blocked: bool) -> float:
        """Bytes of blocks of so many rows and classes; `blocked`: there are other rows."""
        return rows * (self.score * classes + self.row) + classes * self.one_class + blocked * self.accumulator


def plan_blocks(rows: int, classes: int, costs: Costs, budget: int, group: int = 1) -> Blocks:
    """The fastest blocks within a budget of bytes; the smallest sensible ones where nothing fits.

    `group`: so many consecutive rows stay together.
    """
    rows, classes = max(rows, 1), max(classes, 1)
    if costs.of(rows, classes, blocked=False) <= budget:
        return Blocks(rows, classes)
    fewest = min(rows, max(costs.fewest_rows, group))
    fit = int((budget - costs.of(0, classes, blocked=True)) // (costs.score * classes + costs.row))
    if fit >= fewest:
        return Blocks(_even(rows, fit, group, costs.multiple), classes)
    # Both in blocks. Fewer rows leave room for more classes, up to where their accumulator takes it.
    most: dict[int, int] = {}
    at_once = rows
    while True:
        free = budget - costs.of(at_once, 0, blocked=at_once < rows)
        most[at_once] = int(free // (costs.score * at_once + costs.one_class))
        if most[at_once] >= min(classes, costs.fewest_classes) or at_once <= fewest:
            break
        at_once = _up(-(-at_once // 2), group)
    least = min(classes, LEAST_CLASSES)
    sensible = [size for size, fit in most.items() if fit >= least]
    at_once = max(sensible, key=lambda size: min(most[size], costs.fewest_classes)) if sensible else min(most)
    return Blocks(min(at_once, rows), _even(classes, max(most[at_once], least), 1, max(costs.multiple, LEAST_CLASSES)))


def _even(total: int, most: int, group: int, multiple: int) -> int:
    """A size of at most `most` that cuts the total into equal blocks, rounded up to a multiple where that fits."""
    most = max(most // group * group, group)
    size = _up(-(-total // -(-total // most)), group)
    rounded = _up(_up(size, multiple), group)
    if rounded > most:
        rounded = most // multiple * multiple // group * group or size
    return min(rounded, total)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
