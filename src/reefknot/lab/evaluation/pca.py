"""Word vectors in the plane: principal components of the vectors of a few words, and the choice of these words.

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
    """Coordinates [W, C] along the principal components, and the share [C] of the variance that each explains.

    If the vectors span fewer dimensions than requested, the other coordinates and shares are 0.
    """

    places: NDArray[np.float64]
    explained: NDArray[np.float64]


def principal_components(vectors_WD: ArrayLike, count: int = 2) -> Components:
    """Return the first `count` principal components of some vectors, in float64.

    The sign of a component is arbitrary. It is chosen so that the word farthest from the centre (the first one, if
    several are equally far) has a positive coordinate. So equal vectors give equal pictures.
    """
    centred_WD = np.array(vectors_WD, dtype=np.float64)
    if centred_WD.ndim != 2 or not np.isfinite(centred_WD).all():
        raise DataError("principal components are those of finite vectors, one per word: look for values that are not")
    rounding = np.finfo(np.float64).eps * max(centred_WD.shape, default=0) * np.linalg.norm(centred_WD)
    places_WC, explained_C = np.zeros((len(centred_WD), count)), np.zeros(count)
    if centred_WD.size:
        centred_WD -= centred_WD.mean(axis=0)
        left_WR, singular_R, _ = np.linalg.svd(centred_WD, full_matrices=False)
        singular_R = singular_R[singular_R > rounding]
        rank = min(count, len(singular_R))
        places_WC[:, :rank] = left_WR[:, :rank] * singular_R[:rank]
        explained_C[:rank] = singular_R[:rank] ** 2 / (singular_R**2).sum()
    far_WC = np.abs(places_WC)
    for c in range(count if len(places_WC) else 0):
        first = np.argmax(far_WC[:, c] >= (1 - 1e-6) * far_WC[:, c].max())
        places_WC[:, c] *= -1.0 if places_WC[first, c] < 0 else 1.0
    return Components(places_WC, explained_C)


def embedding(
    vectors: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str] | None = None
) -> Embedding:
    """Return the positions of some words in the plane of the first two principal components of each end.

    Vectors are scaled to length 1, so that distances in a picture agree with those that define neighbours. `groups` of
    the result says which of the `words` each word is shown around.

    Arguments:
        vectors: the vectors of each end, by name.
        words: the words to show, each with some of its neighbours; by default, the examples of the vocabulary.
    """
    middles = examples(vocabulary, EXAMPLES) if words is None else list(dict.fromkeys(words))
    group_of = _groups(list(vectors.values()), middles)
    drawn = sorted(group_of, key=group_of.__getitem__)
    pictures = {name: _picture(each.select(drawn)) for name, each in vectors.items()}
    return Embedding(words=tuple(drawn), groups=tuple(group_of[word] for word in drawn), **pictures)


def _groups(ends: Sequence[WordVectors], middles: list[str]) -> dict[str, int]:
    """Return the words to show, each with its group: a word of `middles` and neighbours of it, from each end in turn.

    A neighbour belongs to the first group that has it.
    """
    enough = EXAMPLES * AROUND
    near = [nearest_words(each, middles, enough) for each in ends]
    group_of = {word: n for n, word in enumerate(middles)}
    for n, word in enumerate(middles):
        in_turn = chain.from_iterable(zip_longest(*([other for other, _ in end[word]] for end in near)))
        # Words that are only spelled have no vector at the output end.
        free = dict.fromkeys(other for other in in_turn if other not in group_of and all(other in end for end in ends))
        group_of |= dict.fromkeys(islice(free, AROUND), n)
    return group_of


def _picture(vectors: WordVectors) -> Picture:
    """Round to the visible digits, so that records stay small. Adding 0 turns -0 into 0."""
    components = principal_components(vectors.unit_VD)
    return Picture(
        xy=tuple(map(tuple, (components.places.round(3) + 0.0).tolist())),
        explained=tuple((components.explained.round(4) + 0.0).tolist()),
    )
