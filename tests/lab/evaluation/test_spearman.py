"""Spearman's correlation against scipy, and resampling against repeated pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from reefknot.lab.evaluation.comparison import resample_counts
from reefknot.lab.evaluation.spearman import FEWEST_RESAMPLED, _correlations, _Ranking, spearman, spearman_interval

PAIRS = st.lists(st.tuples(st.integers(0, 6), st.floats(-1e6, 1e6)), min_size=3, max_size=40)


@settings(max_examples=200)
@given(PAIRS)
def test_spearman_equals_scipy_with_ties(pairs: list[tuple[int, float]]) -> None:
    x, y = (np.array(side, dtype=np.float64) for side in zip(*pairs, strict=True))
    rho = spearman(x, y)
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert rho is None
    else:
        assert rho == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)


@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_fewer_than_three_pairs_have_no_correlation(pairs: int) -> None:
    x = np.arange(pairs, dtype=np.float64)
    assert spearman(x, x) is None
    assert spearman_interval(x, x, resamples=10, seed=0) is None


def test_constant_side_has_no_correlation() -> None:
    x = np.arange(9.0)
    assert spearman(x, np.ones(9)) is None
    assert spearman_interval(x, np.ones(9), resamples=10, seed=0) is None


def test_spearman_depends_only_on_the_order() -> None:
    x = np.random.default_rng(0).standard_normal(50)
    assert spearman(x, np.exp(x)) == pytest.approx(1.0, abs=1e-15)
    assert spearman(x, -(x**3)) == pytest.approx(-1.0, abs=1e-15)


def test_weights_equal_repeated_pairs() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(0, 8, 30).astype(float)
    y = rng.standard_normal(30)
    times = np.concatenate(list(resample_counts(30, 20, rng)))
    correlations = _correlations(times, _Ranking.from_numbers(x), _Ranking.from_numbers(y))
    expected = [spearmanr(*(np.repeat(side, row.astype(int)) for side in (x, y))).statistic for row in times]
    assert correlations == pytest.approx(expected, abs=1e-12)


def test_interval_depends_on_the_seed_and_has_the_expected_width() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal(400)
    y = x + rng.standard_normal(400)
    interval = spearman_interval(x, y, resamples=500, seed=3)
    assert interval == spearman_interval(x, y, resamples=500, seed=3) != spearman_interval(x, y, resamples=500, seed=4)
    assert interval is not None
    low, high = interval
    rho = spearman(x, y)
    assert rho is not None
    assert low < rho < high
    # Bonett and Wright's approximation, by Fisher's transformation.
    half = 1.96 * (1 - rho**2) * np.sqrt((1 + rho**2 / 2) / 397)
    assert high - low == pytest.approx(2 * half, rel=0.25)


def test_few_pairs_have_no_interval() -> None:
    y = np.random.default_rng(0).standard_normal(FEWEST_RESAMPLED)
    x = np.arange(float(len(y)))
    assert spearman_interval(x, y, resamples=200, seed=0) is not None
    assert spearman(x[1:], y[1:]) is not None
    assert spearman_interval(x[1:], y[1:], resamples=200, seed=0) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_perfect_correlation_has_no_interval(sign: int) -> None:
    x = np.random.default_rng(0).standard_normal(50)
    assert spearman(x, sign * x) == pytest.approx(sign)
    assert spearman_interval(x, sign * x, resamples=200, seed=0) is None


def test_resamples_without_correlation_do_not_give_nan() -> None:
    x = np.arange(float(FEWEST_RESAMPLED))
    y = (x == 4).astype(np.float64)  # a third of the resamples miss the value that differs
    interval = spearman_interval(x, y, resamples=200, seed=0)
    assert interval is not None
    assert -1.0 <= interval[0] < interval[1] <= 1.0
