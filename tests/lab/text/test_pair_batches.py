"""PairBatches returns every pair once per epoch, grouped by length, within a token budget, on any number of ranks."""

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
from reefknot.lab.text.pair_batches import PairBatches
from reefknot.lab.text.pair_dataset import Lines

EOS = 1
SOURCE_EOS = 2


def lines(lengths: list[int], eos: int, first: int = 10) -> Lines:
    """Return lines with these numbers of words plus <eos>. Other ids are their positions."""
    ends = np.cumsum(np.array(lengths) + 1)
    ids = np.arange(first, first + ends[-1], dtype=np.int32)
    ids[ends - 1] = eos
    return Lines(ids, np.concatenate([[0], ends]))


def batches(
    lengths: list[tuple[int, int]], batch: int = 4, steps: int = 40, seed: int = 0, rank: int = 0, world: int = 1
) -> PairBatches:
    source, target = (list(side) for side in zip(*lengths, strict=True))
    made = PairBatches(lines(source, SOURCE_EOS), lines(target, EOS, 10_000), batch, steps, eos=EOS, seed=seed)
    return made.shard(rank, world)


def random_lengths(number: int, longest: int = 38, seed: int = 0) -> list[tuple[int, int]]:
    random = np.random.default_rng(seed)
    source = random.integers(1, longest, number)
    target = np.clip(source + random.integers(-4, 5, number), 1, longest)
    return list(zip(source.tolist(), target.tolist(), strict=True))


Row = tuple[tuple[int, ...], tuple[int, ...]]


def rows(pairs: PairBatches, index: int) -> list[Row]:
    """Return source and targets of every row that has a target, and check the padding."""
    pairs_BU, targets_BT = pairs.window(index)
    steps = targets_BT.shape[1]
    pairs_of_rows = []
    for inputs_U, targets_T in zip(pairs_BU, targets_BT, strict=True):
        source_S, inputs_T = inputs_U[:-steps], inputs_U[-steps:]
        width, length = int((source_S != IGNORE).sum()), int((targets_T != IGNORE).sum())
        assert (source_S[width:] == IGNORE).all()
        assert source_S[width - 1] == SOURCE_EOS
        assert (targets_T[length:] == IGNORE).all()
        assert (inputs_T[length:] == 0).all()
        if length:
            assert inputs_T[:length].tolist() == [EOS, *targets_T[: length - 1].tolist()]
            assert targets_T[length - 1] == EOS
            pairs_of_rows.append((tuple(source_S[:width].tolist()), tuple(targets_T[:length].tolist())))
    return pairs_of_rows


def rows_of_epoch(pairs: PairBatches) -> list[list[Row]]:
    return [rows(pairs, index) for index in range(pairs.num_windows)]


def expected_rows(lengths: list[tuple[int, int]]) -> list[Row]:
    sides = lines([source for source, _ in lengths], SOURCE_EOS), lines([target for _, target in lengths], EOS, 10_000)
    cut = [[tuple(line.tolist()) for line in np.split(side.ids, side.bounds[1:-1])] for side in sides]
    return list(zip(*cut, strict=True))


sizes = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=60)


@given(sizes, st.integers(1, 5), st.integers(32, 70), st.integers(1, 3))
def test_every_pair_comes_once_per_epoch_within_the_budget(
    lengths: list[tuple[int, int]], batch: int, steps: int, epoch: int
) -> None:
    pairs = batches(lengths, batch, steps)
    pairs.set_epoch(epoch)
    windows = rows_of_epoch(pairs)
    assert sorted(row for window in windows for row in window) == sorted(expected_rows(lengths))
    capacity, short = batch * steps, 0
    for index, window in enumerate(windows):
        pairs_BU, targets_BT = pairs.window(index)
        sides = pairs_BU.shape[1] - targets_BT.shape[1], targets_BT.shape[1]
        assert sides == tuple(-(-max(map(len, side)) // 8) * 8 for side in zip(*window, strict=True))
        assert len(pairs_BU) * max(sides) <= capacity
        short += (len(pairs_BU) + 1) * max(sides) <= capacity
        assert pairs.count_targets(index) == sum(len(targets) for _, targets in window)
    assert short <= 1  # only the last window may be smaller
    assert (
        pairs.num_targets
        == sum(target + 1 for _, target in lengths)
        == sum(map(pairs.count_targets, range(pairs.num_windows)))
    )


@given(sizes, st.integers(3, 5), st.integers(1, 3))
def test_slices_of_all_ranks_make_up_the_whole_batch(lengths: list[tuple[int, int]], batch: int, world: int) -> None:
    whole = batches(lengths, batch)
    slices = [whole.shard(rank, world) for rank in range(world)]
    assert {(part.num_windows, part.num_targets) for part in slices} == {(whole.num_windows, whole.num_targets)}
    for epoch in (1, 2):
        for batches_of_rank in (whole, *slices):
            batches_of_rank.set_epoch(epoch)
        for index in range(whole.num_windows):
            windows = [part.window(index) for part in slices]
            assert len({tuple(tensor.shape for tensor in window) for window in windows}) == 1
            pairs_BU, targets_BT = whole.window(index)
            x, y = (torch.stack(tensors, dim=1).flatten(0, 1) for tensors in zip(*windows, strict=True))
            assert torch.equal(x[: len(pairs_BU)], pairs_BU)
            assert torch.equal(y[: len(targets_BT)], targets_BT)
            assert len(y) < len(targets_BT) + world
            # A filler row has a readable source and no targets.
            for part in slices:
                assert len(rows(part, index)) <= len(part.window(index)[1])
            assert (y[len(targets_BT) :] == IGNORE).all()
            assert {part.count_targets(index) for part in slices} == {whole.count_targets(index)}


def test_window_layout_of_two_pairs() -> None:
    """The pairs have two source words and three target words, and nine and one."""
    pairs = batches([(2, 3), (9, 1)], batch=4, steps=8)
    pairs_BU, targets_BT = pairs.window(0)
    i = IGNORE
    assert targets_BT.tolist() == [[10004, EOS, i, i, i, i, i, i], [10000, 10001, 10002, EOS, i, i, i, i]]
    assert pairs_BU.tolist() == [
        [13, 14, 15, 16, 17, 18, 19, 20, 21, SOURCE_EOS, i, i, i, i, i, i, EOS, 10004, 0, 0, 0, 0, 0, 0],
        [10, 11, SOURCE_EOS, i, i, i, i, i, i, i, i, i, i, i, i, i, EOS, 10000, 10001, 10002, 0, 0, 0, 0],
    ]


def test_order_depends_only_on_seed_and_epoch() -> None:
    lengths = random_lengths(300)
    first, other = batches(lengths, seed=3), batches(lengths, seed=4)
    once, others = rows_of_epoch(first), rows_of_epoch(other)
    first.set_epoch(2)
    twice = rows_of_epoch(first)
    assert once != twice
    assert once != others
    np.random.seed(1)
    again = batches(lengths, seed=3)
    assert rows_of_epoch(again) == once
    again.set_epoch(2)
    assert rows_of_epoch(again) == twice


def test_any_window_can_be_read_on_its_own() -> None:
    """A resumed run starts in the middle of an epoch and must get the same windows."""
    through, resumed = batches(random_lengths(200)), batches(random_lengths(200))
    through.set_epoch(5)
    windows = [through.window(index) for index in range(through.num_windows)]
    resumed.set_epoch(5)
    for index in (7, 2, through.num_windows - 1):
        assert all(torch.equal(*tensors) for tensors in zip(resumed.window(index), windows[index], strict=True))
    for outside in (-1, through.num_windows):
        with pytest.raises(IndexError):
            resumed.window(outside)
        with pytest.raises(IndexError):
            resumed.count_targets(outside)


def test_pairs_of_similar_length_share_few_window_shapes() -> None:
    pairs = batches(random_lengths(5000, longest=60), batch=16, steps=64)
    shapes = [tuple(tensor.shape for tensor in pairs.window(index)) for index in range(pairs.num_windows)]
    assert len(set(shapes)) < len(shapes) / 5
    capacity = sum(shape[0][0] * shape[0][1] for shape in shapes)
    used = sum(source + target + 2 for source, target in random_lengths(5000, longest=60))
    assert used > 0.85 * capacity


def test_windows_are_not_ordered_by_length() -> None:
    pairs = batches(random_lengths(2000))
    widths = np.array([pairs.window(index)[1].shape[1] for index in range(pairs.num_windows)])
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.2


def test_pairs_of_equal_length_are_regrouped_every_epoch() -> None:
    pairs = batches([(5, 5)] * 200, batch=4, steps=8)
    windows = []
    for epoch in (1, 2):
        pairs.set_epoch(epoch)
        windows.append({frozenset(window) for window in rows_of_epoch(pairs)})
    assert len(windows[0]) == 50
    assert len(windows[0] & windows[1]) < 3


def test_windows_are_contiguous_int64_tensors_at_full_rate() -> None:
    pairs = batches(random_lengths(100))
    for tensor in pairs.window(1):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert {pairs.learning_rate_factor(index) for index in range(pairs.num_windows)} == {1.0}
    assert (pairs.batch_size, pairs.shard(0, 3).batch_size) == (4, 2)


def test_memory_mapped_lines_are_not_copied(tmp_path: Path) -> None:
    made = lines([19] * 100_000, EOS)
    made.ids.tofile(tmp_path / "ids")
    ids = np.memmap(tmp_path / "ids", dtype=np.int32, mode="r")
    tracemalloc.start()
    try:
        pairs = PairBatches(Lines(ids, made.bounds), Lines(ids, made.bounds), 8, 50, eos=EOS).shard(1, 2)
        pairs.set_epoch(2)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < ids.nbytes / 5
    assert int((pairs.window(3)[1] == EOS).sum()) == 8


def test_lines_longer_than_eight_bits_are_read() -> None:
    lengths = [(300, 3), (3, 400), (250, 250)]
    pairs = batches(lengths, batch=2, steps=300)
    assert sorted(row for window in rows_of_epoch(pairs) for row in window) == sorted(expected_rows(lengths))


def test_pair_longer_than_a_window_is_rejected() -> None:
    """With padding, 39 words take 40 tokens and 40 words take 48."""
    assert batches([(5, 39)], batch=1, steps=40).num_windows == 1
    with pytest.raises(
        SettingsError, match=r"steps = 40 tokens, but the longest pair takes 48 .* corpus.pairs.longest"
    ):
        batches([(2, 2), (5, 40)], batch=1, steps=40)
    with pytest.raises(SettingsError, match="the longest pair takes 48"):
        batches([(40, 2)], batch=1, steps=40)


def test_unequal_or_empty_sides_are_rejected() -> None:
    with pytest.raises(DataError, match="2 source lines and 3 target lines do not form pairs"):
        PairBatches(lines([1, 2], SOURCE_EOS), lines([1, 2, 3], EOS), 4, 40, eos=EOS)
    nothing = Lines(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64))
    with pytest.raises(DataError, match="there are no pairs to train on"):
        PairBatches(nothing, nothing, 4, 40, eos=EOS)


@pytest.mark.parametrize(("batch", "steps"), [(0, 5), (5, 0)])
def test_batch_and_steps_must_be_positive(batch: int, steps: int) -> None:
    with pytest.raises(SettingsError, match=f"batch = {batch}, steps = {steps}: both must be at least 1"):
        batches([(1, 1)], batch, steps)


def test_more_processes_than_rows_is_rejected() -> None:
    with pytest.raises(SettingsError, match="batch = 2 is too small for 3 processes; some would have no row"):
        batches(random_lengths(20), batch=2).shard(0, 3)
