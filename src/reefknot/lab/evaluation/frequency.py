"""Loss by how often a token was seen in training: of the token to predict, or of the token before it.

Of one model in powers of ten, as Baevski & Auli 2019 show it; of two models beside each other in the bands of Pappas &
Henderson 2019, Figure 3: per token, with an interval, and as they show it, the mean over the word types of a band, each
counting alike.

Shapes: N scored tokens, V types, T of them in a band, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reefknot.lab.evaluation.comparison import FEWEST_UNITS, compare, draw
from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.runs.result import Band, Frequency
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary

EDGES = (0, 10, 100, 1_000, 10_000)
"""Lower ends of the bands of training counts; the last is open."""
FIGURE_3 = (0, 1, 50, 100, 250, 500, 1_000, 2_500, 5_000)
"""Those of Pappas & Henderson, and a band of its own for what training has not seen."""

Losses = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class TokenComparison:
    """Two systems on some of the tokens of a text: the loss of each per token."""

    tokens: int
    nll_a: float
    nll_b: float
    difference: float
    """B - A: below zero, B is better."""
    interval: tuple[float, float] | None
    """Where that lies, as for the whole text; None where the tokens are in too few units of it to tell."""


@dataclass(frozen=True)
class BandComparison(TokenComparison):
    """The same on one band of training counts, low to high (None: no upper end)."""

    low: int
    high: int | None


@dataclass(frozen=True)
class TypeComparison(BandComparison):
    """The same for targets, and for their types."""

    types: int
    """Those of the band that the text has."""
    relative: float | None
    """100 (B - A) / B of the summed losses of a type, in percent, mean over the types: not what `difference` is, which
    frequent types decide. It is divided by B's as in the program of Pappas & Henderson, whose B is DRILL. None where B
    has no loss on any of them."""
    relative_interval: tuple[float, float] | None
    """Where that mean lies (95 %, types resampled); None where there is but one type."""


@dataclass(frozen=True)
class Pair:
    """Two systems on the same tokens of a text: an array of losses for each run, and the units that are resampled."""

    a: list[Losses]
    b: list[Losses]
    boundaries: NDArray[np.int64]
    """Of the units: 0, ..., number of tokens."""

    def on(self, inside_N: NDArray[np.bool_]) -> TokenComparison:
        """Compare on some of the tokens."""
        a, b = ([nll[inside_N] for nll in runs] for runs in (self.a, self.b))
        ends = np.concatenate([[0], np.cumsum(inside_N)])[self.boundaries]
        enough = len(np.unique(ends)) > FEWEST_UNITS
        mean_a, mean_b = (float(np.mean([_mean(nll) for nll in runs])) for runs in (a, b))
        interval = compare(a, b, ends).interval if enough else None
        return TokenComparison(int(inside_N.sum()), mean_a, mean_b, mean_b - mean_a, interval)

    @property
    def tokens(self) -> int:
        return int(self.boundaries[-1])


def loss_by_frequency(score: Score, split: Split, vocabulary: Vocabulary) -> Frequency:
    """Mean loss per band of training counts, by the target and by the token before it."""
    counts = np.asarray(vocabulary.counts)
    band_of_type = _band(counts, EDGES)

    def bands(ids_N: NDArray[np.int64]) -> tuple[Band, ...]:
        return tuple(
            Band(
                low=low,
                high=high,
                tokens=int(inside_N.sum()),
                types=int((band_of_type == index).sum()),
                nll=_mean(score.nll[inside_N]),
            )
            for index, low, high, inside_N in _occupied(counts[ids_N], EDGES)
        )

    targets_N, previous_N = _sides(len(score.nll), split, vocabulary)
    return Frequency(target=bands(targets_N), previous=bands(previous_N))


def compare_by_target(
    pair: Pair, split: Split, vocabulary: Vocabulary, edges: tuple[int, ...] = FIGURE_3
) -> list[TypeComparison]:
    """Two systems by how often the target was seen in training.

    A type that B predicts without any loss has no relative difference and is left out of that mean.
    """
    counts = np.asarray(vocabulary.counts)
    targets_N, _ = _sides(pair.tokens, split, vocabulary)
    sums_a, sums_b = (
        np.bincount(targets_N, weights=np.mean(runs, axis=0, dtype=np.float64), minlength=len(counts))
        for runs in (pair.a, pair.b)
    )
    present_V = np.bincount(targets_N, minlength=len(counts)) > 0
    band_of_type = _band(counts, edges)
    found = []
    for index, low, high, inside_N in _occupied(counts[targets_N], edges):
        types_V = present_V & (band_of_type == index)
        divisible_V = types_V & (sums_b > 0)
        relative = 100 * (1 - sums_a[divisible_V] / sums_b[divisible_V])
        mean = float(relative.mean()) if relative.size else None
        found.append(
            TypeComparison(
                **vars(pair.on(inside_N)),
                low=low,
                high=high,
                types=int(types_V.sum()),
                relative=mean,
                relative_interval=_resampled(relative),
            )
        )
    return found


def _resampled(values_T: NDArray[np.float64], resamples: int = 2_000) -> tuple[float, float] | None:
    """Where the mean lies, as values drawn with replacement tell; the same values give the same interval."""
    if len(values_T) < 2:
        return None
    texts = draw(len(values_T), resamples, np.random.default_rng(0))
    means = np.concatenate([times_RT @ values_T / len(values_T) for times_RT in texts])
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def compare_by_previous(
    pair: Pair, split: Split, vocabulary: Vocabulary, edges: tuple[int, ...] = FIGURE_3
) -> list[BandComparison]:
    """Two systems by how often the token before was seen in training."""
    _, previous_N = _sides(pair.tokens, split, vocabulary)
    seen_N = np.asarray(vocabulary.counts)[previous_N]
    return [
        BandComparison(**vars(pair.on(inside_N)), low=low, high=high)
        for _, low, high, inside_N in _occupied(seen_N, edges)
    ]


def compare_on_symbols(pair: Pair, split: Split, vocabulary: Vocabulary) -> dict[str, TokenComparison]:
    """Two systems on the targets that are no words, <unk> and <eos>: frequent ones, which decide their bands."""
    targets_N, _ = _sides(pair.tokens, split, vocabulary)
    symbols = [each for each in (vocabulary.unk, vocabulary.eos) if each is not None and each in targets_N]
    return {vocabulary.words[each]: pair.on(targets_N == each) for each in symbols}


def _sides(scored: int, split: Split, vocabulary: Vocabulary) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The scored tokens and the ones before them: <eos> before the first, unless it is not scored."""
    ids = np.asarray(split.ids, dtype=np.int64)
    if scored < len(ids):
        return ids[1:], ids[:-1]
    return ids, np.concatenate([[vocabulary.eos], ids[:-1]])


def _occupied(
    seen_N: NDArray[np.int64], edges: tuple[int, ...]
) -> Iterator[tuple[int, int, int | None, NDArray[np.bool_]]]:
    """Each band that has tokens: its index, its ends, and which tokens are in it."""
    band_N = _band(seen_N, edges)
    for index, low in enumerate(edges):
        inside_N = band_N == index
        if inside_N.any():
            yield index, low, edges[index + 1] - 1 if index + 1 < len(edges) else None, inside_N


def _band(seen: NDArray[np.int64], edges: tuple[int, ...]) -> NDArray[np.int64]:
    band: NDArray[np.int64] = np.searchsorted(edges, seen, side="right") - 1
    return band


def _mean(losses: Losses) -> float:
    return float(losses.mean(dtype=np.float64))
