"""Intervals over seeds against scipy, and verdicts on differences."""

from __future__ import annotations

import pytest
from scipy import stats

from reefknot.lab.papers.figures.intervals import (
    estimate_bounded_mean,
    estimate_difference,
    estimate_mean,
    estimate_mean_correlation,
    format_estimate,
    format_verdict,
    subtract_estimates,
)

ONE, OTHER = [0.31, 0.28, 0.35, 0.30], [0.12, 0.18, 0.15]


def test_interval_of_a_mean_equals_students_t() -> None:
    interval = estimate_mean(ONE)
    expected = stats.ttest_1samp(ONE, 0).confidence_interval(0.95)
    assert (interval.low, interval.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert (interval.mean, interval.runs) == (pytest.approx(0.31), 4)


def test_interval_of_a_difference_equals_welchs_t() -> None:
    interval = estimate_difference(ONE, OTHER)
    expected = stats.ttest_ind(ONE, OTHER, equal_var=False).confidence_interval(0.95)
    assert (interval.low, interval.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert interval.mean == pytest.approx(0.16)


def test_difference_can_be_computed_from_two_intervals() -> None:
    interval = subtract_estimates(estimate_mean(ONE).json(), estimate_mean(OTHER).json())
    expected = stats.ttest_ind(ONE, OTHER, equal_var=False).confidence_interval(0.95)
    assert (interval.low, interval.high, interval.runs) == (
        pytest.approx(expected.low),
        pytest.approx(expected.high),
        3,
    )


def test_one_run_has_no_interval_and_decides_nothing() -> None:
    for interval in (estimate_mean([0.3]), estimate_difference([0.3], OTHER)):
        assert (interval.low, interval.high) == (None, None)
        assert format_verdict(interval.json(), "A beats B").endswith("; a single run has no interval.")


def test_equal_runs_have_an_interval_of_zero_width() -> None:
    assert estimate_difference([0.5, 0.5], [0.25, 0.25]).json() == {"mean": 0.25, "low": 0.25, "high": 0.25, "runs": 2}


def test_verdict_follows_from_the_interval() -> None:
    assert format_verdict(estimate_difference(ONE, OTHER).json(), "A beats B").startswith(
        "A beats B: confirmed, 0.160 ["
    )
    assert format_verdict(estimate_difference(OTHER, ONE).json(), "A beats B").startswith(
        "A beats B: contradicted, −0.160 [−"
    )
    assert format_verdict(estimate_mean([0.1, -0.1, 0.05]).json(), "A beats B").startswith("A beats B: undecided, ")
    assert format_estimate({"mean": -0.5, "low": None, "high": None}) == "−0.50"


def test_interval_of_correlations_stays_within_one() -> None:
    # By hand: mean 0.8, its standard error 0.1, t with one degree of freedom 12.7062: 0.8 ± 1.27062 by Student. On the
    # scale of z that is 1.098612 ± 1.27062 / (1 - 0.64) = 1.098612 ± 3.529500, from -2.430888 to 4.628112.
    assert estimate_mean([0.7, 0.9]).high == pytest.approx(2.07062, abs=1e-5)
    interval = estimate_mean_correlation([0.7, 0.9])
    assert (interval.mean, interval.runs) == (pytest.approx(0.8), 2)
    assert (interval.low, interval.high) == (pytest.approx(-0.984645, abs=1e-6), pytest.approx(0.999809, abs=1e-6))


def test_narrow_interval_of_correlations_equals_students_t() -> None:
    values = [0.3, 0.3001, 0.2999]
    interval, plain = estimate_mean_correlation(values), estimate_mean(values)
    assert (interval.low, interval.high) == (pytest.approx(plain.low, abs=1e-7), pytest.approx(plain.high, abs=1e-7))
    assert estimate_mean_correlation([1.0, 1.0]).json() == {"mean": 1.0, "low": 1.0, "high": 1.0, "runs": 2}
    assert estimate_mean_correlation([0.4]).low is None
    nearly = 1.0 - 2**-53
    assert estimate_mean_correlation([nearly, nearly]).high == pytest.approx(1.0)


def test_bounded_interval_stays_within_its_bounds() -> None:
    # By hand: mean 0.06, its standard error 0.04, t 12.7062: 0.06 ± 0.508248 by Student. The logit of the mean is
    # -2.751535, the slope there 1 / (0.06 * 0.94) = 17.730496: -2.751535 ± 9.011489, from -11.763024 to 6.259954.
    assert estimate_mean([0.02, 0.1]).low == pytest.approx(-0.448248, abs=1e-6)
    interval = estimate_bounded_mean([0.02, 0.1], 0.0, 1.0)
    assert (interval.mean, interval.runs) == (pytest.approx(0.06), 2)
    assert (interval.low, interval.high) == (pytest.approx(7.787e-6, rel=1e-3), pytest.approx(0.998092, abs=1e-6))
    mirrored = estimate_bounded_mean([0.98, 0.9], 0.0, 1.0)
    assert (mirrored.low, mirrored.high) == (pytest.approx(1 - interval.high), pytest.approx(1 - interval.low))


def test_bounded_interval_scales_with_the_units() -> None:
    values = [0.9, 0.97, 0.99]
    shares, percents = (
        estimate_bounded_mean(values, 0.0, 1.0),
        estimate_bounded_mean([100 * value for value in values], 0.0, 100.0),
    )
    assert (percents.low, percents.high) == (pytest.approx(100 * shares.low), pytest.approx(100 * shares.high))


@pytest.mark.parametrize("bound", [0.0, 1.0])
def test_runs_at_a_bound_have_an_interval(bound: float) -> None:
    assert estimate_bounded_mean([bound, bound], 0.0, 1.0).json() == {
        "mean": bound,
        "low": bound,
        "high": bound,
        "runs": 2,
    }
    interval = estimate_bounded_mean([bound, 0.5], 0.0, 1.0)
    assert 0.0 <= interval.low < interval.mean < interval.high <= 1.0


def test_claim_can_have_two_bounds() -> None:
    interval = {"mean": 0.5, "low": 0.4, "high": 0.6}
    assert "confirmed, 0.500" in format_verdict(interval, "about a half", 0.3, 0.7)
    assert "undecided" in format_verdict(interval, "about a half", 0.45, 0.7)
    for bounds in ((0.7, 0.9), (0.1, 0.3)):
        assert "contradicted" in format_verdict(interval, "elsewhere", *bounds)
