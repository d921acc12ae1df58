"""How a matrix of scores is cut into blocks that fit a memory budget.

Shapes: N rows (tokens), V classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
    """Bytes that a block takes, and what makes blocks efficient on a device."""

    score: float
    """Per score of a block."""
    all_classes: int = 0
    """Once, where all classes are scored at once: a copy of the class vectors, an accumulator of their gradient."""
    row: int = 0
    """Per row, where the classes come in blocks: an accumulator of the row's gradient."""
    per_class: int = 0
    """Per class of a block of classes: a copy of its vector."""
    fewest_rows: int = 64
    """Below it, reading and writing all class vectors for each block of rows costs more than a second pass."""
    fewest_classes: int = 1024
    multiple: int = 8
    """Blocks of rows and classes are multiples of it where they can be."""


def plan_blocks(rows: int, classes: int, costs: Costs, budget: int, group: int = 1) -> Blocks:
    """The fastest blocks within a budget of bytes; the smallest sensible ones where nothing fits.

    `group`: so many consecutive rows stay together.
    """
    rows, classes = max(rows, 1), max(classes, 1)
    fit = int((budget - costs.all_classes) // (costs.score * classes))
    if fit >= min(rows, max(costs.fewest_rows, group)):
        return Blocks(_even(rows, fit, group, costs.multiple), classes)
    at_once = rows
    while True:
        free = budget - at_once * costs.row
        fit = int(free // (costs.score * at_once + costs.per_class))
        if fit >= min(classes, costs.fewest_classes) or at_once <= max(costs.fewest_rows, group):
            break
        at_once = _up(-(-at_once // 2), group)
    fit = max(fit, min(classes, 256))
    return Blocks(min(at_once, rows), _even(classes, fit, 1, max(costs.multiple, 256)))


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
