"""Loss by how often a token was seen in training: of the token to predict, or of the token before it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reefknot.evaluation.perplexity import Score
from reefknot.text.dataset import Split
from reefknot.text.vocabulary import Vocabulary

EDGES = (0, 10, 100, 1_000, 10_000)
"""Lower ends of the bands of training counts; the last is open."""

Band = dict[str, Any]


def loss_by_frequency(score: Score, split: Split, vocabulary: Vocabulary) -> dict[str, list[Band]]:
    """Mean loss per band of training counts, by the target and by the token before it."""
    ids = np.asarray(split.ids, dtype=np.int64)
    counts = np.asarray(vocabulary.counts)
    targets = ids[score.first :]
    before = np.concatenate([[vocabulary.eos], ids[:-1]]) if score.first == 0 else ids[:-1]
    return {
        "target": _bands(score.nll, counts[targets], counts),
        "previous": _bands(score.nll, counts[before], counts),
    }


def _bands(nll: NDArray[np.float32], seen: NDArray[np.int64], counts: NDArray[np.int64]) -> list[Band]:
    band_of_token = np.searchsorted(EDGES, seen, side="right") - 1
    band_of_type = np.searchsorted(EDGES, counts, side="right") - 1
    bands = []
    for index, low in enumerate(EDGES):
        inside = band_of_token == index
        if not inside.any():
            continue
        high = EDGES[index + 1] - 1 if index + 1 < len(EDGES) else None
        mean = float(nll[inside].mean(dtype=np.float64))
        types = int((band_of_type == index).sum())
        bands.append({"low": low, "high": high, "tokens": int(inside.sum()), "types": types, "nll": mean})
    return bands
