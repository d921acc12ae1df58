"""Compare two language models by their losses on the same text, with a confidence interval of the difference.

Start with `compare`. A system is one model configuration; a run is one training of it with one seed:

    boundaries = block_boundaries(tokens)
    comparison = compare([losses_a_seed1, losses_a_seed2], [losses_b_seed1], boundaries)
    print(comparison.verdict)

The interval is a paired bootstrap: whole units of text (documents, or blocks of neighbouring tokens) are drawn with
replacement, the same units for both systems. Single tokens are not drawn, because the tokens of a text are correlated.
A test that treats them as independent calls almost any difference significant. The losses of the runs of a system are
averaged, and `widen_by_training` adds the spread over the runs to the interval.

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
"""Default number of tokens in a block. Neighbouring blocks of this length depend little on each other."""
FEWEST_UNITS = 20
"""Number of units of text below which an interval is only approximate."""
SHORTEST_BLOCK = 5
"""Minimum number of tokens in a block. Shorter blocks give too narrow an interval, because the losses of neighbouring
tokens are correlated."""
_MAX_COUNTS = 2_000_000  # maximum number of resampling counts in memory at once

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
    """Confidence interval of the difference."""
    level: float
    """Confidence level of the interval, such as 0.95."""
    tokens: int
    units: int
    """Number of units of text that were resampled."""
    seeds_a: int
    """Number of runs of A."""
    seeds_b: int
    """Number of runs of B."""
    notes: tuple[str, ...]
    """Limitations of the comparison, in words."""
    loss_unit: str = "token"
    """What each loss belongs to: `token` or `word`."""

    @property
    def ratio(self) -> float:
        """Perplexity of B divided by perplexity of A."""
        return _safe_exp(self.difference)

    @property
    def ratio_interval(self) -> tuple[float, float]:
        """Interval of the ratio."""
        lower, upper = self.interval
        return _safe_exp(lower), _safe_exp(upper)

    @property
    def is_significant(self) -> bool:
        """Whether the difference is significant: the interval does not contain zero."""
        lower, upper = self.interval
        return not lower <= 0.0 <= upper

    @property
    def half_width(self) -> float:
        """Half of the width of the interval, in nats per token: about the smallest difference that could be seen."""
        lower, upper = self.interval
        return (upper - lower) / 2

    @property
    def verdict(self) -> str:
        """The conclusion in one sentence, followed by a note for each of its limitations."""
        return ". ".join([self._conclusion(), *self.notes])

    def _conclusion(self) -> str:
        lower, upper = self.ratio_interval
        details = f"ratio B/A {self.ratio:.4f}, {100 * self.level:g} % interval {lower:.4f} to {upper:.4f}"
        if self.difference == 0.0 and self.interval == (0.0, 0.0):
            return f"no difference seen: the loss of A and B is equal for every {self.loss_unit}"
        if self.is_significant:
            better = "B" if self.difference < 0 else "A"
            reduction = 1 - _safe_exp(-abs(self.difference))
            return f"{better} is better: {reduction:.1%} lower perplexity ({details})"
        return (
            f"no difference seen ({details}): a difference below about {self.half_width:.4f} nats per "
            f"{self.loss_unit}, {_safe_exp(self.half_width) - 1:.1%} of perplexity, cannot be seen here"
        )


def block_boundaries(tokens: int, length: int = BLOCK) -> NDArray[np.int64]:
    """Return the boundaries of blocks of `length` tokens, or of shorter blocks if a text is too short for 20 blocks.

    For example, 10,400 tokens in blocks of 500 have the boundaries 0, 500, ..., 10,000, 10,400.
    """
    fewest_tokens = SHORTEST_BLOCK * FEWEST_UNITS
    if tokens < fewest_tokens:
        raise DataError(
            f"the text is too short to compare models: {tokens:,} tokens, but an interval needs {fewest_tokens} "
            f"({FEWEST_UNITS} blocks of {SHORTEST_BLOCK})"
        )
    length = min(length, tokens // FEWEST_UNITS)
    starts = np.arange(0, tokens, length, dtype=np.int64)
    return np.append(starts, tokens)


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
    # The total loss of each unit of text.
    lengths_U = _unit_lengths(boundaries)
    starts_U = np.cumsum(lengths_U) - lengths_U
    tokens = int(lengths_U.sum())
    sums_a_SU = _unit_sums("A", a, starts_U, tokens, loss_unit)
    sums_b_SU = _unit_sums("B", b, starts_U, tokens, loss_unit)

    # The interval of the difference over resampled texts.
    differences_U = sums_b_SU.mean(axis=0) - sums_a_SU.mean(axis=0)
    resampled_means = []
    for counts_RU in resample_counts(len(lengths_U), resamples, np.random.default_rng(seed)):
        resampled_means.append((counts_RU @ differences_U) / (counts_RU @ lengths_U))
    tail = (1 - level) / 2
    lower, upper = np.quantile(np.concatenate(resampled_means), [tail, 1 - tail])

    # The mean loss of each run, and of each system.
    means_a_S = sums_a_SU.sum(axis=1) / tokens
    means_b_S = sums_b_SU.sum(axis=1) / tokens
    mean_a = means_a_S.mean()
    mean_b = means_b_S.mean()

    return Comparison(
        perplexity_a=_safe_exp(mean_a),
        perplexity_b=_safe_exp(mean_b),
        difference=float(mean_b - mean_a),
        interval=widen_by_training((lower, upper), means_a_S, means_b_S, level),
        level=level,
        tokens=tokens,
        units=len(lengths_U),
        seeds_a=len(a),
        seeds_b=len(b),
        notes=tuple(_notes(lengths_U, len(a), len(b), loss_unit)),
        loss_unit=loss_unit,
    )


def widen_by_training(
    interval: tuple[float, float], scores_a: NDArray[np.float64], scores_b: NDArray[np.float64], level: float
) -> tuple[float, float]:
    """Widen an interval of the difference between two systems by the spread over training runs.

    There are too few runs to resample. If a system was trained several times, Student's t gives the uncertainty of the
    mean of its runs. The three half-widths (text, training A, training B) are added in quadrature. The resulting
    interval is conservative, whichever source of variation is larger. An interval with Welch's degrees of freedom is
    narrower, but with two runs of a system it misses the true difference up to twice as often as its level says.

    Args:
        interval: Interval of the difference B - A that reflects only the choice of the text.
        scores_a: The score of each run of system A.
        scores_b: The score of each run of system B.
        level: Confidence level of the interval.
    """
    lower, upper = interval
    difference = scores_b.mean() - scores_a.mean()
    tail = (1 - level) / 2
    training_half_width = np.hypot(_training_half_width(scores_a, tail), _training_half_width(scores_b, tail))
    half_width_below = np.hypot(difference - lower, training_half_width)
    half_width_above = np.hypot(upper - difference, training_half_width)
    return float(difference - half_width_below), float(difference + half_width_above)


def resample_counts(units: int, resamples: int, rng: np.random.Generator) -> Iterator[NDArray[np.float64]]:
    """Yield the number of times each unit occurs in each resampled text, counts_RU, in chunks that bound the memory."""
    max_chunk_size = max(1, _MAX_COUNTS // units)
    for start in range(0, resamples, max_chunk_size):
        chunk_size = min(max_chunk_size, resamples - start)
        counts_RU = rng.multinomial(units, np.full(units, 1 / units), size=chunk_size)
        yield counts_RU.astype(np.float64)


def _safe_exp(value: float) -> float:
    """Return exp(value). An overflow gives infinity without a warning, because a model may have diverged."""
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _unit_lengths(boundaries: Array) -> NDArray[np.int64]:
    """Return the number of tokens of each unit that is not empty. Raise an error if the boundaries are invalid."""
    boundaries = np.asarray(boundaries)
    is_integer_list = boundaries.ndim == 1 and boundaries.dtype.kind in "iu" and len(boundaries) >= 2
    if not is_integer_list or boundaries[0] != 0 or (np.diff(boundaries) < 0).any():
        raise DataError("the boundaries of the units must be integers in increasing order, starting from 0")
    lengths_U: NDArray[np.int64] = np.diff(boundaries).astype(np.int64)
    lengths_U = lengths_U[lengths_U > 0]  # empty documents have no losses
    if len(lengths_U) < 2:
        raise DataError("the text has only one unit, so it cannot be resampled; compare on a longer text")
    return lengths_U


def _unit_sums(system: str, runs: Sequence[Array], starts_U: Array, tokens: int, loss_unit: str) -> NDArray[np.float64]:
    """Return the sum of the negative log-likelihoods per run and unit, sums_SU."""
    if not runs:
        raise DataError(f"system {system} has no scores to compare")
    for run_number, nll in enumerate(runs, start=1):
        if nll.shape != (tokens,):
            raise DataError(
                f"run {run_number} of system {system} scored {nll.size:,} {loss_unit}s, but {tokens:,} are compared; "
                f"both systems must score the same {loss_unit}s"
            )
        if not np.isfinite(nll).all():
            raise DataError(f"run {run_number} of system {system} has a score that is not a finite number")
    return np.stack([np.add.reduceat(nll.astype(np.float64), starts_U) for nll in runs])


def _training_half_width(means_S: NDArray[np.float64], tail: float) -> float:
    """Return the half-width of the interval of the mean over runs, by Student's t; 0 for a single run."""
    num_runs = len(means_S)
    if num_runs == 1:
        return 0.0
    t_quantile = scipy.special.stdtrit(num_runs - 1, 1 - tail)
    return float(t_quantile * means_S.std(ddof=1) / np.sqrt(num_runs))


def note_trained_once(seeds_a: int, seeds_b: int, resampled: str) -> str | None:
    """Return a note if a system was trained only once, so that the interval does not reflect the spread over its runs.

    Args:
        seeds_a: Number of runs of A.
        seeds_b: Number of runs of B.
        resampled: What the interval reflects, such as "text".
    """
    if seeds_a == seeds_b == 1:
        return (
            f"Both were trained once: the interval reflects the choice of {resampled}, not the spread over training "
            "runs"
        )
    if 1 in (seeds_a, seeds_b):
        system = "A" if seeds_a == 1 else "B"
        return f"{system} was trained once: the interval does not reflect the spread over its training runs"
    return None


def _notes(lengths_U: NDArray[np.int64], seeds_a: int, seeds_b: int, loss_unit: str) -> Iterator[str]:
    """Yield a note for each limitation of the comparison."""
    note = note_trained_once(seeds_a, seeds_b, "text")
    if note:
        yield note
    elif min(seeds_a, seeds_b) == 2:
        yield "Trained only twice: the interval is wide, because two runs hardly show how much runs differ"

    if len(lengths_U) < FEWEST_UNITS:
        yield f"Only {len(lengths_U)} units of text: the interval is approximate"

    block_length = int(lengths_U[0])
    has_equal_blocks = (lengths_U[:-1] == block_length).all()
    if block_length < BLOCK and has_equal_blocks:
        yield f"The text is short, so blocks have {block_length} {loss_unit}s: longer dependences are not covered"
