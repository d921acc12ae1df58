"""Blocks cuts a text into blocks of equal length, whatever the line ends."""

from __future__ import annotations

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.text.blocks import Blocks


def token_ids(tokens: int) -> np.ndarray:
    return np.arange(1, tokens + 1, dtype=np.int32)


def targets(blocks: Blocks) -> list[list[int]]:
    rows = [row for index in range(blocks.num_windows) for row in blocks.window(index)[1].tolist()]
    return [[token for token in row if token != IGNORE] for row in rows]


def test_blocks_have_equal_length_except_the_last() -> None:
    blocks = Blocks(token_ids(23), batch_size=2, steps=4, eos=0)
    assert sorted(targets(blocks)) == [list(range(n, min(n + 4, 24))) for n in range(1, 24, 4)]


@pytest.mark.parametrize(("tokens", "shapes"), [(24, [2, 2, 2]), (20, [2, 2, 1]), (3, [1])])
def test_windows_hold_batch_blocks_except_the_last(tokens: int, shapes: list[int]) -> None:
    blocks = Blocks(token_ids(tokens), batch_size=2, steps=4, eos=0)
    assert [len(blocks.window(index)[0]) for index in range(blocks.num_windows)] == shapes


def test_first_input_is_the_token_before_the_block_or_eos() -> None:
    blocks = Blocks(token_ids(8), batch_size=2, steps=4, eos=0)
    inputs_BT, targets_BT = blocks.window(0)
    assert sorted(zip(inputs_BT.tolist(), targets_BT.tolist(), strict=True)) == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6, 7], [5, 6, 7, 8]),
    ]


def test_without_eos_the_first_token_is_not_a_target() -> None:
    blocks = Blocks(token_ids(8), batch_size=2, steps=4)
    inputs_BT, targets_BT = blocks.window(0)
    assert sorted(zip(inputs_BT.tolist(), targets_BT.tolist(), strict=True)) == [
        ([1, 2, 3, 4], [2, 3, 4, 5]),
        ([5, 6, 7, 1], [6, 7, 8, IGNORE]),
    ]
    assert blocks.num_targets == blocks.count_targets(0) == 7
    with pytest.raises(DataError, match="the text has 1 tokens, and none of them is a target"):
        Blocks(token_ids(1), batch_size=2, steps=4)


def test_blocks_are_shuffled() -> None:
    firsts = np.array([row[0] for row in targets(Blocks(token_ids(4000), batch_size=10, steps=4, eos=0))])
    follows = np.diff(firsts) == 4
    assert follows.mean() < 0.02
