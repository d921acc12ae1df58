"""Blocks and Sentences: every token is a target once per epoch, after its true predecessor, on any number of ranks."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import DataError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.text.blocks import Blocks
from reefknot.lab.text.samples import Samples
from reefknot.lab.text.sentence_batches import Sentences

EOS = 0
KINDS = (Blocks, Sentences)
both_kinds = pytest.mark.parametrize("kind", KINDS)
kinds = st.sampled_from(KINDS)
sizes = st.integers(1, 9)


@st.composite
def texts(draw: st.DrawFn) -> np.ndarray:
    """Draw lines of any length, the last one with or without <eos>. Other ids are their positions."""
    ends = draw(st.lists(st.booleans(), min_size=1, max_size=80))
    return np.where(ends, EOS, np.arange(1, len(ends) + 1)).astype(np.int32)


def make_text(tokens: int, line: int = 7) -> np.ndarray:
    ids = np.arange(1, tokens + 1, dtype=np.int32)
    ids[line - 1 :: line] = EOS
    return ids


def rows(samples: Samples) -> list[tuple[list[int], list[int]]]:
    """Return inputs and targets of every row of the epoch, without padding."""
    rows_of_epoch = []
    for index in range(samples.num_windows):
        for inputs_T, targets_T in zip(*samples.window(index), strict=True):
            length = int((targets_T != IGNORE).sum())
            assert (targets_T[length:] == IGNORE).all()  # padding is at the right
            rows_of_epoch.append((inputs_T[:length].tolist(), targets_T[:length].tolist()))
    return rows_of_epoch


def input_target_pairs(samples: Samples) -> list[tuple[int, int]]:
    """Return the input and the target at every position of the epoch."""
    return [pair for x, y in rows(samples) for pair in zip(x, y, strict=True)]


@given(kinds, texts(), sizes, sizes, st.integers(1, 3))
def test_every_token_is_a_target_once_after_its_true_predecessor(
    kind: type[Samples], ids: np.ndarray, batch: int, steps: int, epoch: int
) -> None:
    samples = kind(ids, batch, steps, ids + 100, eos=EOS)
    samples.set_epoch(epoch)
    expected = list(zip([EOS, *(ids[:-1] + 100).tolist()], ids.tolist(), strict=True))
    assert sorted(input_target_pairs(samples)) == sorted(expected)
    assert samples.num_targets == len(ids)


@given(kinds, texts(), sizes, sizes)
def test_row_is_contiguous_and_no_longer_than_steps(
    kind: type[Samples], ids: np.ndarray, batch: int, steps: int
) -> None:
    positions = np.arange(1, len(ids) + 1, dtype=np.int32)
    for x, _ in rows(kind(ids, batch, steps, positions, eos=EOS)):
        assert len(x) <= steps
        assert x == list(range(x[0], x[0] + len(x)))


@given(kinds, texts(), sizes, sizes, st.integers(1, 5))
def test_slices_of_all_ranks_make_up_the_whole_batch(
    kind: type[Samples], ids: np.ndarray, batch: int, steps: int, world: int
) -> None:
    world = min(world, batch)
    whole = kind(ids, batch, steps, ids + 100, eos=EOS)
    slices = [whole.shard(rank, world) for rank in range(world)]
    assert {(part.num_windows, part.num_targets) for part in slices} == {(whole.num_windows, whole.num_targets)}
    for epoch in (1, 2):
        for samples in (whole, *slices):
            samples.set_epoch(epoch)
        for index in range(whole.num_windows):
            windows = [part.window(index) for part in slices]
            assert len({tensor.shape for window in windows for tensor in window}) == 1
            inputs_BT, targets_BT = whole.window(index)
            # Rows are dealt to the ranks in turn; filler rows hold no target.
            x, y = (torch.stack(tensors, dim=1).flatten(0, 1) for tensors in zip(*windows, strict=True))
            assert torch.equal(x[: len(inputs_BT)], inputs_BT)
            assert torch.equal(y[: len(targets_BT)], targets_BT)
            assert (y[len(targets_BT) :] == IGNORE).all()
            assert len(y) < len(targets_BT) + world


@given(kinds, texts(), sizes, sizes, st.integers(1, 3))
def test_count_is_the_sum_over_all_ranks(
    kind: type[Samples], ids: np.ndarray, batch: int, steps: int, world: int
) -> None:
    world = min(world, batch)
    slices = [kind(ids, batch, steps, eos=EOS).shard(rank, world) for rank in range(world)]
    for index in range(slices[0].num_windows):
        counted = sum(int((part.window(index)[1] != IGNORE).sum()) for part in slices)
        assert {part.count_targets(index) for part in slices} == {counted}
    assert sum(slices[0].count_targets(index) for index in range(slices[0].num_windows)) == slices[0].num_targets


@both_kinds
def test_order_depends_only_on_seed_and_epoch(kind: type[Samples]) -> None:
    ids = make_text(500)
    first, other = kind(ids, 4, 7, eos=EOS, seed=3), kind(ids, 4, 7, eos=EOS, seed=4)
    once, others = rows(first), rows(other)
    first.set_epoch(2)
    twice = rows(first)
    assert once != twice
    assert once != others
    assert sorted(once) == sorted(twice) == sorted(others)
    np.random.seed(1)
    again = kind(ids, 4, 7, eos=EOS, seed=3)
    assert rows(again) == once
    again.set_epoch(2)
    assert rows(again) == twice


@both_kinds
def test_any_window_can_be_read_on_its_own(kind: type[Samples]) -> None:
    """A resumed run starts in the middle of an epoch and must get the same windows."""
    ids = make_text(400)
    through, resumed = kind(ids, 3, 7, eos=EOS), kind(ids, 3, 7, eos=EOS).shard(0, 1)
    through.set_epoch(5)
    windows = [through.window(index) for index in range(through.num_windows)]
    resumed.set_epoch(5)
    for index in (4, 2, through.num_windows - 1):
        assert all(torch.equal(*tensors) for tensors in zip(resumed.window(index), windows[index], strict=True))
    for outside in (-1, through.num_windows):
        with pytest.raises(IndexError):
            resumed.window(outside)
        with pytest.raises(IndexError):
            resumed.count_targets(outside)


@both_kinds
def test_slice_starts_in_the_current_epoch(kind: type[Samples]) -> None:
    samples = kind(make_text(196), 4, 7, eos=EOS)
    samples.set_epoch(3)
    part = samples.shard(1, 2)
    assert torch.equal(part.window(2)[1], samples.window(2)[1][1::2])
    part.set_epoch(4)
    assert samples.epoch == 3  # a slice does not change the original


@both_kinds
def test_windows_are_contiguous_int64_tensors_at_full_rate(kind: type[Samples]) -> None:
    samples = kind(make_text(100), 4, 7, eos=EOS)
    for tensor in samples.window(1):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert [samples.learning_rate_factor(index) for index in range(samples.num_windows)] == [1.0] * samples.num_windows
    assert (samples.batch_size, samples.shard(0, 2).batch_size, samples.shard(0, 3).batch_size) == (4, 2, 2)


@both_kinds
@pytest.mark.parametrize("world", [1, 2])
def test_padding_inputs_are_valid_ids(kind: type[Samples], world: int) -> None:
    ids = make_text(100, line=9)
    samples = kind(ids, 4, 8, ids + 100, eos=EOS).shard(world - 1, world)
    known = {EOS, *(ids + 100).tolist()}
    assert all(set(samples.window(index)[0].flatten().tolist()) <= known for index in range(samples.num_windows))


@both_kinds
def test_memory_mapped_text_is_not_copied(kind: type[Samples], tmp_path: Path) -> None:
    path = tmp_path / "text.ids"
    make_text(2_000_000, line=50).tofile(path)
    ids = np.memmap(path, dtype=np.int32, mode="r")
    tracemalloc.start()
    try:
        samples = kind(ids, 8, 50, eos=EOS).shard(1, 2)
        samples.set_epoch(2)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < ids.nbytes / 5
    assert np.shares_memory(samples._targets, ids)
    assert np.shares_memory(samples._inputs, ids)


@both_kinds
@pytest.mark.parametrize(("batch", "steps"), [(0, 5), (5, 0)])
def test_batch_and_steps_must_be_positive(kind: type[Samples], batch: int, steps: int) -> None:
    with pytest.raises(SettingsError, match=f"batch = {batch}, steps = {steps}: both must be at least 1"):
        kind(make_text(100), batch, steps, eos=EOS)


@both_kinds
def test_more_processes_than_rows_is_rejected(kind: type[Samples]) -> None:
    with pytest.raises(SettingsError, match="batch = 2 is too small for 3 processes; some would have no row"):
        kind(make_text(100), 2, 5, eos=EOS).shard(0, 3)


@both_kinds
def test_text_without_targets_is_rejected(kind: type[Samples]) -> None:
    with pytest.raises(DataError, match="the text has 0 tokens, and none of them is a target; use a longer text"):
        kind(make_text(0), 2, 5, eos=EOS)
