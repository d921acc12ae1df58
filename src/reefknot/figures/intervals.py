"""Means over seeds with 95 % intervals: how far training again may move a figure. Student's t, for correlations on the
scale of Fisher's z.

One run tells nothing of that: its mean has no interval, and a finding that rests on it is not decided.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, variance
from typing import Any

from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over runs, and where it lies; no interval where one run is all there is."""

    mean: float
    low: float | None
    high: float | None
    runs: int

    def json(self) -> dict[str, Any]:
        return asdict(self)


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of one figure per run."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None, len(values))
    half = _quantile(len(values) - 1) * math.sqrt(variance(values) / len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def over_correlations(values: Sequence[float]) -> Estimate:
    """The mean of one correlation per run. Its interval is Student's on the scale of Fisher's z = artanh(rho), carried
    there by the slope at the mean, 1 / (1 - mean^2), and back: it has the mean inside and never leaves -1 to 1, and for
    narrow intervals it is Student's own."""
    plain = over_seeds(values)
    if plain.high is None or abs(plain.mean) == 1.0:
        return plain
    centre, half = math.atanh(plain.mean), (plain.high - plain.mean) / (1 - plain.mean**2)
    return Estimate(plain.mean, math.tanh(centre - half), math.tanh(centre + half), plain.runs)


def apart(ours: Sequence[float], others: Sequence[float]) -> Estimate:
    """The difference of the means of two sets of runs that have nothing to do with each other (Welch's)."""
    gap = fmean(ours) - fmean(others)
    runs = min(len(ours), len(others))
    if runs < 2:
        return Estimate(gap, None, None, runs)
    parts = [variance(values) / len(values) for values in (ours, others)]
    if not sum(parts):
        return Estimate(gap, gap, gap, runs)
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (ours, others), strict=True)
    )
    half = _quantile(freedom) * math.sqrt(sum(parts))
    return Estimate(gap, gap - half, gap + half, runs)


def told(estimate: dict[str, Any], digits: int = 2) -> str:
    """As it stands in a table: 0.31 [0.28, 0.34]."""
    mean, *ends = (
        f"{round(value, digits) + 0.0:.{digits}f}"  # which has no negative zero
        for value in (estimate["mean"], estimate["low"], estimate["high"])
        if value is not None
    )
    return f"{mean} [{', '.join(ends)}]".replace("-", "−") if ends else mean.replace("-", "−")


def verdict(estimate: dict[str, Any], claim: str, low: float = 0.0, high: float = math.inf) -> str:
    """Whether what a paper finds between two ends, a difference above zero unless they are given, is seen here: a
    sentence that begins with the claim."""
    figure = told(estimate, 3)
    if estimate["low"] is None:
        return f"{claim}: {figure}; one run has no interval, so that nothing is decided."
    if low < estimate["low"] and estimate["high"] < high:
        return f"{claim}: seen, {figure}."
    if estimate["high"] < low or high < estimate["low"]:
        return f"{claim}: the contrary is seen, {figure}."
    return f"{claim}: not decided, {figure}."


def _quantile(freedom: float) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))
