"""Do two tables of word vectors agree on which words are similar? (Press & Wolf 2017, Table 4)

Start with `pairwise_correlation(first_table, second_table).rho`: Spearman's correlation between the cosines of all word
pairs in one table and in the other. V words have V (V - 1) / 2 pairs, 50 million for 10,000 words, so there are three
methods:

- A million pairs or fewer are sorted (`_correlate_by_sorting`).
- More pairs are counted in bins, in memory that does not grow with their number (`_correlate_by_bins`).
- For larger vocabularies, pairs are sampled (`_correlate_sample`).

Shapes: V shared words, R rows of a block and A rows after it, D dimension, N pairs (of a block, or sampled), S bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import scipy.special
from numpy.typing import NDArray

from reefknot.errors import DataError, SettingsError
from reefknot.lab.evaluation.similarity import DECIMALS, pair_cosines
from reefknot.lab.evaluation.spearman import FEWEST_PAIRS, spearman
from reefknot.vectors.word_vectors import WordVectors

EXACT_BELOW = 20_000  # number of shared words up to which all pairs are used
SAMPLES = 1_000_000  # number of sampled pairs
SAMPLE_PARTS = 40  # number of parts of a sample; the spread of their correlations gives the interval
MAX_SORTED_PAIRS = 1_000_000  # number of pairs up to which cosines are sorted
BINS = 1 << 20  # number of bins that cosines are counted in
_COSINES_AT_ONCE = 1 << 21  # number of cosines in memory at once

Vectors = NDArray[np.float32]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PairwiseCorrelation:
    """Spearman's rho of the pairwise cosines of two tables, over all pairs of shared words or over a sample of pairs.

    A sampled correlation has a 95 % interval; an exact correlation needs none. rho is None if it is undefined: for
    fewer than 3 pairs, or if all cosines of a table are equal.
    """

    rho: float | None
    low: float | None
    """Lower bound of the interval."""
    high: float | None
    """Upper bound of the interval."""
    pairs: int
    """Number of pairs that were compared."""
    exact: bool
    """Whether all pairs were compared, not a sample."""


def pairwise_correlation(
    first_table: WordVectors,
    second_table: WordVectors,
    *,
    exact_below: int = EXACT_BELOW,
    samples: int = SAMPLES,
    seed: int = 0,
) -> PairwiseCorrelation:
    """Compare two tables over their shared words, including symbols such as <unk>.

    All pairs are used if at most `exact_below` words are shared, or if there are no more than `samples` pairs.
    """
    if samples < FEWEST_PAIRS * SAMPLE_PARTS:
        raise SettingsError(f"samples = {samples}: must be at least {FEWEST_PAIRS * SAMPLE_PARTS}")
    shared_words = [word for word in first_table.words if word in second_table]
    if not shared_words:
        raise DataError("the two tables have no word in common, so there is nothing to compare")
    first_VD = first_table.vectors_VD[[first_table.id_of(word) for word in shared_words]]
    second_VD = second_table.vectors_VD[[second_table.id_of(word) for word in shared_words]]

    num_words = len(shared_words)
    num_pairs = num_words * (num_words - 1) // 2
    if num_words > exact_below and num_pairs > samples:
        return _correlate_sample(first_VD, second_VD, samples, seed)
    if num_pairs <= MAX_SORTED_PAIRS:
        rho = _correlate_by_sorting(first_VD, second_VD)
    else:
        rho = _correlate_by_bins(first_VD, second_VD, num_pairs)
    return PairwiseCorrelation(rho, None, None, num_pairs, exact=True)


def _correlate_by_sorting(first_VD: Vectors, second_VD: Vectors) -> float | None:
    """Correlate all pairs by sorting their cosines in memory."""
    return spearman(_all_cosines(first_VD), _all_cosines(second_VD))


def _all_cosines(vectors_VD: Vectors) -> Floats:
    """Return the rounded cosines of all pairs of rows, cosines_N."""
    blocks = _cosine_blocks(_unit_rows(vectors_VD))
    cosines_N = np.concatenate([np.zeros(0), *blocks])  # a single row has no pairs and no blocks
    return np.round(cosines_N, DECIMALS)


def _correlate_by_bins(first_VD: Vectors, second_VD: Vectors, num_pairs: int) -> float | None:
    """Correlate all pairs by the mean ranks of bins, without sorting.

    A first pass over blocks of cosines finds the smallest and the largest cosine. A second pass counts the cosines in a
    million equal bins between them, which gives the mean rank of each bin. A third pass sums the products of ranks.
    Cosines within a bin count as equal, which changes the result in the seventh decimal or later.
    """
    first = _BinnedCosines.from_vectors(first_VD)
    second = _BinnedCosines.from_vectors(second_VD)
    if first.is_constant or second.is_constant:
        return None
    first_ranks_S, first_sum_of_squares = first.centred_ranks(num_pairs)
    second_ranks_S, second_sum_of_squares = second.centred_ranks(num_pairs)

    sum_of_products = 0.0
    for first_bins_N, second_bins_N in zip(first.bin_indices(), second.bin_indices(), strict=True):
        sum_of_products += float(first_ranks_S[first_bins_N] @ second_ranks_S[second_bins_N])
    rho = sum_of_products / np.sqrt(first_sum_of_squares * second_sum_of_squares)
    return float(np.clip(rho, -1.0, 1.0))


@dataclass(frozen=True)
class _BinnedCosines:
    """The cosines of all pairs of rows, computed block by block, and counted in equal bins over their range."""

    unit: Floats
    """Rows of length one, unit_VD."""
    low: float
    """The smallest cosine."""
    high: float
    """The largest cosine."""

    @classmethod
    def from_vectors(cls, vectors_VD: Vectors) -> _BinnedCosines:
        unit_VD = _unit_rows(vectors_VD)
        block_minima = []
        block_maxima = []
        for cosines_N in _cosine_blocks(unit_VD):
            block_minima.append(cosines_N.min())
            block_maxima.append(cosines_N.max())
        return cls(unit_VD, float(min(block_minima)), float(max(block_maxima)))

    @property
    def is_constant(self) -> bool:
        """Whether all cosines are equal up to rounding."""
        return self.high - self.low <= 10.0**-DECIMALS

    def bin_indices(self) -> Iterator[NDArray[np.int64]]:
        """Yield, for each block, the bin nearest to each cosine."""
        scale = (BINS - 1) / (self.high - self.low)
        for cosines_N in _cosine_blocks(self.unit):
            # Compute round((cosine - low) * scale) in place.
            cosines_N -= self.low
            cosines_N *= scale
            cosines_N += 0.5
            yield cosines_N.astype(np.int64)

    def centred_ranks(self, num_pairs: int) -> tuple[Floats, float]:
        """Return each bin's mean rank minus the overall mean rank, and the sum of its squares over all pairs."""
        counts_S = np.zeros(BINS, dtype=np.int64)
        for bins_N in self.bin_indices():
            counts_S += np.bincount(bins_N, minlength=BINS)
        centred_ranks_S = np.cumsum(counts_S) - (counts_S - 1) / 2 - (num_pairs + 1) / 2
        return centred_ranks_S, float(counts_S @ centred_ranks_S**2)


def _unit_rows(vectors_VD: Vectors) -> Floats:
    """Return the rows scaled to length one; a zero row stays zero.

    The result is float64, because the cosines of the float32 vectors `WordVectors.unit_VD` have rounding errors in the
    seventh decimal, which would swap neighbouring ranks and make equal cosines differ.
    """
    rows_VD = vectors_VD.astype(np.float64)
    lengths_V1 = np.linalg.norm(rows_VD, axis=1, keepdims=True)
    np.divide(rows_VD, lengths_V1, out=rows_VD, where=lengths_V1 > 0)
    return rows_VD


def _cosine_blocks(unit_VD: Floats) -> Iterator[Floats]:
    """Yield the cosines of each row with all later rows, a block of rows at a time."""
    num_words = len(unit_VD)
    start = 0
    while start < num_words - 1:
        num_remaining = num_words - start
        block_size = min(max(1, _COSINES_AT_ONCE // num_remaining), num_remaining)
        rows_RD = unit_VD[start : start + block_size]
        later_AD = unit_VD[start + block_size :]
        within_block_RR = rows_RD @ rows_RD.T
        with_later_RA = rows_RD @ later_AD.T
        yield np.concatenate([within_block_RR[np.triu_indices(block_size, k=1)], with_later_RA.ravel()])
        start += block_size


def _correlate_sample(first_VD: Vectors, second_VD: Vectors, samples: int, seed: int) -> PairwiseCorrelation:
    """Correlate pairs that are sampled with replacement.

    The sample is divided into parts, and the spread over the parts gives the interval.
    """
    # Sample pairs of two different words.
    rng = np.random.default_rng(seed)
    num_words = len(first_VD)
    word_N = rng.integers(num_words, size=samples)
    other_word_N = (word_N + rng.integers(1, num_words, size=samples)) % num_words

    # Correlate the whole sample, and each of its parts.
    first_cosines_N = pair_cosines(first_VD, word_N, other_word_N)
    second_cosines_N = pair_cosines(second_VD, word_N, other_word_N)
    rho = spearman(first_cosines_N, second_cosines_N)
    first_parts = np.array_split(first_cosines_N, SAMPLE_PARTS)
    second_parts = np.array_split(second_cosines_N, SAMPLE_PARTS)
    part_rhos = []
    for first_part, second_part in zip(first_parts, second_parts, strict=True):
        part_rho = spearman(first_part, second_part)
        if part_rho is not None:
            part_rhos.append(part_rho)
    if rho is None or len(part_rhos) < SAMPLE_PARTS:
        return PairwiseCorrelation(rho, None, None, samples, exact=False)

    t_quantile = scipy.special.stdtrit(SAMPLE_PARTS - 1, 0.975)
    half_width = float(t_quantile * np.std(part_rhos, ddof=1) / np.sqrt(SAMPLE_PARTS))
    low = max(-1.0, rho - half_width)
    high = min(1.0, rho + half_width)
    return PairwiseCorrelation(rho, low, high, samples, exact=False)
