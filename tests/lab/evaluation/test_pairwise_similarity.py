"""Correlation of all pairwise cosines: against scipy, and its algorithms against each other."""

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
    values = rng.standard_normal((words, dim))
    return table(values), table(values + 0.7 * rng.standard_normal((words, dim)))


def by_scipy(first_table: WordVectors, second_table: WordVectors) -> float:
    sides = []
    for vectors in (first_table, second_table):
        rows = vectors.vectors_VD.astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        unit = rows / np.where(lengths > 0, lengths, 1)
        sides.append(np.round((unit @ unit.T)[np.triu_indices(len(rows), 1)], 12))
    return float(spearmanr(*sides).statistic)


@pytest.fixture(params=["sorted", "counted"])
def algorithm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run small vocabularies with the algorithm for large ones too, in many blocks."""
    if request.param == "counted":
        monkeypatch.setattr(pairwise_similarity, "MAX_SORTED_PAIRS", 0)
        monkeypatch.setattr(pairwise_similarity, "_COSINES_AT_ONCE", 5_000)
    return str(request.param)


def test_correlation_of_all_pairs_equals_scipy(algorithm: str) -> None:
    first_table, second_table = related(300, 12)
    correlation = pairwise_correlation(first_table, second_table)
    assert correlation.rho == pytest.approx(
        by_scipy(first_table, second_table), abs=1e-12 if algorithm == "sorted" else 2e-6
    )
    assert (correlation.low, correlation.high, correlation.pairs, correlation.exact) == (
        None,
        None,
        300 * 299 // 2,
        True,
    )
    assert pairwise_correlation(second_table, first_table).rho == pytest.approx(correlation.rho, abs=1e-12)


def test_counting_algorithm_equals_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    first_table, second_table = related(1_500, 8)
    correlation = pairwise_correlation(first_table, second_table)
    assert correlation.pairs > pairwise_similarity.MAX_SORTED_PAIRS
    monkeypatch.setattr(pairwise_similarity, "MAX_SORTED_PAIRS", 10**9)
    assert correlation.rho == pytest.approx(pairwise_correlation(first_table, second_table).rho, abs=1e-7)


def test_ties_equal_scipy(algorithm: str) -> None:
    """There are few distinct vectors, so most cosines are equal."""
    rng = np.random.default_rng(3)
    first_table, second_table = (table(rng.integers(-1, 2, (80, 2)).astype(float)) for _ in range(2))
    assert pairwise_correlation(first_table, second_table).rho == pytest.approx(
        by_scipy(first_table, second_table), abs=1e-9
    )


def test_cosines_close_to_one_equal_scipy(algorithm: str) -> None:
    rng = np.random.default_rng(4)
    noise = rng.standard_normal((120, 6))
    first_table = table(5 + 1e-2 * noise)
    second_table = table(5 + 1e-2 * (noise + 0.3 * rng.standard_normal((120, 6))))
    assert pairwise_correlation(first_table, second_table).rho == pytest.approx(
        by_scipy(first_table, second_table), abs=1e-5
    )


def test_rotation_and_scale_do_not_change_the_correlation(algorithm: str) -> None:
    first_table, _ = related(100, 5)
    rotation = np.linalg.qr(np.random.default_rng(5).standard_normal((5, 5)))[0]
    rotated = table(3 * first_table.vectors_VD @ rotation)
    assert pairwise_correlation(first_table, first_table).rho == pytest.approx(1.0, abs=1e-12)
    assert pairwise_correlation(first_table, rotated).rho == pytest.approx(1.0, abs=1e-5)


def test_only_shared_words_count_and_dimensions_may_differ() -> None:
    rng = np.random.default_rng(6)
    first_table = table(rng.standard_normal((60, 4)))
    second_table = table(rng.standard_normal((60, 9)), start=20)
    shared = [word for word in first_table.words if word in second_table]
    correlation = pairwise_correlation(first_table, second_table)
    assert correlation.pairs == 40 * 39 // 2
    assert correlation.rho == pytest.approx(
        by_scipy(first_table.select(shared), second_table.select(shared)), abs=1e-12
    )


def test_interval_of_a_sample_covers_the_exact_value() -> None:
    first_table, second_table = related(400, 10)
    exact = pairwise_correlation(first_table, second_table).rho
    assert exact is not None
    inside = 0
    for seed in range(40):
        correlation = pairwise_correlation(first_table, second_table, exact_below=0, samples=4_000, seed=seed)
        assert not correlation.exact
        assert correlation.pairs == 4_000
        assert correlation.low is not None
        assert correlation.high is not None
        assert correlation.rho is not None
        assert correlation.low < correlation.rho < correlation.high
        assert correlation.high - correlation.low < 0.06
        inside += correlation.low <= exact <= correlation.high
    assert inside >= 34  # 38 of 40 are expected


def test_equal_seeds_sample_equal_pairs() -> None:
    first_table, second_table = related(200, 3)

    def sampled(seed: int) -> PairwiseCorrelation:
        return pairwise_correlation(first_table, second_table, exact_below=10, samples=500, seed=seed)

    assert sampled(1) == sampled(1) != sampled(2)


def test_small_vocabulary_is_not_sampled() -> None:
    assert pairwise_correlation(*related(20, 3), exact_below=0).exact


@pytest.mark.parametrize("second_table", ["constant", "zero", "one direction", "one direction, counted"])
def test_correlation_of_equal_cosines_is_undefined(second_table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first_table, _ = related(40, 3)
    flat = {"constant": np.full((40, 3), 0.1), "zero": np.zeros((40, 3))}
    if second_table.endswith("counted"):
        monkeypatch.setattr(pairwise_similarity, "MAX_SORTED_PAIRS", 0)
    constant = table(flat.get(second_table, np.outer(np.arange(1, 41), [0.3, 0.1, 0.7])))
    assert pairwise_correlation(first_table, constant) == PairwiseCorrelation(None, None, None, 780, True)
    sampled = pairwise_correlation(first_table, constant, exact_below=0, samples=200)
    assert sampled == PairwiseCorrelation(None, None, None, 200, False)


@pytest.mark.parametrize("words", [1, 2])
def test_correlation_of_too_few_words_is_undefined(words: int, algorithm: str) -> None:
    assert pairwise_correlation(*related(words, 3)).rho is None


def test_disjoint_vocabularies_and_too_few_samples_are_rejected() -> None:
    first_table, _ = related(5, 2)
    with pytest.raises(DataError, match="no word in common"):
        pairwise_correlation(first_table, table(np.ones((3, 2)), start=100))
    with pytest.raises(SettingsError, match="samples = 3: must be at least 120"):
        pairwise_correlation(first_table, first_table, samples=3)
