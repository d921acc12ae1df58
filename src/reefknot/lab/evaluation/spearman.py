"""Spearman's rank correlation, with mean ranks for ties, and a bootstrap interval over pairs.

Start with `spearman` and `spearman_interval`. In a resample, the weight of a pair is the number of times that it
occurs. The rank of a value follows from the weights of the smaller values, so one formula serves the original pairs
(all weights are one) and every resample.

Shapes: N pairs of numbers, R resamples, G distinct numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reefknot.lab.evaluation.comparison import resample_counts

FEWEST_PAIRS = 3
"""Minimum number of pairs. Two pairs always have a rank correlation of 1 or -1."""
FEWEST_RESAMPLED = 10
"""Minimum number of pairs for an interval. Fewer pairs have too few distinct resamples."""

Floats = NDArray[np.float64]


def spearman(x_N: Floats, y_N: Floats) -> float | None:
    """Return the rank correlation; None for fewer than 3 pairs, or if all numbers of a side are equal."""
    rho = float(_correlations(np.ones((1, len(x_N))), _Ranking.from_numbers(x_N), _Ranking.from_numbers(y_N))[0])
    return rho if len(x_N) >= FEWEST_PAIRS and np.isfinite(rho) else None


def spearman_interval(
    x_N: Floats, y_N: Floats, *, resamples: int, seed: int, level: float = 0.95
) -> tuple[float, float] | None:
    """Return quantiles of the correlation over resampled pairs. The same seed gives the same interval.

    Returns None if `spearman` does, for fewer than 10 pairs, and for a perfect correlation: every resample of it is
    perfect too, so the interval would have no width.
    """
    rho = spearman(x_N, y_N)
    if rho is None or len(x_N) < FEWEST_RESAMPLED or abs(rho) > 1 - 1e-12:  # 1 up to rounding
        return None
    x_ranking, y_ranking = _Ranking.from_numbers(x_N), _Ranking.from_numbers(y_N)
    weight_chunks = resample_counts(len(x_N), resamples, np.random.default_rng(seed))
    rho_R = np.concatenate([_correlations(weights_RN, x_ranking, y_ranking) for weights_RN in weight_chunks])
    rho_R = rho_R[np.isfinite(rho_R)]  # undefined if a resample repeats a single pair
    if not len(rho_R):
        return None
    low, high = np.quantile(rho_R, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class _Ranking:
    """The sort order of N numbers with G distinct values, from which ranks are computed."""

    order: NDArray[np.int64]
    """Indices order_N that sort the numbers."""
    starts: NDArray[np.int64]
    """Position starts_G of the first number with each value, in sorted order."""
    values: NDArray[np.int64]
    """Index values_N of each number's value among the sorted distinct values."""

    @classmethod
    def from_numbers(cls, numbers_N: Floats) -> _Ranking:
        _, values_N, counts_G = np.unique(numbers_N, return_inverse=True, return_counts=True)
        return cls(np.argsort(values_N, kind="stable"), np.cumsum(counts_G) - counts_G, values_N)

    def centred_ranks(self, weights_RN: Floats) -> Floats:
        """Return the ranks of the numbers minus the mean rank, given the number of times that each occurs.

        Equal numbers get the mean of their ranks.
        """
        weights_RG = np.add.reduceat(weights_RN[:, self.order], self.starts, axis=1)
        ranks_RG = np.cumsum(weights_RG, axis=1) - (weights_RG - 1) / 2
        centred_RN: Floats = ranks_RG[:, self.values] - (weights_RN.sum(axis=1, keepdims=True) + 1) / 2
        return centred_RN


def _correlations(weights_RN: Floats, x_ranking: _Ranking, y_ranking: _Ranking) -> Floats:
    """Return one correlation for each row of weights, NaN if it is undefined."""
    if not weights_RN.size:
        return np.full(len(weights_RN), np.nan)
    x_RN, y_RN = x_ranking.centred_ranks(weights_RN), y_ranking.centred_ranks(weights_RN)
    covariance_R, x_variance_R, y_variance_R = (
        np.einsum("rn,rn,rn->r", weights_RN, a_RN, b_RN) for a_RN, b_RN in ((x_RN, y_RN), (x_RN, x_RN), (y_RN, y_RN))
    )
    norm_R = np.sqrt(x_variance_R) * np.sqrt(y_variance_R)
    rho_R: Floats = np.divide(covariance_R, norm_R, out=np.full_like(norm_R, np.nan), where=norm_R > 0)
    return np.clip(rho_R, -1.0, 1.0)
