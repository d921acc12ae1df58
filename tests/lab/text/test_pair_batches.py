"""Pairs of lines: each in one window of every epoch, of like length, within a budget, whoever has its row."""

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
    """Lines of so many words, and <eos>; other ids tell where they stand."""
    ends = np.cumsum(np.array(lengths) + 1)
    ids = np.arange(first, first + ends[-1], dtype=np.int32)
    ids[ends - 1] = eos
    return Lines(ids, np.concatenate([[0], ends]))


def batches(
    lengths: list[tuple[int, int]], batch: int = 4, steps: int = 40, seed: int = 0, rank: int = 0, world: int = 1
) -> PairBatches:
    source, target = (list(side) for side in zip(*lengths, strict=True))
    made = PairBatches(lines(source, SOURCE_EOS), lines(target, EOS, 10_000), batch, steps, eos=EOS, seed=seed)
    return made.slice(rank, world)


def drawn(number: int, longest: int = 38, seed: int = 0) -> list[tuple[int, int]]:
    random = np.random.default_rng(seed)
    source = random.integers(1, longest, number)
    target = np.clip(source + random.integers(-4, 5, number), 1, longest)
    return list(zip(source.tolist(), target.tolist(), strict=True))


Row = tuple[tuple[int, ...], tuple[int, ...]]


def rows(pairs: PairBatches, index: int) -> list[Row]:
    """The source and the targets of each row with a target; checks everything that they were filled up with."""
    x_BU, y_BT = pairs.window(index)
    steps = y_BT.shape[1]
    found = []
    for x_U, y_T in zip(x_BU, y_BT, strict=True):
        source_S, inputs_T = x_U[:-steps], x_U[-steps:]
        width, length = int((source_S != IGNORE).sum()), int((y_T != IGNORE).sum())
        assert (source_S[width:] == IGNORE).all()
        assert source_S[width - 1] == SOURCE_EOS
        assert (y_T[length:] == IGNORE).all()
        assert (inputs_T[length:] == 0).all()
        if length:
            assert inputs_T[:length].tolist() == [EOS, *y_T[: length - 1].tolist()]
            assert y_T[length - 1] == EOS
            found.append((tuple(source_S[:width].tolist()), tuple(y_T[:length].tolist())))
    return found


def epoch_of(pairs: PairBatches) -> list[list[Row]]:
    return [rows(pairs, index) for index in range(pairs.windows)]


def expected(lengths: list[tuple[int, int]]) -> list[Row]:
    sides = lines([one for one, _ in lengths], SOURCE_EOS), lines([two for _, two in lengths], EOS, 10_000)
    cut = [[tuple(each.tolist()) for each in np.split(side.ids, side.bounds[1:-1])] for side in sides]
    return list(zip(*cut, strict=True))


sizes = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=60)


@given(sizes, st.integers(1, 5), st.integers(32, 70), st.integers(1, 3))
def test_every_pair_comes_once_per_epoch_within_the_budget(
    lengths: list[tuple[int, int]], batch: int, steps: int, epoch: int
) -> None:
    pairs = batches(lengths, batch, steps)
    pairs.begin(epoch)
    windows = epoch_of(pairs)
    assert sorted(row for window in windows for row in window) == sorted(expected(lengths))
    room, short = batch * steps, 0
    for index, window in enumerate(windows):
        x_BU, y_BT = pairs.window(index)
        sides = x_BU.shape[1] - y_BT.shape[1], y_BT.shape[1]
        assert sides == tuple(-(-max(map(len, side)) // 8) * 8 for side in zip(*window, strict=True))
        assert len(x_BU) * max(sides) <= room
        short += (len(x_BU) + 1) * max(sides) <= room
        assert pairs.count(index) == sum(len(targets) for _, targets in window)
    assert short <= 1  # the one with what is left over
    assert pairs.tokens == sum(target + 1 for _, target in lengths) == sum(map(pairs.count, range(pairs.windows)))


@given(sizes, st.integers(3, 5), st.integers(1, 3))
def test_the_shares_of_all_processes_are_the_whole(lengths: list[tuple[int, int]], batch: int, world: int) -> None:
    whole = batches(lengths, batch)
    shares = [whole.slice(rank, world) for rank in range(world)]
    assert {(part.windows, part.tokens) for part in shares} == {(whole.windows, whole.tokens)}
    for epoch in (1, 2):
        for each in (whole, *shares):
            each.begin(epoch)
        for index in range(whole.windows):
            windows = [part.window(index) for part in shares]
            assert len({tuple(each.shape for each in window) for window in windows}) == 1
            x_BU, y_BT = whole.window(index)
            x, y = (torch.stack(each, dim=1).flatten(0, 1) for each in zip(*windows, strict=True))
            assert torch.equal(x[: len(x_BU)], x_BU)
            assert torch.equal(y[: len(y_BT)], y_BT)
            assert len(y) < len(y_BT) + world
            # A row too many has a source that can be read, and nothing to learn from.
            for part in shares:
                assert len(rows(part, index)) <= len(part.window(index)[1])
            assert (y[len(y_BT) :] == IGNORE).all()
            assert {part.count(index) for part in shares} == {whole.count(index)}


def test_a_window_to_read() -> None:
    """One pair of two words and three, one of nine words and one."""
    pairs = batches([(2, 3), (9, 1)], batch=4, steps=8)
    x_BU, y_BT = pairs.window(0)
    i = IGNORE
    assert y_BT.tolist() == [[10004, EOS, i, i, i, i, i, i], [10000, 10001, 10002, EOS, i, i, i, i]]
    assert x_BU.tolist() == [
        [13, 14, 15, 16, 17, 18, 19, 20, 21, SOURCE_EOS, i, i, i, i, i, i, EOS, 10004, 0, 0, 0, 0, 0, 0],
        [10, 11, SOURCE_EOS, i, i, i, i, i, i, i, i, i, i, i, i, i, EOS, 10000, 10001, 10002, 0, 0, 0, 0],
    ]


def test_order_follows_from_the_seed_and_the_epoch_alone() -> None:
    lengths = drawn(300)
    first, other = batches(lengths, seed=3), batches(lengths, seed=4)
    once, others = epoch_of(first), epoch_of(other)
    first.begin(2)
    twice = epoch_of(first)
    assert once != twice
    assert once != others
    np.random.seed(1)
    again = batches(lengths, seed=3)
    assert epoch_of(again) == once
    again.begin(2)
    assert epoch_of(again) == twice


def test_any_window_can_be_read_alone() -> None:
    """A resumed run asks for the middle of an epoch, and gets what the killed one would have had."""
    through, resumed = batches(drawn(200)), batches(drawn(200))
    through.begin(5)
    windows = [through.window(index) for index in range(through.windows)]
    resumed.begin(5)
    for index in (7, 2, through.windows - 1):
        assert all(torch.equal(*each) for each in zip(resumed.window(index), windows[index], strict=True))
    for outside in (-1, through.windows):
        with pytest.raises(IndexError):
            resumed.window(outside)
        with pytest.raises(IndexError):
            resumed.count(outside)


def test_pairs_of_like_length_are_together_and_shapes_come_back() -> None:
    pairs = batches(drawn(5000, longest=60), batch=16, steps=64)
    shapes = [tuple(each.shape for each in pairs.window(index)) for index in range(pairs.windows)]
    assert len(set(shapes)) < len(shapes) / 5
    room = sum(shape[0][0] * shape[0][1] for shape in shapes)
    held = sum(source + target + 2 for source, target in drawn(5000, longest=60))
    assert held > 0.85 * room


def test_windows_are_not_in_the_order_of_their_lengths() -> None:
    pairs = batches(drawn(2000))
    widths = np.array([pairs.window(index)[1].shape[1] for index in range(pairs.windows)])
    assert abs(np.corrcoef(widths, np.arange(len(widths)))[0, 1]) < 0.2


def test_pairs_of_one_width_meet_others_in_the_next_epoch() -> None:
    pairs = batches([(5, 5)] * 200, batch=4, steps=8)
    windows = []
    for epoch in (1, 2):
        pairs.begin(epoch)
        windows.append({frozenset(window) for window in epoch_of(pairs)})
    assert len(windows[0]) == 50
    assert len(windows[0] & windows[1]) < 3


def test_windows_are_contiguous_integer_tensors_at_the_full_rate() -> None:
    pairs = batches(drawn(100))
    for each in pairs.window(1):
        assert each.dtype == torch.int64
        assert each.is_contiguous()
    assert {pairs.rate_factor(index) for index in range(pairs.windows)} == {1.0}
    assert (pairs.batch, pairs.slice(0, 3).batch) == (4, 2)


def test_lines_stay_on_disk(tmp_path: Path) -> None:
    made = lines([19] * 100_000, EOS)
    made.ids.tofile(tmp_path / "ids")
    ids = np.memmap(tmp_path / "ids", dtype=np.int32, mode="r")
    tracemalloc.start()
    try:
        pairs = PairBatches(Lines(ids, made.bounds), Lines(ids, made.bounds), 8, 50, eos=EOS).slice(1, 2)
        pairs.begin(2)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < ids.nbytes / 5
    assert int((pairs.window(3)[1] == EOS).sum()) == 8


def test_lengths_beyond_eight_bits() -> None:
    lengths = [(300, 3), (3, 400), (250, 250)]
    pairs = batches(lengths, batch=2, steps=300)
    assert sorted(row for window in epoch_of(pairs) for row in window) == sorted(expected(lengths))


def test_a_pair_that_fits_no_window_is_refused() -> None:
    """One word less would take 40, padding included."""
    assert batches([(5, 39)], batch=1, steps=40).windows == 1
    with pytest.raises(
        SettingsError, match=r"steps = 40 tokens, but the longest pair takes 48 .* corpus.pairs.longest"
    ):
        batches([(2, 2), (5, 40)], batch=1, steps=40)
    with pytest.raises(SettingsError, match="the longest pair takes 48"):
        batches([(40, 2)], batch=1, steps=40)


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(DataError, match="2 source lines and 3 target lines do not form pairs"):
        PairBatches(lines([1, 2], SOURCE_EOS), lines([1, 2, 3], EOS), 4, 40, eos=EOS)
    nothing = Lines(np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.int64))
    with pytest.raises(DataError, match="there are no pairs to train on"):
        PairBatches(nothing, nothing, 4, 40, eos=EOS)


@pytest.mark.parametrize(("batch", "steps"), [(0, 5), (5, 0)])
def test_impossible_sizes(batch: int, steps: int) -> None:
    with pytest.raises(SettingsError, match=f"batch = {batch}, steps = {steps}: both must be at least 1"):
        batches([(1, 1)], batch, steps)


def test_more_processes_than_rows() -> None:
    with pytest.raises(SettingsError, match="batch = 2 is too small for 3 processes; some would have no row"):
        batches(drawn(20), batch=2).slice(0, 3)
