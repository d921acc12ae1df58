"""Streams: every target once, in order, whatever the batch, the window and the share of a process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import DataError, SettingsError
from reefknot.lab.text.streams import RandomSteps, Streams


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
    assert {part.tokens for part in shares} == {streams.tokens}
    for index in range(streams.windows):
        assert {part.count(index) for part in shares} == {streams.count(index)} == {streams.window(index)[1].numel()}
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
    assert [streams.count(i) for i in range(streams.windows)] == [8, 8, 4]
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            streams.window(outside)
        with pytest.raises(IndexError):
            streams.count(outside)


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


AWD = RandomSteps()


def lengths(streams: Streams, epoch: int) -> list[int]:
    streams.begin(epoch)
    return [streams.window(i)[0].shape[1] for i in range(streams.windows)]


@given(st.integers(1, 5), st.integers(1, 80), st.integers(2, 2000), st.integers(1, 5), st.integers(0, 9))
def test_random_windows_are_the_whole_text_too(batch: int, steps: int, length: int, epoch: int, seed: int) -> None:
    streams = Streams(text(batch * length), batch, steps, random_steps=AWD, seed=seed)
    streams.begin(epoch)
    inputs_BT, targets_BT = whole(streams)
    expected = torch.arange(batch * length).reshape(batch, length)
    assert torch.equal(inputs_BT, expected[:, :-1])
    assert torch.equal(targets_BT, expected[:, 1:])


def test_lengths_follow_from_the_seed_and_the_epoch_alone() -> None:
    streams = Streams(text(20 * 2000), batch=20, steps=70, random_steps=AWD, seed=3)
    np.random.seed(1)
    first, second = lengths(streams, 1), lengths(streams, 2)
    assert first != second
    np.random.seed(2)
    share = Streams(text(20 * 2000), batch=20, steps=70, random_steps=AWD, seed=3).slice(1, 4)
    assert [lengths(share, 2), lengths(share, 1)] == [second, first]
    assert lengths(Streams(text(20 * 2000), batch=20, steps=70, random_steps=AWD, seed=4), 1) != first


def test_a_share_is_of_the_epoch_it_was_cut_in() -> None:
    streams = Streams(text(4 * 500), batch=4, steps=20, random_steps=AWD)
    streams.begin(3)
    assert torch.equal(streams.slice(1, 2).window(2)[1], streams.window(2)[1][2:])


def test_random_lengths_have_the_distribution_of_the_papers_code() -> None:
    """Normal(70, 5) in 95 of 100 windows and Normal(35, 5) in the others, cut to whole tokens: half a token less."""
    streams = Streams(text(2_000_000), batch=1, steps=70, random_steps=AWD)
    found = np.array(lengths(streams, 1)[:-1])
    long, short = found[found >= 52], found[found < 52]
    assert len(short) / len(found) == pytest.approx(0.05, abs=0.005)
    assert long.mean() == pytest.approx(69.5, abs=0.15)
    assert short.mean() == pytest.approx(34.5, abs=0.6)
    assert long.std() == pytest.approx(5.0, abs=0.1)


def test_random_lengths_are_bounded() -> None:
    wild = RandomSteps(probability=0.5, deviation=100.0, least=7, most=30)
    found = lengths(Streams(text(20_000), batch=1, steps=20, random_steps=wild), 1)[:-1]
    assert min(found) == 7
    assert max(found) == 30


def test_the_rate_goes_with_the_length_that_was_drawn() -> None:
    streams = Streams(text(4 * 1000), batch=4, steps=70, random_steps=AWD)
    found = lengths(streams, 1)
    assert [streams.rate_factor(i) for i in range(streams.windows - 1)] == [length / 70 for length in found[:-1]]
    last = streams.rate_factor(streams.windows - 1)
    assert last * 70 >= found[-1]
    ends = [Streams(text(n), 1, 70, random_steps=RandomSteps(deviation=0.0, probability=1.0)) for n in (73, 141)]
    assert [(each.windows, each.rate_factor(each.windows - 1)) for each in ends] == [(2, 1.0), (2, 1.0)]
    assert ends[0].window(1)[0].shape[1] == 2  # the text has ended, the rate has not fallen
    fixed = Streams(text(22), batch=2, steps=4)
    assert [fixed.rate_factor(i) for i in range(3)] == [1.0, 1.0, 1.0]
