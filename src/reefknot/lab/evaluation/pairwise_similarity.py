"""Do two tables of word vectors agree on which words are similar? (Press & Wolf 2017, Table 4)

Start with `pairwise_correlation`: Spearman's correlation between the cosines of all word pairs in one table and in the
other. V words have V (V - 1) / 2 pairs, 50 million for 10,000 words, so there are three methods:

- A million pairs or fewer are sorted.
- More pairs are ranked without sorting, in memory that does not grow with their number. A first pass over blocks of
  cosines finds the smallest and the largest cosine. A second pass counts the cosines in a million equal bins between
  them, which gives the mean rank of each bin. A third pass sums the products of ranks. Cosines within a bin count as
  equal, which changes the result in the seventh decimal or later.
- For larger vocabularies, pairs are sampled with replacement. The sample is divided into parts, and the spread over the
  parts gives the interval.

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

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PairwiseCorrelation:
    """Spearman's rho of the pairwise cosines of two tables, over all pairs of shared words or over a sample of pairs.

    A sampled correlation has a 95 % interval; an exact correlation needs none. rho is None if it is undefined: for
    fewer than 3 pairs, or if all cosines of a table are equal.
    """

    rho: float | None
    low: float | None
    high: float | None
    pairs: int
    exact: bool


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
    tables = [table.vectors_VD[[table.id_of(word) for word in shared_words]] for table in (first_table, second_table)]
    pairs = len(shared_words) * (len(shared_words) - 1) // 2
    if len(shared_words) > exact_below and pairs > samples:
        return _correlate_sample(tables, samples, seed)
    rho = _correlate_by_sorting(tables) if pairs <= MAX_SORTED_PAIRS else _correlate_by_bins(tables, pairs)
    return PairwiseCorrelation(rho, None, None, pairs, exact=True)


def _correlate_by_sorting(tables: list[NDArray[np.float32]]) -> float | None:
    """Correlate all pairs by sorting their cosines in memory."""
    x_N, y_N = (np.concatenate([np.zeros(0), *_cosine_blocks(_unit_rows(vectors_VD))]) for vectors_VD in tables)
    return spearman(np.round(x_N, DECIMALS), np.round(y_N, DECIMALS))


def _correlate_by_bins(tables: list[NDArray[np.float32]], pairs: int) -> float | None:
    """Correlate all pairs by the mean ranks of bins, without sorting."""
    x, y = (_BinnedCosines.from_vectors(vectors_VD) for vectors_VD in tables)
    if x.is_constant or y.is_constant:
        return None
    x_ranks_S, x_sum_of_squares = x.centred_ranks(pairs)
    y_ranks_S, y_sum_of_squares = y.centred_ranks(pairs)
    product = 0.0
    for x_bins_N, y_bins_N in zip(x.bin_indices(), y.bin_indices(), strict=True):
        product += float(x_ranks_S[x_bins_N] @ y_ranks_S[y_bins_N])
    return float(np.clip(product / np.sqrt(x_sum_of_squares * y_sum_of_squares), -1.0, 1.0))


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
    def from_vectors(cls, vectors_VD: NDArray[np.float32]) -> _BinnedCosines:
        unit_VD = _unit_rows(vectors_VD)
        block_ranges = [(block_N.min(), block_N.max()) for block_N in _cosine_blocks(unit_VD)]
        return cls(unit_VD, float(min(low for low, _ in block_ranges)), float(max(high for _, high in block_ranges)))

    @property
    def is_constant(self) -> bool:
        return self.high - self.low <= 10.0**-DECIMALS

    def bin_indices(self) -> Iterator[NDArray[np.int64]]:
        """Yield, for each block, the bin nearest to each cosine."""
        scale = (BINS - 1) / (self.high - self.low)
        for block_N in _cosine_blocks(self.unit):
            block_N -= self.low
            block_N *= scale
            block_N += 0.5
            yield block_N.astype(np.int64)

    def centred_ranks(self, pairs: int) -> tuple[Floats, float]:
        """Return each bin's mean rank minus the overall mean, and the sum of the squared differences over all pairs."""
        counts_S = np.zeros(BINS, dtype=np.int64)
        for bins_N in self.bin_indices():
            counts_S += np.bincount(bins_N, minlength=BINS)
        ranks_S = np.cumsum(counts_S) - (counts_S - 1) / 2 - (pairs + 1) / 2
        return ranks_S, float(counts_S @ ranks_S**2)


def _unit_rows(vectors_VD: NDArray[np.float32]) -> Floats:
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
    start, num_words = 0, len(unit_VD)
    while start < num_words - 1:
        block_size = min(max(1, _COSINES_AT_ONCE // (num_words - start)), num_words - start)
        rows_RD, later_AD = unit_VD[start : start + block_size], unit_VD[start + block_size :]
        within_RR = rows_RD @ rows_RD.T
        with_later_RA = rows_RD @ later_AD.T
        yield np.concatenate([within_RR[np.triu_indices(block_size, k=1)], with_later_RA.ravel()])
        start += block_size


def _correlate_sample(tables: list[NDArray[np.float32]], samples: int, seed: int) -> PairwiseCorrelation:
    """Correlate a random sample of pairs, with an interval from the spread over its parts."""
    rng, num_words = np.random.default_rng(seed), len(tables[0])
    first_N = rng.integers(num_words, size=samples)
    second_N = (first_N + rng.integers(1, num_words, size=samples)) % num_words  # any word but the first
    x_N, y_N = (pair_cosines(vectors_VD, first_N, second_N) for vectors_VD in tables)
    rho = spearman(x_N, y_N)
    parts = zip(np.array_split(x_N, SAMPLE_PARTS), np.array_split(y_N, SAMPLE_PARTS), strict=True)
    all_rhos = [spearman(x_part, y_part) for x_part, y_part in parts]
    part_rhos = [part_rho for part_rho in all_rhos if part_rho is not None]
    if rho is None or len(part_rhos) < SAMPLE_PARTS:
        return PairwiseCorrelation(rho, None, None, samples, exact=False)
    half_width = float(
        scipy.special.stdtrit(SAMPLE_PARTS - 1, 0.975) * np.std(part_rhos, ddof=1) / np.sqrt(SAMPLE_PARTS)
    )
    return PairwiseCorrelation(rho, max(-1.0, rho - half_width), min(1.0, rho + half_width), samples, exact=False)
