"""Skip-gram: every implementation equals the reference loop, and the reference equals autograd.

Shapes: V words, D dimensions, N pairs, K negatives.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from reefknot.errors import ArgumentError, SettingsError
from reefknot.kernels.skip_gram import Impl, RateSchedule, resolve_impl, train_range
from reefknot.kernels.skip_gram_draws import build_pairs, find_kept_words
from reefknot.kernels.skip_gram_reference import iterate_pairs
from reefknot.nn.models.skip_gram import SkipGram
from reefknot.nn.tables import WordTable

from .skip_gram_texts import draws_of, rates_of, tables, text, topic_score

untied_and_tied = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def train(impl: Impl, tied: bool, *, words: int = 400, cuts: tuple[int, ...] = (), **settings: float) -> list[Tensor]:
    """Return both tables after training on the text, in one stretch or cut at some positions."""
    ids = text(words)
    vectors = tables(tied)
    bounds = (0, *cuts, len(ids))
    for start, stop in pairwise(bounds):
        train_range(*vectors, ids, start, stop, draws_of(ids, **settings), 1, rates_of(ids), impl=impl)
    return list(vectors)


def gradient_step(model: SkipGram, centre: int, context: int, negatives: list[int], rate: float) -> None:
    """Do one gradient step on the loss of one pair."""
    model.zero_grad()
    model.loss(torch.tensor([centre]), torch.tensor([context]), torch.tensor([negatives])).backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= rate * weight.grad


def model_of(first: Tensor, second: Tensor) -> SkipGram:
    """Return a model with copies of these tables."""
    ends = [WordTable(*first.shape) for _ in range(1 if first is second else 2)]
    for end, values in zip(ends, (first, second), strict=False):
        end.weight = torch.nn.Parameter(values.clone())
    return SkipGram(ends[0], ends[-1])


@untied_and_tied
def test_reference_follows_the_gradient_of_every_pair(tied: bool) -> None:
    ids = text(150)
    # One negative, because of two equal negatives word2vec updates the second after the first.
    draws, rates = draws_of(ids, negatives=1), rates_of(ids)
    first, second = (0.3 * table for table in tables(tied, dtype=torch.float64))
    second = first if tied else second
    model = model_of(first, second)
    pairs = list(iterate_pairs(ids, 0, len(ids), draws, draws.key(1)))
    assert len(pairs) > 100
    assert any(context in (centre, *negatives) for centre, context, negatives, _ in pairs)
    for centre, context, negatives, position in pairs:
        gradient_step(model, centre, context, negatives, rates.rate_at(position))
    train_range(first, second, ids, 0, len(ids), draws, 1, rates, impl="reference")
    torch.testing.assert_close(first, model.input.weight.data, rtol=0, atol=1e-12)
    torch.testing.assert_close(second, model.output.weight.data, rtol=0, atol=1e-12)


@untied_and_tied
def test_numba_equals_the_reference(tied: bool) -> None:
    pytest.importorskip("numba")
    for actual, exact in zip(train("numba", tied), train("reference", tied), strict=True):
        torch.testing.assert_close(actual, exact, rtol=2e-5, atol=2e-5)


@untied_and_tied
def test_torch_with_batch_size_one_equals_the_reference(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.kernels.torch_skip_gram.MAX_BATCH_SIZE", {"cpu": 1, "cuda": 1})
    # One negative, so that no negative occurs twice in a pair.
    results = zip(train("torch", tied, negatives=1), train("reference", tied, negatives=1), strict=True)
    for actual, exact in results:
        torch.testing.assert_close(actual, exact, rtol=2e-5, atol=2e-5)


def test_batch_update_is_one_gradient_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = text(200)
    first, second = (0.3 * table for table in tables(False, dtype=torch.float64))
    model = model_of(first, second)
    draws = draws_of(ids)
    key = draws.key(1)
    pairs = build_pairs(draws, key, find_kept_words(draws, key, ids, 0, len(ids)))
    model.loss(pairs.centres, pairs.contexts, pairs.negatives).backward()
    constant_rate = RateSchedule(0.01, 0.01, len(ids))
    monkeypatch.setattr("reefknot.kernels.skip_gram_draws.MAX_EFFECTIVE_RATE", 1e9)
    assert len(pairs.centres) < 512  # one batch
    train_range(first, second, ids, 0, len(ids), draws, 1, constant_rate, impl="torch")
    for actual, end in ((first, model.input), (second, model.output)):
        assert end.weight.grad is not None
        torch.testing.assert_close(actual, end.weight.data - 0.01 * end.weight.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_splitting_the_text_gives_the_same_weights(impl: Impl) -> None:
    if impl == "numba":
        pytest.importorskip("numba")
    for whole, cut in zip(train(impl, False), train(impl, False, cuts=(1, 57, 200, 201)), strict=True):
        torch.testing.assert_close(whole, cut, rtol=0, atol=1e-6 if impl == "reference" else 0)


@untied_and_tied
def test_one_worker_is_deterministic(tied: bool) -> None:
    pytest.importorskip("numba")
    once, again = train("numba", tied), train("numba", tied)
    assert all(torch.equal(first, second) for first, second in zip(once, again, strict=True))
    other_seed = train("numba", tied, seed=8)
    assert not torch.equal(once[0], other_seed[0])


def test_line_ends_and_unknown_words_are_not_trained() -> None:
    before, after = tables(False), train("torch", False)
    for table, start in zip(after, before, strict=True):
        assert torch.equal(table[:2], start[:2])
        assert not torch.equal(table[2:], start[2:])


def test_score_beyond_the_clip_has_no_gradient() -> None:
    ids = np.array([2, 3], np.int32)
    draws = draws_of(ids, negatives=1, sample=0.0, window=1)
    for impl in ("reference", "torch", "numba"):
        if impl == "numba":
            pytest.importorskip("numba")
        first = torch.zeros(40, 12)
        second = torch.zeros(40, 12)
        first[2:4, 0], second[2:4, 0] = 3.0, 2.5
        before = first.clone(), second.clone()
        train_range(first, second, ids, 0, 2, draws, 1, RateSchedule(0.1, 0.1, 2), impl=impl)
        # The score 7.5 is above the clip of 6. It has no gradient for the context and the full gradient for a negative.
        assert torch.equal((first - before[0])[:, 1:], torch.zeros(40, 11))
        moved = float((first - before[0])[2:4, 0].abs().sum())
        assert moved in (pytest.approx(0.0), pytest.approx(0.25), pytest.approx(0.5)), impl


@untied_and_tied
@pytest.mark.parametrize("impl", ["torch", "numba"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_vectors_stay_nonfinite(impl: Impl, tied: bool, value: float) -> None:
    if impl == "numba":
        pytest.importorskip("numba")
    ids = text(400)
    for row in (2, 5):
        first, second = tables(tied)
        second[row] = value
        train_range(first, second, ids, 0, len(ids), draws_of(ids), 1, rates_of(ids), impl=impl)
        assert not second[row].isfinite().any()
        assert not first.sum().isfinite()  # its neighbours become non-finite too


def test_sigmoid_table_handles_nan_and_infinity() -> None:
    numba_skip_gram = pytest.importorskip("reefknot.kernels.numba_skip_gram", exc_type=ImportError)
    scores = np.array([-np.inf, -6.1, -6.0, 0.0, 5.999, 6.0, 6.1, np.inf, np.nan], np.float32)
    actual = [float(numba_skip_gram._sigmoid(score)) for score in scores]
    expected = [0.0, 0.0, *(1.0 / (1.0 + np.exp(-scores[2:6].astype(float)))), 1.0, 1.0, np.nan]
    np.testing.assert_allclose(actual, expected, atol=2e-6)
    # The compiler must not assume that numbers are finite.
    assert not {"nnan", "ninf", "fast"} & numba_skip_gram._FAST_MATH


def quality(impl: Impl, tied: bool, workers: int = 1) -> float:
    """Train on a text with topics and return the topic score."""
    ids = text(30_000, topics=6, vocabulary=302)
    draws = draws_of(ids, 302, window=5, negatives=5, sample=1e-3)
    generator = torch.Generator().manual_seed(0)
    first = torch.empty(302, 16).uniform_(-0.5 / 16, 0.5 / 16, generator=generator)
    second = first if tied else torch.zeros(302, 16)
    for epoch in range(1, 4):
        rates = RateSchedule(0.05, 5e-6, 3 * len(ids), (epoch - 1) * len(ids))
        train_range(first, second, ids, 0, len(ids), draws, epoch, rates, workers=workers, impl=impl)
    assert first.isfinite().all()
    return topic_score(first, topics=6)


def test_batches_and_threads_learn_as_well_as_single_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    single_pairs = quality("numba", tied=False)
    assert single_pairs > 0.9
    # The largest batch of any device.
    monkeypatch.setattr("reefknot.kernels.torch_skip_gram.MAX_BATCH_SIZE", {"cpu": 65_536, "cuda": 65_536})
    assert quality("torch", tied=False) > single_pairs - 0.03
    assert quality("torch", tied=True) > quality("numba", tied=True) - 0.03
    assert quality("numba", tied=False, workers=2) > single_pairs - 0.03
    # More threads than cores, with work for all of them.
    monkeypatch.setattr("reefknot.kernels.numba_skip_gram.POSITIONS_PER_TASK", 200)
    assert quality("numba", tied=False, workers=128) > single_pairs - 0.03


def test_implementation_depends_on_device_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.zeros(3, 2)
    monkeypatch.setattr("reefknot.kernels.skip_gram.numba_available", lambda: False)
    assert resolve_impl(table) == "torch"
    with pytest.raises(SettingsError, match=r"reefknot\[numba\]"):
        resolve_impl(table, "numba")
    monkeypatch.setattr("reefknot.kernels.skip_gram.numba_available", lambda: True)
    assert resolve_impl(table) == "numba"
    assert resolve_impl(table, "reference") == "reference"
    with pytest.raises(ArgumentError, match="must be one of"):
        resolve_impl(table, "fortran")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="on the CPU"):
        resolve_impl(table.to("meta"), "numba")


@pytest.mark.parametrize(
    ("start", "stop", "workers", "output_dim", "message"),
    [
        (0, 99, 1, 2, "is not within the 4 words of the text"),
        (3, 2, 1, 2, "is not within the 4 words of the text"),
        (0, 4, 0, 2, "workers = 0"),
        (0, 4, 1, 3, "must have the same shape"),
    ],
)
def test_invalid_ranges_workers_and_shapes_are_rejected(
    start: int, stop: int, workers: int, output_dim: int, message: str
) -> None:
    ids = np.array([2, 3, 2, 3], np.int32)
    with pytest.raises(ArgumentError, match=message):
        train_range(
            *(torch.zeros(40, 2), torch.zeros(40, output_dim), ids, start, stop, draws_of(ids), 1, rates_of(ids)),
            workers=workers,
        )


def test_noncontiguous_tables_are_rejected() -> None:
    ids = np.array([2, 3], np.int32)
    with pytest.raises(ArgumentError, match="contiguous"):
        train_range(torch.zeros(2, 40).T, torch.zeros(40, 2), ids, 0, 2, draws_of(ids), 1, rates_of(ids))
