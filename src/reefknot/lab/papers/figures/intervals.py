"""Means over seeds with 95 % intervals, which show how much a measurement changes when training is repeated.

Intervals are Student's t, on the logit scale for bounded quantities; for correlations this is Fisher's z. A single run
has no interval, so a claim that rests on one run is undecided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, variance
from typing import Any

from scipy import special, stats

LEVEL = 0.95


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


def over_seeds(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per run, with its interval."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, len(values))
    half = _quantile(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def over_bounded(values: Sequence[float], least: float, most: float) -> Estimate:
    """Return the mean of one value per run between `least` and `most`, with an interval inside these bounds.

    Student's interval is mapped to the scale of the logit, log((x - least) / (most - x)), with the slope at the mean
    (the delta method), and its ends are mapped back. The result contains the mean, and for a narrow interval it equals
    Student's interval. The logits of single runs are not used, because they are infinite at a bound. Student's interval
    is not clipped, because that would hide how far it exceeds a bound.
    """
    plain = over_seeds(values)
    if plain.high is None or not least < plain.mean < most:
        return plain
    below, above = plain.mean - least, most - plain.mean
    centre, half = math.log(below / above), (plain.high - plain.mean) * (most - least) / (below * above)
    low, high = (least + (most - least) * float(special.expit(end)) for end in (centre - half, centre + half))
    return Estimate(plain.mean, low, high, plain.runs)


def over_correlations(values: Sequence[float]) -> Estimate:
    """Return the mean of one correlation per run. The logit of a correlation is twice Fisher's z = artanh(rho)."""
    return over_bounded(values, -1.0, 1.0)


def apart(ours: Sequence[float], others: Sequence[float]) -> Estimate:
    """Return the difference between the means of two independent sets of runs."""
    return difference(over_seeds(ours).json(), over_seeds(others).json())


def difference(ours: Mapping[str, Any], others: Mapping[str, Any]) -> Estimate:
    """Return the difference of two means over seeds (Welch's t). Their variances are computed from their intervals."""
    gap, runs = ours["mean"] - others["mean"], min(ours["runs"], others["runs"])
    if runs < 2:
        return Estimate(gap, None, None, runs)
    freedoms = [estimate["runs"] - 1 for estimate in (ours, others)]
    variances = [  # of the two means
        ((estimate["high"] - estimate["mean"]) / _quantile(freedom)) ** 2
        for estimate, freedom in zip((ours, others), freedoms, strict=True)
    ]
    total = sum(variances)
    if not total:
        return Estimate(gap, gap, gap, runs)
    freedom = total**2 / sum(variance**2 / freedom for variance, freedom in zip(variances, freedoms, strict=True))
    half = _quantile(freedom) * math.sqrt(total)
    return Estimate(gap, gap - half, gap + half, runs)


def format_estimate(estimate: dict[str, Any], digits: int = 2) -> str:
    """Format an estimate for a table: 0.31 [0.28, 0.34]."""
    mean, *ends = (
        f"{round(value, digits) + 0.0:.{digits}f}"  # adding 0.0 avoids a negative zero
        for value in (estimate["mean"], estimate["low"], estimate["high"])
        if value is not None
    )
    return f"{mean} [{', '.join(ends)}]".replace("-", "−") if ends else mean.replace("-", "−")


def verdict(
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


def _quantile(freedom: float) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))
