"""Rank correlation of all pairwise cosines of two tables (Press & Wolf 2017, Table 4): do they agree on similar words?

V words have V (V - 1) / 2 pairs, 50 million for 10,000 words. They are ranked without sorting, in memory that does not
grow with their number. A first pass over blocks of cosines finds the smallest and the largest cosine. A second pass
counts the cosines in a million equal steps between them, which gives the mean rank of each step. A third pass sums the
products of ranks. Cosines within a step count as equal, which changes the result in the seventh decimal or later. A
million pairs or fewer are sorted.

For larger vocabularies, pairs are sampled with replacement. The sample is divided into parts, and the spread over the
parts gives the interval.

Shapes: V shared words, R rows of a block and A rows after it, D dimension, N pairs (of a block, or sampled), S steps.
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
PARTS = 40  # number of parts of a sample
FEW = 1_000_000  # number of pairs up to which cosines are sorted
STEPS = 1 << 20
_BLOCK = 1 << 21  # number of cosines in memory at once

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
    one: WordVectors,
    other: WordVectors,
    *,
    exact_below: int = EXACT_BELOW,
    samples: int = SAMPLES,
    seed: int = 0,
) -> PairwiseCorrelation:
    """Compare two tables over their shared words, including symbols such as <unk>.

    All pairs are used if at most `exact_below` words are shared, or if there are no more than `samples` pairs.
    """
    if samples < FEWEST_PAIRS * PARTS:
        raise SettingsError(f"samples = {samples}: must be at least {FEWEST_PAIRS * PARTS}")
    shared = [word for word in one.words if word in other]
    if not shared:
        raise DataError("the two tables have no word in common, so there is nothing to compare")
    tables = [table.vectors_VD[[table.id_of(word) for word in shared]] for table in (one, other)]
    pairs = len(shared) * (len(shared) - 1) // 2
    if len(shared) > exact_below and pairs > samples:
        return _over_sample(tables, samples, seed)
    rho = _sorted(tables) if pairs <= FEW else _counted(tables, pairs)
    return PairwiseCorrelation(rho, None, None, pairs, exact=True)


def _sorted(tables: list[NDArray[np.float32]]) -> float | None:
    """Correlate all pairs by sorting their cosines in memory."""
    x_N, y_N = (np.concatenate([np.zeros(0), *_blocks(_unit(vectors_VD))]) for vectors_VD in tables)
    return spearman(np.round(x_N, DECIMALS), np.round(y_N, DECIMALS))


def _counted(tables: list[NDArray[np.float32]], pairs: int) -> float | None:
    """Correlate all pairs by the mean ranks of steps, without sorting."""
    both = [_Cosines.of(vectors_VD) for vectors_VD in tables]
    if any(cosines.constant for cosines in both):
        return None
    ranks = [cosines.centred_ranks(pairs) for cosines in both]
    product = 0.0
    for x_N, y_N in zip(*(cosines.steps() for cosines in both), strict=True):
        product += float(ranks[0][0][x_N] @ ranks[1][0][y_N])
    return float(np.clip(product / np.sqrt(ranks[0][1] * ranks[1][1]), -1.0, 1.0))


@dataclass(frozen=True)
class _Cosines:
    """The cosines of all pairs of rows, computed block by block, and their range."""

    unit: Floats  # (V, D)
    low: float
    high: float

    @classmethod
    def of(cls, vectors_VD: NDArray[np.float32]) -> _Cosines:
        unit_VD = _unit(vectors_VD)
        extremes = [(block_N.min(), block_N.max()) for block_N in _blocks(unit_VD)]
        return cls(unit_VD, float(min(low for low, _ in extremes)), float(max(high for _, high in extremes)))

    @property
    def constant(self) -> bool:
        return self.high - self.low <= 10.0**-DECIMALS

    def steps(self) -> Iterator[NDArray[np.int64]]:
        """Yield, for each block, the step nearest to each cosine."""
        scale = (STEPS - 1) / (self.high - self.low)
        for block_N in _blocks(self.unit):
            block_N -= self.low
            block_N *= scale
            block_N += 0.5
            yield block_N.astype(np.int64)

    def centred_ranks(self, pairs: int) -> tuple[Floats, float]:
        """Return the mean rank of each step minus the overall mean, and the sum of its square over all pairs."""
        counts_S = np.zeros(STEPS, dtype=np.int64)
        for steps_N in self.steps():
            counts_S += np.bincount(steps_N, minlength=STEPS)
        ranks_S = np.cumsum(counts_S) - (counts_S - 1) / 2 - (pairs + 1) / 2
        return ranks_S, float(counts_S @ ranks_S**2)


def _unit(vectors_VD: NDArray[np.float32]) -> Floats:
    """Return the rows scaled to length one; a zero row stays zero.

    The result is float64, because the cosines of the float32 vectors `WordVectors.unit_VD` have rounding errors in the
    seventh decimal, which would swap neighbouring ranks and make equal cosines differ.
    """
    rows_VD = vectors_VD.astype(np.float64)
    lengths_V1 = np.linalg.norm(rows_VD, axis=1, keepdims=True)
    np.divide(rows_VD, lengths_V1, out=rows_VD, where=lengths_V1 > 0)
    return rows_VD


def _blocks(unit_VD: Floats) -> Iterator[Floats]:
    """Yield the cosines of every row with all later rows, for some rows at a time."""
    start, words = 0, len(unit_VD)
    while start < words - 1:
        rows = min(max(1, _BLOCK // (words - start)), words - start)
        rows_RD, after_AD = unit_VD[start : start + rows], unit_VD[start + rows :]
        among_RR = rows_RD @ rows_RD.T
        yield np.concatenate([among_RR[np.triu_indices(rows, k=1)], (rows_RD @ after_AD.T).ravel()])
        start += rows


def _over_sample(tables: list[NDArray[np.float32]], samples: int, seed: int) -> PairwiseCorrelation:
    rng, words = np.random.default_rng(seed), len(tables[0])
    one_N = rng.integers(words, size=samples)
    other_N = (one_N + rng.integers(1, words, size=samples)) % words  # any word but the first
    x_N, y_N = (pair_cosines(vectors_VD, one_N, other_N) for vectors_VD in tables)
    rho = spearman(x_N, y_N)
    parts = [spearman(*part) for part in zip(np.array_split(x_N, PARTS), np.array_split(y_N, PARTS), strict=True)]
    defined = [part for part in parts if part is not None]
    if rho is None or len(defined) < PARTS:
        return PairwiseCorrelation(rho, None, None, samples, exact=False)
    half = float(scipy.special.stdtrit(PARTS - 1, 0.975) * np.std(defined, ddof=1) / np.sqrt(PARTS))
    return PairwiseCorrelation(rho, max(-1.0, rho - half), min(1.0, rho + half), samples, exact=False)
