"""Spearman's rank correlation, with mean ranks for ties, and a bootstrap interval over pairs.

Start with `spearman` and `spearman_interval`:

    spearman(x_N, y_N)                                        # one number, from -1 to 1
    spearman_interval(x_N, y_N, resamples=1000, seed=0)       # (low, high)

The bootstrap draws pairs (x, y) with replacement. In a resample, the weight of a pair is the number of times that it
occurs. The rank of a value follows from the weights of the smaller values, so one formula serves the original pairs
(all weights are one) and every resample.

Shapes: N pairs of numbers, R resamples, G groups of equal numbers.
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

_LEVEL = 0.95  # of the confidence interval

Floats = NDArray[np.float64]


def spearman(x_N: Floats, y_N: Floats) -> float | None:
    """Return the rank correlation; None for fewer than 3 pairs, or if all numbers of a side are equal."""
    all_ones_1N = np.ones((1, len(x_N)))
    rho_1 = _correlations(all_ones_1N, _Ranking.from_numbers(x_N), _Ranking.from_numbers(y_N))
    rho = float(rho_1[0])
    if len(x_N) < FEWEST_PAIRS or not np.isfinite(rho):
        return None
    return rho


def spearman_interval(x_N: Floats, y_N: Floats, *, resamples: int, seed: int) -> tuple[float, float] | None:
    """Return a 95 % confidence interval: quantiles of the correlation over resampled pairs.

    The same seed gives the same interval.

    Returns None if `spearman` does, for fewer than 10 pairs, and for a perfect correlation: every resample of it is
    perfect too, so the interval would have no width.
    """
    rho = spearman(x_N, y_N)
    if rho is None or len(x_N) < FEWEST_RESAMPLED:
        return None
    is_perfect = abs(rho) > 1 - 1e-12  # 1 up to rounding
    if is_perfect:
        return None

    x_ranking = _Ranking.from_numbers(x_N)
    y_ranking = _Ranking.from_numbers(y_N)
    weight_chunks = resample_counts(len(x_N), resamples, np.random.default_rng(seed))
    rho_R = np.concatenate([_correlations(weights_RN, x_ranking, y_ranking) for weights_RN in weight_chunks])
    rho_R = rho_R[np.isfinite(rho_R)]  # undefined if a resample repeats a single pair
    if not len(rho_R):
        return None
    low, high = np.quantile(rho_R, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class _Ranking:
    """The sort order of N numbers, from which ranks are computed. Equal numbers form a group; there are G groups."""

    order: NDArray[np.int64]
    """Indices that sort the numbers, order_N."""
    group_starts: NDArray[np.int64]
    """Position of the first number of each group, in sorted order, group_starts_G."""
    group_of_number: NDArray[np.int64]
    """Index of the group of each number, group_N."""

    @classmethod
    def from_numbers(cls, numbers_N: Floats) -> _Ranking:
        _, group_N, counts_G = np.unique(numbers_N, return_inverse=True, return_counts=True)
        order_N = np.argsort(group_N, kind="stable")
        group_starts_G = np.cumsum(counts_G) - counts_G
        return cls(order_N, group_starts_G, group_N)

    def centred_ranks(self, weights_RN: Floats) -> Floats:
        """Return the ranks of the numbers minus the mean rank, given the number of times that each occurs.

        Equal numbers get the mean of their ranks.
        """
        weights_RG = np.add.reduceat(weights_RN[:, self.order], self.group_starts, axis=1)
        ranks_RG = np.cumsum(weights_RG, axis=1) - (weights_RG - 1) / 2
        mean_ranks_R1 = (weights_RN.sum(axis=1, keepdims=True) + 1) / 2
        centred_ranks_RN: Floats = ranks_RG[:, self.group_of_number] - mean_ranks_R1
        return centred_ranks_RN


def _correlations(weights_RN: Floats, x_ranking: _Ranking, y_ranking: _Ranking) -> Floats:
    """Return one correlation for each row of weights, NaN if it is undefined."""
    if not weights_RN.size:
        return np.full(len(weights_RN), np.nan)
    x_ranks_RN = x_ranking.centred_ranks(weights_RN)
    y_ranks_RN = y_ranking.centred_ranks(weights_RN)
    covariance_R = np.einsum("rn,rn,rn->r", weights_RN, x_ranks_RN, y_ranks_RN)
    x_variance_R = np.einsum("rn,rn,rn->r", weights_RN, x_ranks_RN, x_ranks_RN)
    y_variance_R = np.einsum("rn,rn,rn->r", weights_RN, y_ranks_RN, y_ranks_RN)
    norm_R = np.sqrt(x_variance_R) * np.sqrt(y_variance_R)
    rho_R: Floats = np.divide(covariance_R, norm_R, out=np.full_like(norm_R, np.nan), where=norm_R > 0)
    return np.clip(rho_R, -1.0, 1.0)
