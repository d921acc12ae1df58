"""Compare two systems by a paired bootstrap over units of text, widened by the spread over seeds.

The tokens of a text are correlated. A test that treats them as independent calls almost any difference significant.
Here whole units of text (documents, or blocks of neighbouring tokens) are drawn with replacement, the same units for
both systems. The losses of the runs of a system are averaged.

There are too few runs to resample. If a system was trained several times, Student's t gives the uncertainty of the mean
of its runs. The three half-widths (text, training A, training B) are added in quadrature. The resulting interval is
conservative, whichever source of variation is larger. An interval with Welch's degrees of freedom is narrower, but with
two runs of a system it misses the true difference up to twice as often as its level says.

Shapes: S runs (seeds) of a system, U units of text, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.special
from numpy.typing import NDArray

from reefknot.errors import DataError

BLOCK = 500
"""Number of tokens in a block. Neighbouring blocks of this length depend little on each other."""
FEWEST_UNITS = 20
"""Number of units of text below which an interval is only approximate."""
_CHUNK = 2_000_000  # resampling counts held in memory at once

Array = NDArray[Any]


@dataclass(frozen=True)
class Comparison:
    """Comparison of two systems on the same tokens, or on the same words if their tokens differ.

    The difference is B - A in mean negative log-likelihood per token, in nats, so B is better if it is below zero. The
    perplexity of a system with several runs is the exponential of their mean loss.
    """

    perplexity_a: float
    perplexity_b: float
    difference: float
    interval: tuple[float, float]
    level: float
    tokens: int
    units: int
    seeds_a: int
    seeds_b: int
    notes: tuple[str, ...]
    loss_unit: str = "token"
    """What each loss belongs to: `token` or `word`."""

    @property
    def ratio(self) -> float:
        """Perplexity of B divided by perplexity of A."""
        return _exp(self.difference)

    @property
    def ratio_interval(self) -> tuple[float, float]:
        """Interval of the ratio."""
        return _exp(self.interval[0]), _exp(self.interval[1])

    @property
    def seen(self) -> bool:
        """Whether a difference is seen: the interval does not contain zero."""
        low, high = self.interval
        return not low <= 0.0 <= high

    @property
    def half_width(self) -> float:
        """Half of the width of the interval, in nats per token: about the smallest difference that could be seen."""
        return (self.interval[1] - self.interval[0]) / 2

    @property
    def verdict(self) -> str:
        """The conclusion in one sentence, followed by a note for each of its limitations."""
        return ". ".join([self._finding(), *self.notes])

    def _finding(self) -> str:
        low, high = self.ratio_interval
        range_ = f"ratio B/A {self.ratio:.4f}, {100 * self.level:g} % interval {low:.4f} to {high:.4f}"
        if self.seen:
            lower = 1 - _exp(-abs(self.difference))
            return f"{'B' if self.difference < 0 else 'A'} is better: {lower:.1%} lower perplexity ({range_})"
        width = self.half_width
        return (
            f"no difference seen ({range_}): a difference below about {width:.4f} nats per {self.loss_unit}, "
            f"{_exp(width) - 1:.1%} of perplexity, cannot be seen here"
        )


def blocks(tokens: int, length: int = BLOCK) -> NDArray[np.int64]:
    """Return the boundaries of blocks of `length` tokens, or of shorter blocks if a text is too short for 20 blocks."""
    if tokens < 1:
        raise DataError("there are no tokens to compare")
    length = max(1, min(length, tokens // FEWEST_UNITS))
    return np.append(np.arange(0, tokens, length, dtype=np.int64), tokens)


def compare(
    a: list[Array],
    b: list[Array],
    boundaries: Array,
    *,
    loss_unit: str = "token",
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Compare two systems by the negative log-likelihood of every token.

    Args:
        a: Losses of system A, one array for each of its runs.
        b: Losses of system B, one array for each of its runs.
        boundaries: Boundaries of the units of text: 0, ..., number of tokens.
        loss_unit: What each loss belongs to, `token` or `word`.
        level: Confidence level of the interval.
        resamples: Number of resampled texts.
        seed: Seed of the resampling. The same seed gives the same interval.
    """
    counts_U = _unit_lengths(boundaries)
    starts = np.cumsum(counts_U) - counts_U
    tokens = int(counts_U.sum())
    sums_a = _unit_sums("A", a, starts, tokens, loss_unit)
    sums_b = _unit_sums("B", b, starts, tokens, loss_unit)
    differences_U = sums_b.mean(axis=0) - sums_a.mean(axis=0)
    texts = resample_counts(len(counts_U), resamples, np.random.default_rng(seed))
    resampled_R = np.concatenate([(times_RU @ differences_U) / (times_RU @ counts_U) for times_RU in texts])
    tail = (1 - level) / 2
    low, high = np.quantile(resampled_R, [tail, 1 - tail])
    means_a, means_b = (sums.sum(axis=1) / tokens for sums in (sums_a, sums_b))
    mean_a, mean_b = means_a.mean(), means_b.mean()
    return Comparison(
        perplexity_a=_exp(mean_a),
        perplexity_b=_exp(mean_b),
        difference=float(mean_b - mean_a),
        interval=widen((low, high), means_a, means_b, level),
        level=level,
        tokens=tokens,
        units=len(counts_U),
        seeds_a=len(a),
        seeds_b=len(b),
        notes=tuple(_notes(counts_U, len(a), len(b), loss_unit)),
        loss_unit=loss_unit,
    )


def widen(
    interval: tuple[float, float], scores_a: NDArray[np.float64], scores_b: NDArray[np.float64], level: float
) -> tuple[float, float]:
    """Widen an interval of the difference between two systems by the uncertainty from training them again.

    Args:
        interval: Interval of the difference B - A that covers only the choice of the text.
        scores_a: The score of each run of system A.
        scores_b: The score of each run of system B.
        level: Confidence level of the interval.
    """
    low, high = interval
    difference = scores_b.mean() - scores_a.mean()
    tail = (1 - level) / 2
    training = np.hypot(_half_width(scores_a, tail), _half_width(scores_b, tail))
    return (
        float(difference - np.hypot(difference - low, training)),
        float(difference + np.hypot(high - difference, training)),
    )


def resample_counts(units: int, resamples: int, rng: np.random.Generator) -> Iterator[NDArray[np.float64]]:
    """Yield the number of times each unit occurs in each resampled text, (R, U), in chunks that bound the memory."""
    rows = max(1, _CHUNK // units)
    for start in range(0, resamples, rows):
        size = min(rows, resamples - start)
        yield rng.multinomial(units, np.full(units, 1 / units), size=size).astype(np.float64)


def _exp(value: float) -> float:
    """Return exp(value). An overflow gives infinity without a warning, because a model may have diverged."""
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _unit_lengths(boundaries: Array) -> NDArray[np.int64]:
    ends = np.asarray(boundaries)
    if ends.ndim != 1 or ends.dtype.kind not in "iu" or len(ends) < 2 or ends[0] != 0 or (np.diff(ends) < 0).any():
        raise DataError("the boundaries of the units must be integers in increasing order, starting from 0")
    lengths: NDArray[np.int64] = np.diff(ends).astype(np.int64)
    lengths = lengths[lengths > 0]  # empty documents have no losses
    if len(lengths) < 2:
        raise DataError("the text is one single unit, so it cannot be resampled; compare on a longer text")
    return lengths


def _unit_sums(side: str, runs: Sequence[Array], starts: Array, tokens: int, loss_unit: str) -> NDArray[np.float64]:
    """Return the sum of the negative log-likelihoods per run and unit, (S, U)."""
    if not runs:
        raise DataError(f"system {side} has no scores to compare")
    for number, nll in enumerate(runs, start=1):
        if nll.shape != (tokens,):
            raise DataError(
                f"run {number} of system {side} scored {nll.size:,} {loss_unit}s, but {tokens:,} are compared; "
                f"both systems must score the same {loss_unit}s"
            )
        if not np.isfinite(nll).all():
            raise DataError(f"run {number} of system {side} has a score that is not a finite number")
    return np.stack([np.add.reduceat(nll.astype(np.float64), starts) for nll in runs])


def _half_width(means_S: NDArray[np.float64], tail: float) -> float:
    """Return the half-width of the interval of the mean over runs, by Student's t; 0 for a single run."""
    runs = len(means_S)
    if runs == 1:
        return 0.0
    return float(scipy.special.stdtrit(runs - 1, 1 - tail) * means_S.std(ddof=1) / np.sqrt(runs))


def _notes(counts_U: NDArray[np.int64], seeds_a: int, seeds_b: int, loss_unit: str) -> Iterator[str]:
    once = [side for side, seeds in (("A", seeds_a), ("B", seeds_b)) if seeds == 1]
    if len(once) == 2:
        yield "Both were trained once: the interval covers the choice of text, not training again"
    elif once:
        yield f"{once[0]} was trained once: the interval does not cover training it again"
    elif min(seeds_a, seeds_b) == 2:
        yield "Trained only twice: the interval is wide, because two runs hardly show how much runs differ"
    if len(counts_U) < FEWEST_UNITS:
        yield f"Only {len(counts_U)} units of text: the interval is approximate"
    length = int(counts_U[0])
    if length < BLOCK and (counts_U[:-1] == length).all():
        yield f"The text is short, so blocks have {length} {loss_unit}s: longer dependences are not covered"
