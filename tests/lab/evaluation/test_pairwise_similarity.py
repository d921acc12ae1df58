"""Correlation of all pairwise cosines: against scipy, and its ways of getting there against one another."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import spearmanr

from reefknot.errors import DataError, SettingsError
from reefknot.lab.evaluation import pairwise_similarity
from reefknot.lab.evaluation.pairwise_similarity import PairwiseCorrelation, pairwise_correlation
from reefknot.vectors.word_vectors import WordVectors


def table(vectors_VD: NDArray[np.floating], start: int = 0) -> WordVectors:
    words = tuple(f"w{index}" for index in range(start, start + len(vectors_VD)))
    return WordVectors(words, vectors_VD.astype(np.float32))


def related(words: int, dim: int, seed: int = 0) -> tuple[WordVectors, WordVectors]:
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((words, dim))
    return table(first), table(first + 0.7 * rng.standard_normal((words, dim)))


def by_scipy(one: WordVectors, other: WordVectors) -> float:
    sides = []
    for each in (one, other):
        rows = each.vectors_VD.astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        unit = rows / np.where(lengths > 0, lengths, 1)
        sides.append(np.round((unit @ unit.T)[np.triu_indices(len(rows), 1)], 12))
    return float(spearmanr(*sides).statistic)


@pytest.fixture(params=["sorted", "counted"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small vocabularies by the way of large ones too, in many blocks."""
    if request.param == "counted":
        monkeypatch.setattr(pairwise_similarity, "FEW", 0)
        monkeypatch.setattr(pairwise_similarity, "_BLOCK", 5_000)
    return str(request.param)


def test_all_pairs_as_scipy_has_them(way: str) -> None:
    one, other = related(300, 12)
    found = pairwise_correlation(one, other)
    assert found.rho == pytest.approx(by_scipy(one, other), abs=1e-12 if way == "sorted" else 2e-6)
    assert (found.low, found.high, found.pairs, found.exact) == (None, None, 300 * 299 // 2, True)
    assert pairwise_correlation(other, one).rho == pytest.approx(found.rho, abs=1e-12)


def test_more_pairs_than_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = related(1_500, 8)
    found = pairwise_correlation(one, other)
    assert found.pairs > pairwise_similarity.FEW
    monkeypatch.setattr(pairwise_similarity, "FEW", 10**9)
    assert found.rho == pytest.approx(pairwise_correlation(one, other).rho, abs=1e-7)


def test_ties(way: str) -> None:
    """Few distinct vectors, zeros among them: most cosines are equal."""
    rng = np.random.default_rng(3)
    one, other = (table(rng.integers(-1, 2, (80, 2)).astype(float)) for _ in range(2))
    assert pairwise_correlation(one, other).rho == pytest.approx(by_scipy(one, other), abs=1e-9)


def test_cosines_that_are_all_near_one(way: str) -> None:
    rng = np.random.default_rng(4)
    noise = rng.standard_normal((120, 6))
    one = table(5 + 1e-2 * noise)
    other = table(5 + 1e-2 * (noise + 0.3 * rng.standard_normal((120, 6))))
    assert pairwise_correlation(one, other).rho == pytest.approx(by_scipy(one, other), abs=1e-5)


def test_a_table_agrees_with_itself_turned_and_stretched(way: str) -> None:
    one, _ = related(100, 5)
    turn = np.linalg.qr(np.random.default_rng(5).standard_normal((5, 5)))[0]
    turned = table(3 * one.vectors_VD @ turn)
    assert pairwise_correlation(one, one).rho == pytest.approx(1.0, abs=1e-12)
    assert pairwise_correlation(one, turned).rho == pytest.approx(1.0, abs=1e-5)


def test_widths_may_differ_and_only_shared_words_count() -> None:
    rng = np.random.default_rng(6)
    one, other = table(rng.standard_normal((60, 4))), table(rng.standard_normal((60, 9)), start=20)
    shared = [word for word in one.words if word in other]
    found = pairwise_correlation(one, other)
    assert found.pairs == 40 * 39 // 2
    assert found.rho == pytest.approx(by_scipy(one.select(shared), other.select(shared)), abs=1e-12)


def test_a_sample_covers_what_all_pairs_give() -> None:
    one, other = related(400, 10)
    exact = pairwise_correlation(one, other).rho
    assert exact is not None
    inside = 0
    for seed in range(40):
        found = pairwise_correlation(one, other, exact_below=0, samples=4_000, seed=seed)
        assert not found.exact
        assert found.pairs == 4_000
        assert found.low is not None
        assert found.high is not None
        assert found.rho is not None
        assert found.low < found.rho < found.high
        assert found.high - found.low < 0.06
        inside += found.low <= exact <= found.high
    assert inside >= 34  # 38 of 40 are expected


def test_equal_seeds_draw_equal_pairs() -> None:
    one, other = related(200, 3)

    def drawn(seed: int) -> PairwiseCorrelation:
        return pairwise_correlation(one, other, exact_below=10, samples=500, seed=seed)

    assert drawn(1) == drawn(1) != drawn(2)


def test_no_more_is_drawn_than_there_is() -> None:
    assert pairwise_correlation(*related(20, 3), exact_below=0).exact


@pytest.mark.parametrize("other", ["constant", "zero", "one direction", "one direction, counted"])
def test_all_cosines_equal_is_undefined(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = related(40, 3)
    flat = {"constant": np.full((40, 3), 0.1), "zero": np.zeros((40, 3))}
    if other.endswith("counted"):
        monkeypatch.setattr(pairwise_similarity, "FEW", 0)
    constant = table(flat.get(other, np.outer(np.arange(1, 41), [0.3, 0.1, 0.7])))
    assert pairwise_correlation(one, constant) == PairwiseCorrelation(None, None, None, 780, True)
    drawn = pairwise_correlation(one, constant, exact_below=0, samples=200)
    assert drawn == PairwiseCorrelation(None, None, None, 200, False)


@pytest.mark.parametrize("words", [1, 2])
def test_too_few_words_are_undefined(words: int, way: str) -> None:
    assert pairwise_correlation(*related(words, 3)).rho is None


def test_refusals() -> None:
    one, _ = related(5, 2)
    with pytest.raises(DataError, match="no word in common"):
        pairwise_correlation(one, table(np.ones((3, 2)), start=100))
    with pytest.raises(SettingsError, match="samples = 3: must be at least 120"):
        pairwise_correlation(one, one, samples=3)
