"""Streams: every target once, in order, whatever the batch, the window and the share of a process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import DataError, SettingsError
from reefknot.text.streams import Streams


def text(tokens: int) -> np.ndarray:
    return np.arange(tokens, dtype=np.int32)


def whole(streams: Streams) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*(streams.window(i) for i in range(streams.windows)), strict=True)
    return torch.cat(inputs, dim=1), torch.cat(targets, dim=1)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(2, 40), st.data())
def test_every_target_comes_once_and_in_order(batch: int, steps: int, length: int, data: st.DataObject) -> None:
    left_over = data.draw(st.integers(0, batch - 1))
    streams = Streams(text(batch * length + left_over), batch, steps)
    inputs_BT, targets_BT = whole(streams)
    expected = torch.arange(batch * length).reshape(batch, length)
    assert torch.equal(inputs_BT, expected[:, :-1])
    assert torch.equal(targets_BT, expected[:, 1:])
    assert streams.tokens == targets_BT.numel()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 7), st.integers(2, 20))
def test_the_shares_of_all_processes_are_the_whole(world: int, share: int, steps: int, length: int) -> None:
    streams = Streams(text(world * share * length + share), world * share, steps)
    shares = [streams.slice(rank, world) for rank in range(world)]
    assert {part.windows for part in shares} == {streams.windows}
    assert sum(part.tokens for part in shares) == streams.tokens
    for index in range(streams.windows):
        parts = [torch.cat(halves) for halves in zip(*(part.window(index) for part in shares), strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(parts, streams.window(index), strict=True))


def test_a_window_is_a_pair_of_contiguous_integer_tensors() -> None:
    inputs_BT, targets_BT = Streams(text(23), batch=2, steps=4).window(1)
    assert inputs_BT.tolist() == [[4, 5, 6, 7], [15, 16, 17, 18]]
    assert targets_BT.tolist() == [[5, 6, 7, 8], [16, 17, 18, 19]]
    assert inputs_BT.dtype == targets_BT.dtype == torch.int64
    assert inputs_BT.is_contiguous()
    assert targets_BT.is_contiguous()


def test_the_last_window_is_short_and_not_dropped() -> None:
    streams = Streams(text(22), batch=2, steps=4)
    assert [streams.window(i)[0].shape[1] for i in range(streams.windows)] == [4, 4, 2]
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            streams.window(outside)


def test_too_little_text_says_how_much_is_needed() -> None:
    with pytest.raises(DataError, match=r"has 39 tokens but 20 streams need at least 40.*smaller batch"):
        Streams(text(39), batch=20, steps=35)
    assert Streams(text(40), batch=20, steps=35).tokens == 20


@pytest.mark.parametrize(("batch", "steps"), [(0, 5), (5, 0)])
def test_impossible_sizes(batch: int, steps: int) -> None:
    with pytest.raises(SettingsError, match="at least 1"):
        Streams(text(100), batch, steps)


def test_streams_that_do_not_divide_among_processes() -> None:
    with pytest.raises(SettingsError, match="batch = 3 does not divide among 2 processes"):
        Streams(text(100), batch=3, steps=5).slice(0, 2)


def test_inputs_may_have_ids_of_their_own() -> None:
    streams = Streams(text(23), batch=2, steps=4, inputs=text(23) + 100)
    inputs_BT, targets_BT = streams.window(1)
    assert inputs_BT.tolist() == [[104, 105, 106, 107], [115, 116, 117, 118]]
    assert targets_BT.tolist() == [[5, 6, 7, 8], [16, 17, 18, 19]]
    second = streams.slice(1, 2).window(1)
    assert [part.tolist() for part in second] == [inputs_BT[1:].tolist(), targets_BT[1:].tolist()]
