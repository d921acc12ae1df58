"""Sentences groups lines of similar length into windows within a token budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.text import sentence_batches
from reefknot.lab.text.sentence_batches import Sentences, find_line_ends

EOS = 0


def make_text(lengths: list[int]) -> np.ndarray:
    """Return lines of these lengths, including <eos>. Other ids are their positions."""
    ids = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    ids[np.cumsum(lengths) - 1] = EOS
    return ids


def targets(sentences: Sentences, index: int) -> list[list[int]]:
    return [[token for token in row if token != IGNORE] for row in sentences.window(index)[1].tolist()]


def all_targets(sentences: Sentences) -> list[list[int]]:
    return [row for index in range(sentences.num_windows) for row in targets(sentences, index)]


lines = st.lists(st.integers(1, 12), min_size=1, max_size=60)


@given(lines, st.integers(1, 6), st.integers(1, 12), st.integers(1, 3))
def test_windows_fill_their_token_budget(lengths: list[int], batch: int, steps: int, epoch: int) -> None:
    sentences = Sentences(make_text(lengths), batch, steps, eos=EOS)
    sentences.set_epoch(epoch)
    short = 0
    for index in range(sentences.num_windows):
        rows, longest = sentences.window(index)[1].shape
        assert rows * longest <= batch * steps
        short += (rows + 1) * longest <= batch * steps
    assert short <= 1  # only the last window may be smaller


@given(lines, st.integers(12, 30))
def test_every_line_is_one_row(lengths: list[int], steps: int) -> None:
    ids = make_text(lengths)
    expected = [line.tolist() for line in np.split(ids, np.cumsum(lengths)[:-1])]
    assert sorted(all_targets(Sentences(ids, 2, steps, eos=EOS))) == sorted(expected)


def test_first_input_of_a_line_is_eos() -> None:
    inputs_BT, targets_BT = Sentences(make_text([3, 3, 3]), batch_size=3, steps=3, eos=EOS).window(0)
    assert sorted(zip(inputs_BT.tolist(), targets_BT.tolist(), strict=True)) == [
        ([0, 1, 2], [1, 2, 0]),
        ([0, 4, 5], [4, 5, 0]),
        ([0, 7, 8], [7, 8, 0]),
    ]


def test_long_line_is_cut_and_continues_after_its_true_token() -> None:
    sentences = Sentences(make_text([2, 8, 1]), batch_size=9, steps=3, eos=EOS)
    (inputs_BT, targets_BT), i = sentences.window(0), IGNORE
    assert sorted(zip(inputs_BT.tolist(), targets_BT.tolist(), strict=True)) == [
        ([0, 0, 0], [0, i, i]),
        ([0, 1, 0], [1, 0, i]),
        ([0, 3, 4], [3, 4, 5]),
        ([5, 6, 7], [6, 7, 8]),
        ([8, 9, 0], [9, 0, i]),
    ]
    assert sentences.count_targets(0) == 11


def test_text_may_end_without_eos() -> None:
    ids = make_text([2, 4])[:-1]
    assert sorted(all_targets(Sentences(ids, 2, 5, eos=EOS))) == [[1, 0], [3, 4, 5]]
    assert all_targets(Sentences(ids[2:], 2, 5, eos=EOS)) == [[3, 4, 5]]


def test_lines_of_similar_length_are_batched_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 41, 2000).tolist()
    sentences = Sentences(make_text(lengths), batch_size=4, steps=40, eos=EOS)
    padding = sum(sentences.window(index)[1].eq(IGNORE).sum().item() for index in range(sentences.num_windows))
    assert padding < 0.03 * sentences.num_targets


def test_windows_are_not_ordered_by_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 41, 2000).tolist()
    sentences = Sentences(make_text(lengths), batch_size=4, steps=40, eos=EOS)
    longest = np.array([sentences.window(index)[1].shape[1] for index in range(sentences.num_windows)])
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.2


def test_lines_of_equal_length_are_regrouped_every_epoch() -> None:
    sentences = Sentences(make_text([5] * 200), batch_size=4, steps=5, eos=EOS)
    windows = []
    for epoch in (1, 2):
        sentences.set_epoch(epoch)
        windows.append({frozenset(row[0] for row in targets(sentences, index)) for index in range(50)})
    assert len(windows[0] & windows[1]) < 3


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_line_ends_do_not_depend_on_the_chunk_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentence_batches, "CHUNK_SIZE", chunk)
    lengths = [3, 1, 9, 1, 1, 20]
    assert find_line_ends(make_text(lengths), EOS).tolist() == np.cumsum(lengths).tolist()
    assert find_line_ends(np.ones(30, dtype=np.int32), EOS).tolist() == []


def test_vocabulary_without_eos_is_rejected() -> None:
    with pytest.raises(SettingsError, match=r'batching = "sentences": .* <eos>.* use vocabulary.end_of_line = true'):
        Sentences(make_text([3, 3]), batch_size=2, steps=5)


def test_lines_longer_than_sixteen_bits_are_read() -> None:
    lengths = [70_000, 3, 66_000, 3]
    sentences = Sentences(make_text(lengths), batch_size=1, steps=100_000, eos=EOS)
    assert sorted(map(len, all_targets(sentences))) == sorted(lengths)
