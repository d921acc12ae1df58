"""Estimate means over seeds with 95 % intervals, and check the claims of papers against them.

An interval shows how much a measurement changes when training is repeated with another seed. `estimate_mean` is the
usual case, `estimate_difference` compares two sets of runs, and `format_verdict` turns an estimate into a sentence.

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
    below, above = student.mean - lower, upper - student.mean
    logit = math.log(below / above)
    half_width = (student.high - student.mean) * (upper - lower) / (below * above)
    low, high = (
        lower + (upper - lower) * float(special.expit(end)) for end in (logit - half_width, logit + half_width)
    )
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
    """Return the difference of two means over seeds (Welch's t). Variances are computed from the intervals."""
    gap, runs = estimate["mean"] - baseline["mean"], min(estimate["runs"], baseline["runs"])
    if runs < 2:
        return Estimate(gap, None, None, runs)
    degrees_of_freedom = [operand["runs"] - 1 for operand in (estimate, baseline)]
    variances = [  # of the two means
        ((operand["high"] - operand["mean"]) / _t_quantile(degrees)) ** 2
        for operand, degrees in zip((estimate, baseline), degrees_of_freedom, strict=True)
    ]
    total = sum(variances)
    if not total:
        return Estimate(gap, gap, gap, runs)
    welch_degrees = total**2 / sum(
        variance**2 / degrees for variance, degrees in zip(variances, degrees_of_freedom, strict=True)
    )
    half_width = _t_quantile(welch_degrees) * math.sqrt(total)
    return Estimate(gap, gap - half_width, gap + half_width, runs)


def format_estimate(estimate: dict[str, Any], digits: int = 2) -> str:
    """Format an estimate for a table: 0.31 [0.28, 0.34]."""
    mean, *bounds = (
        f"{round(value, digits) + 0.0:.{digits}f}"  # adding 0.0 avoids a negative zero
        for value in (estimate["mean"], estimate["low"], estimate["high"])
        if value is not None
    )
    text = f"{mean} [{', '.join(bounds)}]" if bounds else mean
    return text.replace("-", "−")


def format_verdict(
    estimate: dict[str, Any], claim: str, low: float = 0.0, high: float = math.inf, unit: str | None = None
) -> str:
    """Return a sentence on whether a paper's claim, that a value lies between `low` and `high`, is confirmed.

    By default the claim is that a difference is above zero. The sentence begins with the claim.
    """
    value = format_estimate(estimate, 3) + (f" {unit}" if unit else "")
    if estimate["low"] is None:
        return f"{claim}: undecided, {value}; a single run has no interval."
    if low < estimate["low"] and estimate["high"] < high:
        return f"{claim}: confirmed, {value}."
    if estimate["high"] < low or high < estimate["low"]:
        return f"{claim}: contradicted, {value}."
    return f"{claim}: undecided, {value}."


def _t_quantile(degrees_of_freedom: float) -> float:
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees_of_freedom))
