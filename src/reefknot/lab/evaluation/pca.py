"""Word vectors in the plane: select a few words, and compute the principal components of their vectors.

Shapes: W words, D dimension, C components, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reefknot.errors import DataError
from reefknot.lab.evaluation.neighbors import EXAMPLES, examples, nearest_words
from reefknot.lab.runs.result import Embedding, Picture
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.vectors.word_vectors import WordVectors

AROUND = 4
"""Number of neighbours that are shown around each example word."""


@dataclass(frozen=True)
class Components:
    """Coordinates (W, C) along the principal components, and the share (C,) of the variance that each explains.

    If the vectors span fewer dimensions than requested, the other coordinates and shares are 0.
    """

    coordinates: NDArray[np.float64]
    explained: NDArray[np.float64]


def principal_components(vectors_WD: ArrayLike, count: int = 2) -> Components:
    """Return the first `count` principal components of some vectors, in float64.

    The sign of a component is arbitrary. It is chosen so that the word farthest from the centre (the first one, if
    several are equally far) has a positive coordinate. So equal vectors give equal pictures.
    """
    centred_WD = np.array(vectors_WD, dtype=np.float64)
    if centred_WD.ndim != 2 or not np.isfinite(centred_WD).all():
        raise DataError("principal components need finite vectors, one per word; look for NaN or infinity")
    rounding = np.finfo(np.float64).eps * max(centred_WD.shape, default=0) * np.linalg.norm(centred_WD)
    coordinates_WC, explained_C = np.zeros((len(centred_WD), count)), np.zeros(count)
    if centred_WD.size:
        centred_WD -= centred_WD.mean(axis=0)
        left_WR, singular_R, _ = np.linalg.svd(centred_WD, full_matrices=False)
        singular_R = singular_R[singular_R > rounding]
        rank = min(count, len(singular_R))
        coordinates_WC[:, :rank] = left_WR[:, :rank] * singular_R[:rank]
        explained_C[:rank] = singular_R[:rank] ** 2 / (singular_R**2).sum()
    far_WC = np.abs(coordinates_WC)
    for c in range(count if len(coordinates_WC) else 0):
        first = np.argmax(far_WC[:, c] >= (1 - 1e-6) * far_WC[:, c].max())
        coordinates_WC[:, c] *= -1.0 if coordinates_WC[first, c] < 0 else 1.0
    return Components(coordinates_WC, explained_C)


def embedding(
    vectors: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str] | None = None
) -> Embedding:
    """Return the positions of words in the plane of the first two principal components, for each end.

    Vectors are scaled to length 1, so that distances in a picture agree with the cosines that define neighbours. In the
    result, `groups` has for each word the index of the word in `words` that it is shown around.

    Args:
        vectors: The vectors of each end, by name.
        vocabulary: The vocabulary of the model.
        words: The words to show, each with some of its neighbours; by default, the examples of the vocabulary.
    """
    centres = examples(vocabulary, EXAMPLES) if words is None else list(dict.fromkeys(words))
    group_of = _groups(list(vectors.values()), centres)
    shown = sorted(group_of, key=group_of.__getitem__)
    pictures = {end: _picture(table.select(shown)) for end, table in vectors.items()}
    return Embedding(words=tuple(shown), groups=tuple(group_of[word] for word in shown), **pictures)


def _groups(ends: Sequence[WordVectors], centres: list[str]) -> dict[str, int]:
    """Return the words to show, each with the index of its group.

    A group is a word of `centres` and some of its neighbours, taken from each end in turn. A word that is a neighbour
    of several centres belongs to the first of them.
    """
    enough = EXAMPLES * AROUND
    near = [nearest_words(end, centres, enough) for end in ends]
    group_of = {word: n for n, word in enumerate(centres)}
    for n, word in enumerate(centres):
        in_turn = chain.from_iterable(zip_longest(*([other for other, _ in end[word]] for end in near)))
        # Words that are only spelled have no vector at the output end.
        free = dict.fromkeys(other for other in in_turn if other not in group_of and all(other in end for end in ends))
        group_of |= dict.fromkeys(islice(free, AROUND), n)
    return group_of


def _picture(vectors: WordVectors) -> Picture:
    """Return rounded coordinates, so that records stay small. Adding 0 turns -0 into 0."""
    components = principal_components(vectors.unit_VD)
    return Picture(
        xy=tuple(map(tuple, (components.coordinates.round(3) + 0.0).tolist())),
        explained=tuple((components.explained.round(4) + 0.0).tolist()),
    )
