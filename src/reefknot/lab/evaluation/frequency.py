"""Loss by word frequency: the mean loss on frequent and on rare words, of one model or of two models compared.

Start with `loss_by_frequency` for one model, or `compare_by_target` for two. Tokens are grouped into bands (ranges of
counts in the training text), by the count of the target or of the token before it. A type is a distinct word.

For one model, the bands are powers of ten, as in Baevski & Auli 2019. Two models are compared in the bands of Pappas &
Henderson 2019, Figure 3. Their difference is computed in two ways: per token, with an interval; and, as in that
figure, as the mean over the types of a band, each with the same weight.

Shapes: N scored tokens, W words, V types, T types of a band, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.runs.result import Band, Frequency
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.constants import END_OF_LINE

EDGES = (0, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
"""Lower bounds of the bands of training counts. The last band has no upper bound."""
FIGURE_3 = (0, 1, 50, 100, 250, 500, 1_000, 2_500, 5_000)
"""Lower bounds of the bands of Pappas & Henderson, and a band for types that do not occur in the training text."""

_TYPE_RESAMPLES = 2_000  # of the types of a band, for the interval of their mean

Losses = NDArray[np.floating[Any]]
"""Negative log-likelihood of each token."""


@dataclass(frozen=True)
class TokenComparison:
    """Comparison of two systems on some of the tokens of a text, by their mean loss per token."""

    tokens: int
    nll_a: float
    """Mean loss of A per token."""
    nll_b: float
    """Mean loss of B per token."""
    difference: float
    """Difference B - A; below zero, B is better."""
    interval: tuple[float, float] | None
    """Bootstrap interval of the difference, computed by the same method as for the whole text.

    None if the tokens come from too few units of text (documents or blocks).
    """


@dataclass(frozen=True)
class BandComparison(TokenComparison):
    """Comparison of two systems on one band of training counts, from `low` to `high` inclusive; None for no bound."""

    low: int
    high: int | None


@dataclass(frozen=True)
class TypeComparison(BandComparison):
    """Comparison of two systems on the targets of one band of training counts, per token and per word type."""

    types: int
    """Number of types of the band that occur in the text."""
    relative: float | None
    """Mean over the types of 100 (B - A) / B, in percent, where A and B are the summed losses of a type. Unlike
    `difference`, the mean is not dominated by frequent types. The divisor is B, as in the program of Pappas &
    Henderson, where B is DRILL. None if the loss of B is zero on every type."""
    relative_interval: tuple[float, float] | None
    """95 % interval of `relative`, by resampling types; None if there are fewer than two types."""


@dataclass(frozen=True)
class PairedLosses:
    """Losses of two systems on the same tokens, and the units of text that are resampled.

    A system is one model configuration; a run is one training of it with one seed.
    """

    a: list[Losses]
    """Losses of each run of A."""
    b: list[Losses]
    """Losses of each run of B."""
    boundaries: NDArray[np.int64]
    """Boundaries of the units of text: 0, ..., number of tokens."""

    def compare_on(self, mask_N: NDArray[np.bool_]) -> TokenComparison:
        """Compare the two systems on the tokens that a mask selects."""
        from reefknot.lab.evaluation.comparison import FEWEST_UNITS, compare

        selected_a = [nll[mask_N] for nll in self.a]
        selected_b = [nll[mask_N] for nll in self.b]
        mean_a = float(np.mean([_mean(nll) for nll in selected_a]))
        mean_b = float(np.mean([_mean(nll) for nll in selected_b]))

        # The boundaries of the same units of text, counted in selected tokens only.
        num_selected_before = np.concatenate([[0], np.cumsum(mask_N)])
        boundaries = num_selected_before[self.boundaries]
        interval = None
        if len(np.unique(boundaries)) > FEWEST_UNITS:
            interval = compare(selected_a, selected_b, boundaries).interval
        return TokenComparison(int(mask_N.sum()), mean_a, mean_b, mean_b - mean_a, interval)

    @property
    def tokens(self) -> int:
        """Number of tokens of the text."""
        return int(self.boundaries[-1])


def loss_by_frequency(score: Score, split: Split, vocabulary: Vocabulary) -> Frequency:
    """Return the mean loss per band of training counts, of the target and of the token before it.

    If the vocabulary counts the words that it splits into sub-words (`Vocabulary.split_words`), the tokens are words:
    the loss of a word is the sum over its sub-words, as in a model over words with the same unknown words.
    """
    if vocabulary.split_words is not None:
        return _word_loss_by_frequency(score, split, vocabulary)
    targets_N, previous_N = _targets_and_previous(len(score.nll), split, vocabulary)
    counts_V = np.asarray(vocabulary.counts)
    return Frequency(
        target=_losses_by_count(score.nll, counts_V[targets_N], counts_V),
        previous=_losses_by_count(score.nll, counts_V[previous_N], counts_V),
    )


def _word_loss_by_frequency(score: Score, split: Split, vocabulary: Vocabulary) -> Frequency:
    """Return the mean loss per word and band, by the training counts of words that are split into sub-words."""
    assert vocabulary.split_words is not None
    word_counts = vocabulary.split_words
    ids_N = np.asarray(split.ids, dtype=np.int64)
    ends_word_V = np.array([vocabulary.ends_word(token) for token in vocabulary.words])
    ends_word_N = ends_word_V[ids_N]
    ends_word_N[-1] = True
    starts_W = np.concatenate([[0], np.flatnonzero(ends_word_N)[:-1] + 1])
    counts_W = np.array([word_counts[word] for word in vocabulary.decode(ids_N)])
    previous_counts_W = np.concatenate([[word_counts.get(END_OF_LINE, 0)], counts_W[:-1]])

    num_unscored = len(ids_N) - len(score.nll)
    nll_N = np.concatenate([np.zeros(num_unscored), score.nll])
    nll_W = np.add.reduceat(nll_N.astype(np.float64), starts_W)
    is_scored_W = starts_W >= num_unscored  # without a word whose first sub-word is not scored
    counts_V = np.array(list(word_counts.values()))
    return Frequency(
        target=_losses_by_count(nll_W[is_scored_W], counts_W[is_scored_W], counts_V),
        previous=_losses_by_count(nll_W[is_scored_W], previous_counts_W[is_scored_W], counts_V),
    )


def _losses_by_count(nll_N: Losses, counts_N: NDArray[np.int64], counts_V: NDArray[np.int64]) -> tuple[Band, ...]:
    """Return the mean loss per band of training counts.

    Args:
        nll_N: The losses of the scored tokens.
        counts_N: The count by which each of these tokens is assigned to a band.
        counts_V: The counts of all types.
    """
    band_V = _band_indices(counts_V, EDGES)
    bands = []
    for band in iterate_bands(counts_N, EDGES):
        bands.append(
            Band(
                low=band.low,
                high=band.high,
                tokens=int(band.mask.sum()),
                types=int((band_V == band.number).sum()),
                nll=_mean(nll_N[band.mask]),
            )
        )
    return tuple(bands)


def compare_by_target(losses: PairedLosses, split: Split, vocabulary: Vocabulary) -> list[TypeComparison]:
    """Compare two systems by the training count of the target.

    A type on which the loss of B is zero has no relative difference and is left out of the mean over types.
    """
    counts_V = np.asarray(vocabulary.counts)
    band_V = _band_indices(counts_V, FIGURE_3)
    targets_N, _ = _targets_and_previous(losses.tokens, split, vocabulary)
    is_present_V = np.bincount(targets_N, minlength=len(counts_V)) > 0
    sums_a_V = _sum_by_type(losses.a, targets_N, len(counts_V))
    sums_b_V = _sum_by_type(losses.b, targets_N, len(counts_V))

    comparisons = []
    for band in iterate_bands(counts_V[targets_N], FIGURE_3):
        in_band_V = is_present_V & (band_V == band.number)
        has_loss_V = in_band_V & (sums_b_V > 0)
        relative_T = 100 * (1 - sums_a_V[has_loss_V] / sums_b_V[has_loss_V])
        mean_relative = None
        if relative_T.size:
            mean_relative = float(relative_T.mean())
        comparisons.append(
            TypeComparison(
                **vars(losses.compare_on(band.mask)),
                low=band.low,
                high=band.high,
                types=int(in_band_V.sum()),
                relative=mean_relative,
                relative_interval=_bootstrap_interval(relative_T),
            )
        )
    return comparisons


def compare_by_previous(losses: PairedLosses, split: Split, vocabulary: Vocabulary) -> list[BandComparison]:
    """Compare two systems by the training count of the token before the target."""
    _, previous_N = _targets_and_previous(losses.tokens, split, vocabulary)
    counts_N = np.asarray(vocabulary.counts)[previous_N]
    comparisons = []
    for band in iterate_bands(counts_N, FIGURE_3):
        token_comparison = losses.compare_on(band.mask)
        comparisons.append(BandComparison(**vars(token_comparison), low=band.low, high=band.high))
    return comparisons


def compare_on_symbols(losses: PairedLosses, split: Split, vocabulary: Vocabulary) -> dict[str, TokenComparison]:
    """Compare two systems on the targets <unk> and <eos>, which are frequent enough to dominate their bands."""
    targets_N, _ = _targets_and_previous(losses.tokens, split, vocabulary)
    comparisons = {}
    for symbol_id in (vocabulary.unk, vocabulary.eos):
        if symbol_id is not None and symbol_id in targets_N:
            comparisons[vocabulary.words[symbol_id]] = losses.compare_on(targets_N == symbol_id)
    return comparisons


def _targets_and_previous(
    num_scored: int, split: Split, vocabulary: Vocabulary
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ids of the scored tokens, targets_N, and of the tokens before them, previous_N.

    If the first token is scored, <eos> counts as the token before it.
    """
    ids = np.asarray(split.ids, dtype=np.int64)
    is_first_scored = num_scored == len(ids)
    if not is_first_scored:
        return ids[1:], ids[:-1]
    return ids, np.concatenate([[vocabulary.eos], ids[:-1]])


def _sum_by_type(runs: list[Losses], targets_N: NDArray[np.int64], num_types: int) -> NDArray[np.float64]:
    """Return the summed loss of the targets of each type, averaged over the runs of a system."""
    mean_nll_N = np.mean(runs, axis=0, dtype=np.float64)
    sums_V = np.bincount(targets_N, weights=mean_nll_N, minlength=num_types)
    return np.asarray(sums_V, dtype=np.float64)


class CountBand(NamedTuple):
    """A band of training counts."""

    number: int
    """Index of the band, counted from 0."""
    low: int
    """The smallest count of the band."""
    high: int | None
    """The largest count of the band; None for no bound."""
    mask: NDArray[np.bool_]
    """Which tokens (or types) are in the band, mask_N."""


def iterate_bands(counts_N: NDArray[np.int64], edges: tuple[int, ...]) -> Iterator[CountBand]:
    """Yield each band that is not empty, given the training count of every token (or type)."""
    band_N = _band_indices(counts_N, edges)
    for index, low in enumerate(edges):
        mask_N = band_N == index
        if not mask_N.any():
            continue
        high = None
        if index + 1 < len(edges):
            high = edges[index + 1] - 1
        yield CountBand(index, low, high, mask_N)


def _band_indices(counts: NDArray[np.int64], edges: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the index of the band of each count: with edges 0, 10 and 100, the count 50 is in band 1."""
    indices: NDArray[np.int64] = np.searchsorted(edges, counts, side="right") - 1
    return indices


def _bootstrap_interval(values_T: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return a 95 % bootstrap interval of the mean of values. The seed is fixed, so the result is reproducible."""
    if len(values_T) < 2:
        return None
    from reefknot.lab.evaluation.comparison import resample_counts

    count_chunks = resample_counts(len(values_T), _TYPE_RESAMPLES, np.random.default_rng(0))
    means_R = np.concatenate([counts_RT @ values_T / len(values_T) for counts_RT in count_chunks])
    low, high = np.quantile(means_R, [0.025, 0.975])
    return float(low), float(high)


def _mean(nll: Losses) -> float:
    return float(nll.mean(dtype=np.float64))
