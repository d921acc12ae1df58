"""Skip-gram: every implementation against the loop that can be read, and that against autograd.

Shapes: V words, D width, N pairs, K negatives.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.skip_gram import Impl, Rates, resolve, train_stretch
from reefknot.kernels.skip_gram_draws import kept_words, pairs_of
from reefknot.kernels.skip_gram_reference import pairs as pairs_one_by_one
from reefknot.nn.models.skip_gram import SkipGram
from reefknot.nn.tables import WordTable

from .skip_gram_texts import draws_of, rates_of, tables, text, topic_score

EITHER = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def trained(impl: Impl, tied: bool, *, words: int = 400, cuts: tuple[int, ...] = (), **settings: float) -> list[Tensor]:
    """Both tables after the text, or after stretches of it."""
    ids = text(words)
    found = tables(tied)
    places = (0, *cuts, len(ids))
    for start, stop in pairwise(places):
        train_stretch(*found, ids, start, stop, draws_of(ids, **settings), 1, rates_of(ids), impl=impl)
    return list(found)


def step(model: SkipGram, centre: int, context: int, negatives: list[int], rate: float) -> None:
    """One step down the gradient of one pair's loss."""
    model.zero_grad()
    model.loss(torch.tensor([centre]), torch.tensor([context]), torch.tensor([negatives])).backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight -= rate * weight.grad


def model_of(first: Tensor, second: Tensor) -> SkipGram:
    """Over copies of these tables."""
    ends = [WordTable(*first.shape) for _ in range(1 if first is second else 2)]
    for end, values in zip(ends, (first, second), strict=False):
        end.weight = torch.nn.Parameter(values.clone())
    return SkipGram(ends[0], ends[-1])


@EITHER
def test_the_reference_goes_down_the_gradient_of_every_pair(tied: bool) -> None:
    ids = text(150)
    # One negative: of two that are equal word2vec lets the second see what the first has done.
    draws, rates = draws_of(ids, negatives=1), rates_of(ids)
    first, second = (0.3 * each for each in tables(tied, dtype=torch.float64))
    second = first if tied else second
    model = model_of(first, second)
    pairs = list(pairs_one_by_one(ids, 0, len(ids), draws, draws.key(1)))
    assert len(pairs) > 100
    assert any(context in (centre, *negatives) for centre, context, negatives, _ in pairs)
    for centre, context, negatives, place in pairs:
        step(model, centre, context, negatives, rates.at(place))
    train_stretch(first, second, ids, 0, len(ids), draws, 1, rates, impl="reference")
    torch.testing.assert_close(first, model.input.weight.data, rtol=0, atol=1e-12)
    torch.testing.assert_close(second, model.output.weight.data, rtol=0, atol=1e-12)


@EITHER
def test_numba_is_the_reference(tied: bool) -> None:
    pytest.importorskip("numba")
    for found, exact in zip(trained("numba", tied), trained("reference", tied), strict=True):
        torch.testing.assert_close(found, exact, rtol=2e-5, atol=2e-5)


@EITHER
def test_torch_in_batches_of_one_is_the_reference(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.kernels.torch_skip_gram.BATCH", {"cpu": 1, "cuda": 1})
    # One negative: none can come up twice in a pair.
    both = zip(trained("torch", tied, negatives=1), trained("reference", tied, negatives=1), strict=True)
    for found, exact in both:
        torch.testing.assert_close(found, exact, rtol=2e-5, atol=2e-5)


def test_a_batch_is_a_step_down_the_gradient_of_its_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = text(200)
    first, second = (0.3 * each for each in tables(False, dtype=torch.float64))
    model = model_of(first, second)
    draws = draws_of(ids)
    key = draws.key(1)
    pairs = pairs_of(draws, key, kept_words(draws, key, ids, 0, len(ids)))
    model.loss(pairs.centres, pairs.contexts, pairs.negatives).backward()
    flat = Rates(0.01, 0.01, len(ids))
    monkeypatch.setattr("reefknot.kernels.skip_gram_draws.CROWD", 1e9)
    assert len(pairs.centres) < 512  # one batch
    train_stretch(first, second, ids, 0, len(ids), draws, 1, flat, impl="torch")
    for found, end in ((first, model.input), (second, model.output)):
        assert end.weight.grad is not None
        torch.testing.assert_close(found, end.weight.data - 0.01 * end.weight.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "numba"])
def test_where_a_text_is_cut_changes_nothing(impl: Impl) -> None:
    if impl == "numba":
        pytest.importorskip("numba")
    for whole, cut in zip(trained(impl, False), trained(impl, False, cuts=(1, 57, 200, 201)), strict=True):
        torch.testing.assert_close(whole, cut, rtol=0, atol=1e-6 if impl == "reference" else 0)


@EITHER
def test_one_worker_gives_the_same_bits(tied: bool) -> None:
    pytest.importorskip("numba")
    once, again = trained("numba", tied), trained("numba", tied)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    other_seed = trained("numba", tied, seed=8)
    assert not torch.equal(once[0], other_seed[0])


def test_line_ends_and_unknown_words_are_no_words() -> None:
    before, after = tables(False), trained("torch", False)
    for table, start in zip(after, before, strict=True):
        assert torch.equal(table[:2], start[:2])
        assert not torch.equal(table[2:], start[2:])


def test_a_score_beyond_the_clip_has_no_gradient_of_its_own() -> None:
    ids = np.array([2, 3], np.int32)
    draws = draws_of(ids, negatives=1, sample=0.0, window=1)
    for impl in ("reference", "torch", "numba"):
        if impl == "numba":
            pytest.importorskip("numba")
        first = torch.zeros(40, 12)
        second = torch.zeros(40, 12)
        first[2:4, 0], second[2:4, 0] = 3.0, 2.5
        was = first.clone(), second.clone()
        train_stretch(first, second, ids, 0, 2, draws, 1, Rates(0.1, 0.1, 2), impl=impl)
        # 7.5 is above 6: the centre is right already. A negative is the other word, and is as wrong as can be.
        assert torch.equal((first - was[0])[:, 1:], torch.zeros(40, 11))
        moved = float((first - was[0])[2:4, 0].abs().sum())
        assert moved in (pytest.approx(0.0), pytest.approx(0.25), pytest.approx(0.5)), impl


@EITHER
@pytest.mark.parametrize("impl", ["torch", "numba"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(impl: Impl, tied: bool, value: float) -> None:
    if impl == "numba":
        pytest.importorskip("numba")
    ids = text(400)
    for row in (2, 5):
        first, second = tables(tied)
        second[row] = value
        train_stretch(first, second, ids, 0, len(ids), draws_of(ids), 1, rates_of(ids), impl=impl)
        assert not second[row].isfinite().any()
        assert not first.sum().isfinite()  # what met it has it too


def test_a_score_that_is_not_a_number_is_in_no_cell_of_the_sigmoid() -> None:
    compiled = pytest.importorskip("reefknot.kernels.numba_skip_gram", exc_type=ImportError)
    scores = np.array([-np.inf, -6.1, -6.0, 0.0, 5.999, 6.0, 6.1, np.inf, np.nan], np.float32)
    found = [float(compiled._sigmoid(score)) for score in scores]
    expected = [0.0, 0.0, *(1.0 / (1.0 + np.exp(-scores[2:6].astype(float)))), 1.0, 1.0, np.nan]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    # A number that is none must not be taken as one by the compiler.
    assert not {"nnan", "ninf", "fast"} & compiled._LOOSE


def quality(impl: Impl, tied: bool, workers: int = 1) -> float:
    ids = text(30_000, topics=6, vocabulary=302)
    draws = draws_of(ids, 302, window=5, negatives=5, sample=1e-3)
    generator = torch.Generator().manual_seed(0)
    first = torch.empty(302, 16).uniform_(-0.5 / 16, 0.5 / 16, generator=generator)
    second = first if tied else torch.zeros(302, 16)
    for epoch in range(1, 4):
        rates = Rates(0.05, 5e-6, 3 * len(ids), (epoch - 1) * len(ids))
        train_stretch(first, second, ids, 0, len(ids), draws, epoch, rates, workers=workers, impl=impl)
    assert first.isfinite().all()
    return topic_score(first, topics=6)


def test_batches_and_threads_learn_as_much_as_one_pair_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    in_turn = quality("numba", tied=False)
    assert in_turn > 0.9
    # As large as a batch may be on any device.
    monkeypatch.setattr("reefknot.kernels.torch_skip_gram.BATCH", {"cpu": 65_536, "cuda": 65_536})
    assert quality("torch", tied=False) > in_turn - 0.03
    assert quality("torch", tied=True) > quality("numba", tied=True) - 0.03
    assert quality("numba", tied=False, workers=2) > in_turn - 0.03
    # Many more threads than a machine has cores, all of them with work.
    monkeypatch.setattr("reefknot.kernels.numba_skip_gram.PLACES", 200)
    assert quality("numba", tied=False, workers=128) > in_turn - 0.03


def test_the_choice_of_an_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.zeros(3, 2)
    monkeypatch.setattr("reefknot.kernels.skip_gram.numba_available", lambda: False)
    assert resolve(table) == "torch"
    with pytest.raises(ArgumentError, match=r"reefknot\[numba\]"):
        resolve(table, "numba")
    monkeypatch.setattr("reefknot.kernels.skip_gram.numba_available", lambda: True)
    assert resolve(table) == "numba"
    assert resolve(table, "reference") == "reference"
    with pytest.raises(ArgumentError, match="must be one of"):
        resolve(table, "fortran")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="on the CPU"):
        resolve(table.to("meta"), "numba")


@pytest.mark.parametrize(
    ("start", "stop", "workers", "wide", "message"),
    [
        (0, 99, 1, 2, "is not within the 4 words of the text"),
        (3, 2, 1, 2, "is not within the 4 words of the text"),
        (0, 4, 0, 2, "workers = 0"),
        (0, 4, 1, 3, "must have the same shape"),
    ],
)
def test_what_does_not_fit_is_refused(start: int, stop: int, workers: int, wide: int, message: str) -> None:
    ids = np.array([2, 3, 2, 3], np.int32)
    with pytest.raises(ArgumentError, match=message):
        train_stretch(
            *(torch.zeros(40, 2), torch.zeros(40, wide), ids, start, stop, draws_of(ids), 1, rates_of(ids)),
            workers=workers,
        )


def test_tables_that_are_views_across_rows_are_refused() -> None:
    ids = np.array([2, 3], np.int32)
    with pytest.raises(ArgumentError, match="contiguous"):
        train_stretch(torch.zeros(2, 40).T, torch.zeros(40, 2), ids, 0, 2, draws_of(ids), 1, rates_of(ids))
