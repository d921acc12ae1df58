"""Loss by how often a token was seen in training: of the token to predict, or of the token before it.

Of one model in powers of ten, as Baevski & Auli 2019 show it; of two models beside each other in the bands of Pappas &
Henderson 2019, Figure 3, where a band's figure is the mean over its word types, each counting alike.

Shapes: N scored tokens, V types.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reefknot.evaluation.perplexity import Score
from reefknot.text.dataset import Split
from reefknot.text.vocabulary import Vocabulary

EDGES = (0, 10, 100, 1_000, 10_000)
"""Lower ends of the bands of training counts; the last is open."""
FIGURE_3 = (0, 1, 50, 100, 250, 500, 1_000, 2_500, 5_000)
"""Those of Pappas & Henderson, and a band of its own for what training has not seen."""

Band = dict[str, Any]
Losses = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class BandComparison:
    """Two systems on the tokens of one band of training counts, low to high (None: no upper end)."""

    low: int
    high: int | None
    tokens: int
    nll_a: float
    nll_b: float
    """Per token."""


@dataclass(frozen=True)
class TypeComparison(BandComparison):
    """The same for targets, and for their types."""

    types: int
    """Those of the band that the text has."""
    relative: float
    """100 (B - A) / A of the summed losses of a type, in percent, mean over the types: below zero, B is better."""


def loss_by_frequency(score: Score, split: Split, vocabulary: Vocabulary) -> dict[str, list[Band]]:
    """Mean loss per band of training counts, by the target and by the token before it."""
    counts = np.asarray(vocabulary.counts)
    band_of_type = _band(counts, EDGES)

    def bands(ids_N: NDArray[np.int64]) -> list[Band]:
        return [
            {
                "low": low,
                "high": high,
                "tokens": int(inside_N.sum()),
                "types": int((band_of_type == index).sum()),
                "nll": _mean(score.nll[inside_N]),
            }
            for index, low, high, inside_N in _occupied(counts[ids_N], EDGES)
        ]

    targets_N, previous_N = _sides(len(score.nll), split, vocabulary)
    return {"target": bands(targets_N), "previous": bands(previous_N)}


def compare_by_target(
    a: Losses, b: Losses, split: Split, vocabulary: Vocabulary, edges: tuple[int, ...] = FIGURE_3
) -> list[TypeComparison]:
    """Two systems' losses of the same tokens, by how often the target was seen in training.

    A type that A predicts without any loss has no relative difference and is left out of that mean.
    """
    counts = np.asarray(vocabulary.counts)
    targets_N, _ = _sides(len(a), split, vocabulary)
    sums_a, sums_b = (np.bincount(targets_N, weights=losses, minlength=len(counts)) for losses in (a, b))
    present_V = np.bincount(targets_N, minlength=len(counts)) > 0
    band_of_type = _band(counts, edges)
    found = []
    for index, low, high, inside_N in _occupied(counts[targets_N], edges):
        types_V = present_V & (band_of_type == index)
        divisible_V = types_V & (sums_a > 0)
        relative = 100 * (sums_b[divisible_V] / sums_a[divisible_V] - 1)
        found.append(
            TypeComparison(
                low,
                high,
                int(inside_N.sum()),
                _mean(a[inside_N]),
                _mean(b[inside_N]),
                types=int(types_V.sum()),
                relative=float(relative.mean()) if relative.size else 0.0,
            )
        )
    return found


def compare_by_previous(
    a: Losses, b: Losses, split: Split, vocabulary: Vocabulary, edges: tuple[int, ...] = FIGURE_3
) -> list[BandComparison]:
    """Two systems' losses of the same tokens, by how often the token before was seen in training."""
    _, previous_N = _sides(len(a), split, vocabulary)
    seen_N = np.asarray(vocabulary.counts)[previous_N]
    return [
        BandComparison(low, high, int(inside_N.sum()), _mean(a[inside_N]), _mean(b[inside_N]))
        for _, low, high, inside_N in _occupied(seen_N, edges)
    ]


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
