"""Blocks of scores cover every score once, fit the memory budget and never split a group of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.kernels.blocks import MIN_CLASSES, BlockCosts, BlockSize, choose_block_size


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, int, BlockCosts, int, int]:
    """Draw rows, classes, costs, a budget and a group size, typical of language models and unusual."""
    group = draw(st.sampled_from([1, 1, 3, 15, 100]))
    rows = group * draw(st.integers(1, 3000))
    classes = draw(st.integers(1, 300_000))
    dim = draw(st.integers(1, 2000))
    copied = draw(st.booleans())
    costs = BlockCosts(
        bytes_per_score=draw(st.sampled_from([0.1, 2.0, 12.0])),
        bytes_per_row=8 * dim,
        bytes_per_class=2 * dim * copied,
        accumulator_bytes=2 * dim * classes * draw(st.booleans()),
        min_rows=draw(st.sampled_from([64, 512])),
        size_multiple=draw(st.sampled_from([8, 128])),
    )
    return rows, classes, costs, draw(st.integers(0, 2**34)), group


def bytes_of(blocks: BlockSize, rows: int, costs: BlockCosts) -> float:
    """Return the bytes of one block by the definitions of the costs."""
    scores, copies = costs.bytes_per_score * blocks.rows * blocks.classes, costs.bytes_per_class * blocks.classes
    return scores + copies + costs.bytes_per_row * blocks.rows + (costs.accumulator_bytes if blocks.rows < rows else 0)


def least_bytes(rows: int, classes: int, costs: BlockCosts, group: int) -> float:
    """Return how many bytes blocks may take, whatever the budget.

    Blocks with all rows need the copies of all rows, and other blocks need the accumulator. Blocks may take a quarter
    of that, or have the smallest number of classes.
    """
    few_classes = min(classes, MIN_CLASSES)
    few_rows = BlockSize(min(rows, max(costs.min_rows, group)), few_classes)
    accumulator = costs.accumulator_bytes
    with_all_rows = max(5 / 4 * rows * costs.bytes_per_row, bytes_of(BlockSize(rows, few_classes), rows, costs))
    return min(with_all_rows, accumulator + max(accumulator / 4, bytes_of(few_rows, few_rows.rows, costs)))


@given(plans())
def test_every_score_is_in_exactly_one_block(plan: tuple[int, int, BlockCosts, int, int]) -> None:
    rows, classes, *_ = plan
    blocks = choose_block_size(*plan)
    for total, slices in ((rows, blocks.row_slices(rows)), (classes, blocks.class_slices(classes))):
        end = 0
        for block in slices:
            assert block.start == end < block.stop
            end = block.stop
        assert end == total


@given(plans(), st.booleans())
def test_blocks_fit_the_memory_budget(plan: tuple[int, int, BlockCosts, int, int], all_rows: bool) -> None:
    rows, classes, costs, budget, group = plan
    blocks = choose_block_size(*plan, all_rows)
    assert bytes_of(blocks, rows, costs) <= max(budget, least_bytes(rows, classes, costs, group))


def test_many_rows_of_few_dimensions_fit_the_memory_budget() -> None:
    costs = BlockCosts(bytes_per_score=12, bytes_per_row=512, bytes_per_class=256, accumulator_bytes=128 * 300_000)
    blocks = choose_block_size(50_000, 300_000, costs, budget=2**26)
    assert bytes_of(blocks, 50_000, costs) <= 2**26
    assert blocks.rows * blocks.classes > 2**20


@given(plans())
def test_groups_of_rows_are_not_split(plan: tuple[int, int, BlockCosts, int, int]) -> None:
    rows, *_, group = plan
    blocks = choose_block_size(*plan)
    assert all(block.start % group == 0 and block.stop % group == 0 for block in blocks.row_slices(rows))


@given(plans())
def test_one_pass_over_the_classes_if_enough_rows_fit(plan: tuple[int, int, BlockCosts, int, int]) -> None:
    rows, classes, costs, _, group = plan
    enough = min(rows, max(costs.min_rows, group))
    budget = int(bytes_of(BlockSize(enough, classes), rows, costs)) + 1
    blocks = choose_block_size(rows, classes, costs, budget, group)
    assert blocks.classes == classes
    assert bytes_of(blocks, rows, costs) <= budget


@given(plans(), st.integers(0, 2**34))
def test_more_memory_never_makes_smaller_blocks(plan: tuple[int, int, BlockCosts, int, int], more: int) -> None:
    """Without an accumulator: blocks of fewer rows need one, and only a larger budget pays for it."""
    rows, classes, costs, budget, group = plan
    costs = replace(costs, accumulator_bytes=0)
    less_blocks, more_blocks = (
        choose_block_size(rows, classes, costs, allowed, group) for allowed in (budget, budget + more)
    )
    if less_blocks.classes == classes:
        assert more_blocks.classes == classes
        assert more_blocks.rows >= less_blocks.rows
    elif more_blocks.classes < classes:
        # Rows grow first, because all classes are read once per block of rows.
        assert (more_blocks.rows, more_blocks.classes) >= (less_blocks.rows, less_blocks.classes)


@pytest.mark.parametrize(
    ("rows", "classes", "budget", "expected"),
    [
        (700, 10_000, 2**27, BlockSize(700, 10_000)),  # Penn Treebank: all at once
        (2048, 50_000, 2**27, BlockSize(208, 50_000)),  # ten equal blocks of rows
        (100, 1000, 12 * 1000 * 99, BlockSize(56, 1000)),  # two halves, not 99 rows and one
        (64, 1_000_000, 12 * 64 * 2048, BlockSize(64, 2048)),  # classes in blocks
        (128, 4096, 12 * 128 * 1024, BlockSize(128, 1024)),  # all rows with the fewest useful classes
        (128, 4096, 0, BlockSize(64, 256)),  # nothing fits: the smallest blocks
        (1, 2, 0, BlockSize(1, 2)),
        (0, 5, 2**20, BlockSize(1, 5)),
    ],
)
def test_planned_blocks_for_typical_sizes(rows: int, classes: int, budget: int, expected: BlockSize) -> None:
    assert choose_block_size(rows, classes, BlockCosts(bytes_per_score=12), budget) == expected


def test_zero_rows_give_no_blocks() -> None:
    assert list(BlockSize(8, 8).row_slices(0)) == []


LARGE = BlockCosts(
    bytes_per_score=2.0,
    bytes_per_row=8 * 4096,
    accumulator_bytes=2 * 4096 * 151_936,
    min_rows=512,
    size_multiple=128,
)
"""A large model in bfloat16, whose accumulator takes more than a gibibyte."""


@pytest.mark.parametrize("rows", [8192, 100_000])
def test_small_budget_does_not_lead_to_tiny_blocks(rows: int) -> None:
    """Blocks take a quarter of what cannot be avoided: the copies of few rows, or the accumulator for many rows."""
    blocks = choose_block_size(rows, 151_936, LARGE, budget=2**28)
    assert blocks.rows * blocks.classes > 2**24
    assert bytes_of(blocks, rows, LARGE) <= 5 / 4 * min(rows * LARGE.bytes_per_row, LARGE.accumulator_bytes)


def test_gradients_with_known_normalisers_need_no_accumulator() -> None:
    blocks = choose_block_size(8192, 151_936, LARGE, budget=2**30, all_rows=True)
    assert blocks.rows == 8192
    assert blocks.classes >= 30_000
    assert bytes_of(blocks, 8192, LARGE) <= 2**30
    without_accumulator = replace(LARGE, accumulator_bytes=0)
    assert choose_block_size(8192, 151_936, without_accumulator, 2**30, all_rows=True).classes == 151_936
