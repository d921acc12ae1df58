"""Choose blocks of a score matrix that fit a memory budget.

Shapes: N rows (tokens), V classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

LEAST_CLASSES = 256
"""The least number of classes in a block, whatever the budget: a product with fewer classes is too slow."""


@dataclass(frozen=True)
class Blocks:
    """The number of rows and classes of a block.

    If a block has all classes, one pass over the scores of its rows gives their losses and gradients. With fewer
    classes the normalisers take a separate pass: a third more arithmetic, in exchange for memory that does not grow
    with the vocabulary.
    """

    rows: int
    classes: int

    def over_rows(self, rows: int) -> Iterator[slice]:
        """Yield slices that cut `rows` rows into blocks."""
        return _slices(rows, self.rows)

    def over_classes(self, classes: int) -> Iterator[slice]:
        """Yield slices that cut `classes` classes into blocks."""
        return _slices(classes, self.classes)


@dataclass(frozen=True)
class Costs:
    """The memory that a block takes, and the block sizes that are efficient on a device."""

    score: float
    """Bytes per score of a block."""
    row: int = 0
    """Bytes per row of a block: copies of the row, and an accumulator for its gradient."""
    one_class: int = 0
    """Bytes per class of a block: copies of its vector."""
    accumulator: int = 0
    """Bytes in which the gradients of all classes are summed if there are several blocks of rows."""
    fewest_rows: int = 64
    """With fewer rows per block, reading and writing all class vectors for each block costs more than a second pass."""
    fewest_classes: int = 1024
    """With fewer classes per block, products are slow."""
    multiple: int = 8
    """Block sizes are multiples of this number where possible."""

    def bytes_of(self, rows: int, classes: int, blocked: bool) -> float:
        """Return the bytes that a block takes. `blocked`: the matrix has more rows than the block."""
        return rows * (self.score * classes + self.row) + classes * self.one_class + blocked * self.accumulator


def plan_blocks(rows: int, classes: int, costs: Costs, budget: int, group: int = 1) -> Blocks:
    """Return the fastest blocks within a budget of bytes, or the smallest sensible ones if none fit.

    Args:
        rows: Number of rows of the whole matrix, N.
        classes: Number of classes of the whole matrix, V.
        costs: The memory that a block takes.
        budget: Working memory in bytes.
        group: Number of consecutive rows that must be in the same block, such as the experts of a mixture.
    """
    rows, classes = max(rows, 1), max(classes, 1)
    if costs.bytes_of(rows, classes, blocked=False) <= budget:
        return Blocks(rows, classes)
    fewest = min(rows, max(costs.fewest_rows, group))
    fit = int((budget - costs.bytes_of(0, classes, blocked=True)) // (costs.score * classes + costs.row))
    if fit >= fewest:
        return Blocks(_even(rows, fit, group, costs.multiple), classes)
    # Cut both into blocks. Fewer rows leave memory for more classes, until the accumulator takes that memory.
    most: dict[int, int] = {}
    at_once = rows
    while True:
        free = budget - costs.bytes_of(at_once, 0, blocked=at_once < rows)
        most[at_once] = int(free // (costs.score * at_once + costs.one_class))
        if most[at_once] >= min(classes, costs.fewest_classes) or at_once <= fewest:
            break
        at_once = _round_up(-(-at_once // 2), group)
    least = min(classes, LEAST_CLASSES)
    sensible = [size for size, fit in most.items() if fit >= least]
    at_once = max(sensible, key=lambda size: min(most[size], costs.fewest_classes)) if sensible else min(most)
    return Blocks(min(at_once, rows), _even(classes, max(most[at_once], least), 1, max(costs.multiple, LEAST_CLASSES)))


def _even(total: int, most: int, group: int, multiple: int) -> int:
    """Return a block size of at most `most` that cuts `total` evenly, rounded up to `multiple` if that fits."""
    most = max(most // group * group, group)
    size = _round_up(-(-total // -(-total // most)), group)
    rounded = _round_up(_round_up(size, multiple), group)
    if rounded > most:
        rounded = most // multiple * multiple // group * group or size
    return min(rounded, total)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
