"""Choose how to cut the N x V matrix of scores into blocks that fit a memory budget.

`choose_block_size` is the function to start from. It gets the size of the matrix, the memory that a block takes
(`BlockCosts`) and a budget in bytes, and returns the size of a block (`BlockSize`):

    choose_block_size(2048, 50_000, BlockCosts(bytes_per_score=12), budget=2**27)    ->  BlockSize(208, 50_000)

Shapes: N rows (tokens), V classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

MIN_CLASSES = 256
"""The minimum number of classes in a block, whatever the budget: a product with fewer classes is too slow."""


@dataclass(frozen=True)
class BlockSize:
    """The number of rows and classes of a block.

    If a block has all classes, one pass over the scores of its rows gives their losses and gradients. With fewer
    classes the normalisers take a separate pass: a third more arithmetic, in exchange for memory that does not grow
    with the vocabulary.
    """

    rows: int
    classes: int

    def row_slices(self, num_rows: int) -> Iterator[slice]:
        """Yield slices that cut `num_rows` rows into blocks."""
        return _cut(num_rows, self.rows)

    def class_slices(self, num_classes: int) -> Iterator[slice]:
        """Yield slices that cut `num_classes` classes into blocks."""
        return _cut(num_classes, self.classes)


@dataclass(frozen=True)
class BlockCosts:
    """The memory that a block takes, and the block sizes that are efficient on a device."""

    bytes_per_score: float
    bytes_per_row: int = 0
    """Copies of a row, and an accumulator for its gradient."""
    bytes_per_class: int = 0
    """Copies of a class vector."""
    accumulator_bytes: int = 0
    """Memory in which the gradients of all classes are summed if there are several blocks of rows."""
    min_rows: int = 64
    """With fewer rows per block, reading and writing all class vectors for each block costs more than a second pass."""
    min_classes: int = 1024
    """With fewer classes per block, products are slow."""
    size_multiple: int = 8
    """Block sizes are multiples of this number where possible."""

    def total_bytes(self, rows: int, classes: int, several: bool) -> float:
        """Return the bytes that a block takes. `several`: the matrix has several blocks of rows."""
        scores = rows * (self.bytes_per_score * classes + self.bytes_per_row)
        return scores + classes * self.bytes_per_class + several * self.accumulator_bytes


def choose_block_size(
    num_rows: int, num_classes: int, costs: BlockCosts, budget: int, group: int = 1, all_rows: bool = False
) -> BlockSize:
    """Return the fastest block size within a budget of bytes, or the smallest sensible one if none fits.

    Args:
        num_rows: Number of rows of the whole matrix, N.
        num_classes: Number of classes of the whole matrix, V.
        costs: The memory that a block takes.
        budget: Working memory in bytes.
        group: Number of consecutive rows that must be in the same block, such as the experts of a mixture.
        all_rows: Prefer blocks with all rows and some classes to blocks with all classes and some rows, if the latter
            need an accumulator. The gradient of a class then comes from a single block.
    """
    num_rows, num_classes = max(num_rows, 1), max(num_classes, 1)
    # First choice: the whole matrix is one block.
    if costs.total_bytes(num_rows, num_classes, several=False) <= budget:
        return BlockSize(num_rows, num_classes)
    if all_rows and costs.accumulator_bytes:
        max_classes = _count_classes(num_rows, costs, budget)
        if max_classes >= min(num_classes, costs.min_classes):
            return BlockSize(num_rows, _even_classes(num_classes, max_classes, costs))
    # Second choice: all classes of some rows.
    min_rows = min(num_rows, max(costs.min_rows, group))
    budget_for_rows = budget - costs.total_bytes(0, num_classes, several=True)
    max_rows = int(budget_for_rows // (costs.bytes_per_score * num_classes + costs.bytes_per_row))
    if max_rows >= min_rows:
        return BlockSize(even_size(num_rows, max_rows, costs.size_multiple, group), num_classes)
    return _cut_rows_and_classes(num_rows, num_classes, costs, budget, group, min_rows)


def _cut_rows_and_classes(
    num_rows: int, num_classes: int, costs: BlockCosts, budget: int, group: int, min_rows: int
) -> BlockSize:
    """Return the size of blocks with some of the classes, and with all rows if enough classes fit."""
    enough_classes = min(num_classes, costs.min_classes)
    rows = num_rows
    max_classes = _count_classes(rows, costs, budget)
    if max_classes < enough_classes and costs.accumulator_bytes:
        return _cut_with_accumulator(num_rows, num_classes, costs, budget, group)
    # Fewer rows leave memory for more classes.
    while max_classes < enough_classes and rows > min_rows:
        rows = _round_up(-(-rows // 2), group)
        max_classes = _count_classes(rows, costs, budget)
    return BlockSize(rows, _even_classes(num_classes, max_classes, costs))


def _cut_with_accumulator(num_rows: int, num_classes: int, costs: BlockCosts, budget: int, group: int) -> BlockSize:
    """Return a block size if the copies of all rows and the accumulator each leave too little of the budget.

    Blocks with all rows need the copies of all rows, and other blocks need the accumulator. Either way, blocks may take
    a quarter of what is needed in any case, even if the budget is smaller: smaller blocks would be slow and save
    little. Of the two sizes, return the one that exceeds the budget less, or else the larger one.
    """
    row_bytes = costs.total_bytes(num_rows, 0, several=False)
    max_classes = _count_classes(num_rows, costs, max(budget, row_bytes * 5 / 4))
    all_rows = BlockSize(num_rows, _even_classes(num_classes, max_classes, costs))
    block_budget = max(budget - costs.accumulator_bytes, costs.accumulator_bytes // 4)
    some_rows = choose_block_size(num_rows, num_classes, replace(costs, accumulator_bytes=0), block_budget, group)

    def cost(size: BlockSize) -> tuple[float, int]:
        total_bytes = costs.total_bytes(size.rows, size.classes, several=size.rows < num_rows)
        return max(total_bytes, budget), -size.rows * size.classes

    return min(all_rows, some_rows, key=cost)


def _count_classes(rows: int, costs: BlockCosts, budget: float) -> int:
    """Return how many classes fit into a block with this number of rows. It is negative if the rows do not fit."""
    free_bytes = budget - costs.total_bytes(rows, 0, several=False)
    return int(free_bytes // (costs.bytes_per_score * rows + costs.bytes_per_class))


def _even_classes(num_classes: int, max_classes: int, costs: BlockCosts) -> int:
    """Return a number of classes per block that cuts the classes evenly. It is at least `MIN_CLASSES`."""
    max_classes = max(max_classes, min(num_classes, MIN_CLASSES))
    return even_size(num_classes, max_classes, max(costs.size_multiple, MIN_CLASSES))


def even_size(total: int, limit: int, multiple: int, group: int = 1) -> int:
    """Return a block size of at most `limit` that cuts `total` evenly, rounded up to `multiple` if that fits.

    For example, 100 rows with a limit of 99 are cut into two blocks of 50 to 56 rows, not into 99 rows and 1 row.
    """
    limit = max(limit // group * group, group)
    if limit >= total:
        return total
    num_blocks = -(-total // limit)
    size = _round_up(-(-total // num_blocks), group)
    rounded = _round_up(_round_up(size, multiple), group)
    if rounded > limit:
        rounded = limit // multiple * multiple // group * group or size
    return rounded


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _cut(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
