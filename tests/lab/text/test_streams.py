"""Streams return every target once and in order, for any batch size, window length and number of processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import DataError, SettingsError
from reefknot.lab.text.streams import RandomSteps, Streams


def token_ids(tokens: int) -> np.ndarray:
    return np.arange(tokens, dtype=np.int32)


def join_windows(streams: Streams) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*(streams.window(i) for i in range(streams.num_windows)), strict=True)
    return torch.cat(inputs, dim=1), torch.cat(targets, dim=1)


@given(st.integers(1, 9), st.integers(1, 12), st.integers(2, 40), st.data())
def test_streams_return_every_target_once_in_order(batch: int, steps: int, length: int, data: st.DataObject) -> None:
    left_over = data.draw(st.integers(0, batch - 1))
    streams = Streams(token_ids(batch * length + left_over), batch, steps)
    inputs_BT, targets_BT = join_windows(streams)
    expected = torch.arange(batch * length).reshape(batch, length)
    assert torch.equal(inputs_BT, expected[:, :-1])
    assert torch.equal(targets_BT, expected[:, 1:])
    assert streams.num_targets == targets_BT.numel()


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 7), st.integers(2, 20))
def test_slices_of_all_ranks_make_up_the_whole_batch(world: int, rows_per_rank: int, steps: int, length: int) -> None:
    streams = Streams(token_ids(world * rows_per_rank * length + rows_per_rank), world * rows_per_rank, steps)
    slices = [streams.shard(rank, world) for rank in range(world)]
    assert {part.num_windows for part in slices} == {streams.num_windows}
    assert {part.num_targets for part in slices} == {streams.num_targets}
    for index in range(streams.num_windows):
        assert (
            {part.count_targets(index) for part in slices}
            == {streams.count_targets(index)}
            == {streams.window(index)[1].numel()}
        )
        parts = [torch.cat(tensors) for tensors in zip(*(part.window(index) for part in slices), strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(parts, streams.window(index), strict=True))


def test_window_is_two_contiguous_int64_tensors() -> None:
    inputs_BT, targets_BT = Streams(token_ids(23), batch_size=2, steps=4).window(1)
    assert inputs_BT.tolist() == [[4, 5, 6, 7], [15, 16, 17, 18]]
    assert targets_BT.tolist() == [[5, 6, 7, 8], [16, 17, 18, 19]]
    assert inputs_BT.dtype == targets_BT.dtype == torch.int64
    assert inputs_BT.is_contiguous()
    assert targets_BT.is_contiguous()


def test_last_short_window_is_kept() -> None:
    streams = Streams(token_ids(22), batch_size=2, steps=4)
    assert [streams.window(i)[0].shape[1] for i in range(streams.num_windows)] == [4, 4, 2]
    assert [streams.count_targets(i) for i in range(streams.num_windows)] == [8, 8, 4]
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            streams.window(outside)
        with pytest.raises(IndexError):
            streams.count_targets(outside)


def test_too_short_text_is_rejected_with_the_required_length() -> None:
    with pytest.raises(DataError, match=r"has 39 tokens but 20 streams need at least 40.*smaller batch"):
        Streams(token_ids(39), batch_size=20, steps=35)
    assert Streams(token_ids(40), batch_size=20, steps=35).num_targets == 20


@pytest.mark.parametrize(("batch", "steps"), [(0, 5), (5, 0)])
def test_batch_and_steps_must_be_positive(batch: int, steps: int) -> None:
    with pytest.raises(SettingsError, match="at least 1"):
        Streams(token_ids(100), batch, steps)


def test_batch_must_be_divisible_by_the_number_of_processes() -> None:
    with pytest.raises(SettingsError, match="batch = 3 is not a multiple of 2"):
        Streams(token_ids(100), batch_size=3, steps=5).shard(0, 2)


def test_inputs_can_have_other_ids_than_targets() -> None:
    streams = Streams(token_ids(23), batch_size=2, steps=4, inputs=token_ids(23) + 100)
    inputs_BT, targets_BT = streams.window(1)
    assert inputs_BT.tolist() == [[104, 105, 106, 107], [115, 116, 117, 118]]
    assert targets_BT.tolist() == [[5, 6, 7, 8], [16, 17, 18, 19]]
    second = streams.shard(1, 2).window(1)
    assert [part.tolist() for part in second] == [inputs_BT[1:].tolist(), targets_BT[1:].tolist()]


AWD = RandomSteps()


def window_lengths(streams: Streams, epoch: int) -> list[int]:
    streams.set_epoch(epoch)
    return [streams.window(i)[0].shape[1] for i in range(streams.num_windows)]


@given(st.integers(1, 5), st.integers(1, 80), st.integers(2, 2000), st.integers(1, 5), st.integers(0, 9))
def test_random_windows_cover_the_whole_text(batch: int, steps: int, length: int, epoch: int, seed: int) -> None:
    streams = Streams(token_ids(batch * length), batch, steps, random_steps=AWD, seed=seed)
    streams.set_epoch(epoch)
    inputs_BT, targets_BT = join_windows(streams)
    expected = torch.arange(batch * length).reshape(batch, length)
    assert torch.equal(inputs_BT, expected[:, :-1])
    assert torch.equal(targets_BT, expected[:, 1:])


def test_window_lengths_depend_only_on_seed_and_epoch() -> None:
    streams = Streams(token_ids(20 * 2000), batch_size=20, steps=70, random_steps=AWD, seed=3)
    np.random.seed(1)
    first, second = window_lengths(streams, 1), window_lengths(streams, 2)
    assert first != second
    np.random.seed(2)
    share = Streams(token_ids(20 * 2000), batch_size=20, steps=70, random_steps=AWD, seed=3).shard(1, 4)
    assert [window_lengths(share, 2), window_lengths(share, 1)] == [second, first]
    assert window_lengths(Streams(token_ids(20 * 2000), batch_size=20, steps=70, random_steps=AWD, seed=4), 1) != first


def test_slice_belongs_to_the_current_epoch() -> None:
    streams = Streams(token_ids(4 * 500), batch_size=4, steps=20, random_steps=AWD)
    streams.set_epoch(3)
    assert torch.equal(streams.shard(1, 2).window(2)[1], streams.window(2)[1][2:])


def test_random_lengths_have_the_published_distribution() -> None:
    """Lengths are Normal(70, 5) in 95 % of windows, else Normal(35, 5). Rounding down lowers the means by 0.5."""
    streams = Streams(token_ids(2_000_000), batch_size=1, steps=70, random_steps=AWD)
    drawn = np.array(window_lengths(streams, 1)[:-1])
    long, short = drawn[drawn >= 52], drawn[drawn < 52]
    assert len(short) / len(drawn) == pytest.approx(0.05, abs=0.005)
    assert long.mean() == pytest.approx(69.5, abs=0.15)
    assert short.mean() == pytest.approx(34.5, abs=0.6)
    assert long.std() == pytest.approx(5.0, abs=0.1)


def test_random_lengths_stay_within_least_and_most() -> None:
    wide_spread = RandomSteps(probability=0.5, deviation=100.0, least=7, most=30)
    drawn = window_lengths(Streams(token_ids(20_000), batch_size=1, steps=20, random_steps=wide_spread), 1)[:-1]
    assert min(drawn) == 7
    assert max(drawn) == 30


def test_learning_rate_is_scaled_by_the_drawn_length() -> None:
    streams = Streams(token_ids(4 * 1000), batch_size=4, steps=70, random_steps=AWD)
    drawn = window_lengths(streams, 1)
    assert [streams.learning_rate_factor(i) for i in range(streams.num_windows - 1)] == [
        length / 70 for length in drawn[:-1]
    ]
    last = streams.learning_rate_factor(streams.num_windows - 1)
    assert last * 70 >= drawn[-1]
    short_texts = [
        Streams(token_ids(n), 1, 70, random_steps=RandomSteps(deviation=0.0, probability=1.0)) for n in (73, 141)
    ]
    assert [(short.num_windows, short.learning_rate_factor(short.num_windows - 1)) for short in short_texts] == [
        (2, 1.0),
        (2, 1.0),
    ]
    assert short_texts[0].window(1)[0].shape[1] == 2  # the text ends early, but the drawn length sets the rate
    fixed = Streams(token_ids(22), batch_size=2, steps=4)
    assert [fixed.learning_rate_factor(i) for i in range(3)] == [1.0, 1.0, 1.0]
