"""Estimate means over seeds with 95 % intervals, and check the claims of papers against them.

An interval shows how much a measurement changes when training is repeated with another seed:

    estimate_mean([110.2, 111.0, 110.5])               # one value per run
    estimate_difference([110.2, 111.0], [114.0, 113.1])
    format_verdict(estimate.json(), "AL lowers it")    # "AL lowers it: confirmed, 3.112 [2.204, 4.020]."

Intervals use Student's t distribution. For bounded quantities they are computed on the logit scale, which for
correlations is Fisher's z. A single run has no interval, so a claim that rests on one run is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, variance
from typing import Any

from scipy import special, stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over runs with its interval; there is no interval for a single run."""

    mean: float
    low: float | None
    high: float | None
    runs: int
    """The number of runs; for a difference, the smaller of the two numbers."""

    def json(self) -> dict[str, Any]:
        """Return the estimate as plain JSON values."""
        return asdict(self)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Return the mean of the values, one per run, with its interval."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, len(values))
    half_width = _t_quantile(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Estimate(mean, mean - half_width, mean + half_width, len(values))


def estimate_bounded_mean(values: Sequence[float], lower: float, upper: float) -> Estimate:
    """Return the mean of values between `lower` and `upper`, one per run, with an interval inside these bounds.

    Student's interval is mapped to the scale of the logit, log((x - lower) / (upper - x)), with the slope at the mean
    (the delta method), and its ends are mapped back. The result contains the mean, and for a narrow interval it equals
    Student's interval. The logits of individual runs are not used, because they are infinite at a bound. Student's
    interval is not clipped, because that would hide how far it exceeds a bound.
    """
    student = estimate_mean(values)
    if student.high is None or not lower < student.mean < upper:
        return student
    above_lower = student.mean - lower
    below_upper = upper - student.mean
    logit = math.log(above_lower / below_upper)
    half_width = (student.high - student.mean) * (upper - lower) / (above_lower * below_upper)
    low = lower + (upper - lower) * float(special.expit(logit - half_width))
    high = lower + (upper - lower) * float(special.expit(logit + half_width))
    return Estimate(student.mean, low, high, student.runs)


def estimate_mean_correlation(values: Sequence[float]) -> Estimate:
    """Return the mean of the correlations, one per run.

    The logit of a correlation is twice Fisher's z = artanh(rho).
    """
    return estimate_bounded_mean(values, -1.0, 1.0)


def estimate_difference(values: Sequence[float], baseline_values: Sequence[float]) -> Estimate:
    """Return the difference between the means of two independent sets of runs."""
    return subtract_estimates(estimate_mean(values).json(), estimate_mean(baseline_values).json())


def subtract_estimates(estimate: Mapping[str, Any], baseline: Mapping[str, Any]) -> Estimate:
    """Return the difference of two means over seeds (Welch's t). Variances are computed from the intervals.

    Args:
        estimate: A mean with its interval, from `Estimate.json`.
        baseline: The mean that is subtracted.
    """
    gap = estimate["mean"] - baseline["mean"]
    runs = min(estimate["runs"], baseline["runs"])
    if runs < 2:
        return Estimate(gap, None, None, runs)

    degrees, baseline_degrees = estimate["runs"] - 1, baseline["runs"] - 1
    mean_variance = _variance_of_mean(estimate)
    baseline_variance = _variance_of_mean(baseline)
    gap_variance = mean_variance + baseline_variance
    if not gap_variance:
        return Estimate(gap, gap, gap, runs)

    welch_degrees = gap_variance**2 / (mean_variance**2 / degrees + baseline_variance**2 / baseline_degrees)
    half_width = _t_quantile(welch_degrees) * math.sqrt(gap_variance)
    return Estimate(gap, gap - half_width, gap + half_width, runs)


def _variance_of_mean(estimate: Mapping[str, Any]) -> float:
    """Compute the variance of a mean over seeds from its interval."""
    half_width: float = estimate["high"] - estimate["mean"]
    return (half_width / _t_quantile(estimate["runs"] - 1)) ** 2


def format_estimate(estimate: dict[str, Any], digits: int = 2) -> str:
    """Format an estimate for a table: 0.31 [0.28, 0.34]."""

    def format_number(value: float) -> str:
        return f"{round(value, digits) + 0.0:.{digits}f}"  # adding 0.0 avoids a negative zero

    formatted = format_number(estimate["mean"])
    bounds = [format_number(bound) for bound in (estimate["low"], estimate["high"]) if bound is not None]
    if bounds:
        formatted += f" [{', '.join(bounds)}]"
    return formatted.replace("-", "−")


def format_verdict(
    estimate: dict[str, Any], claim: str, low: float = 0.0, high: float = math.inf, unit: str | None = None
) -> str:
    """Return a sentence on whether a paper's claim, that a value lies between `low` and `high`, is confirmed.

    The claim is confirmed if the whole interval lies between the bounds, and contradicted if all of it lies on one side
    of them. By default the claim is that a difference is above zero. The sentence begins with the claim.
    """
    value = format_estimate(estimate, 3)
    if unit:
        value += f" {unit}"
    if estimate["low"] is None:
        return f"{claim}: undecided, {value}; a single run has no interval."
    if low < estimate["low"] and estimate["high"] < high:
        return f"{claim}: confirmed, {value}."
    if estimate["high"] < low or high < estimate["low"]:
        return f"{claim}: contradicted, {value}."
    return f"{claim}: undecided, {value}."


def _t_quantile(degrees_of_freedom: float) -> float:
    """Return the factor from the standard error to half of the interval's width."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees_of_freedom))
