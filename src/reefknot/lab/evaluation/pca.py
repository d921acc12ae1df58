"""Word vectors in the plane: principal components of a few words' vectors, and the words that are worth a look.

Shapes: W words, D width, C components, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reefknot.errors import DataError
from reefknot.lab.evaluation.neighbors import examples, nearest_words
from reefknot.lab.runs.result import Embedding, Picture
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.vectors.word_vectors import WordVectors

EXAMPLES = 8
"""Words that a picture is drawn around: as many as there are colours."""
AROUND = 4
"""Neighbours drawn beside each of them."""


@dataclass(frozen=True)
class Components:
    """Places [W, C] along the principal components, and the share [C] of the variance that lies along each.

    Where the vectors span fewer dimensions than were asked for, all places along the others are 0, and so are their
    shares.
    """

    places: NDArray[np.float64]
    explained: NDArray[np.float64]


def principal_components(vectors_WD: ArrayLike, count: int = 2) -> Components:
    """The first `count` principal components of some vectors, in float64.

    A component has no direction of its own: it is turned so that the word farthest from the middle lies on its positive
    side, the first of several that are equally far. Equal vectors thus give equal pictures.
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
        found = min(count, len(singular_R))
        places_WC[:, :found] = left_WR[:, :found] * singular_R[:found]
        explained_C[:found] = singular_R[:found] ** 2 / (singular_R**2).sum()
    far_WC = np.abs(places_WC)
    for c in range(count if len(places_WC) else 0):
        first = np.argmax(far_WC[:, c] >= (1 - 1e-6) * far_WC[:, c].max())
        places_WC[:, c] *= -1.0 if places_WC[first, c] < 0 else 1.0
    return Components(places_WC, explained_C)


def embedding(
    vectors: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str] | None = None
) -> Embedding:
    """Where some words lie in the plane of each end's first two principal components.

    `vectors` are those of the ends by name. They are taken at length 1, so that distances in a picture are those by
    which neighbours are found. Drawn are `words`, or the examples of the vocabulary, each with neighbours of its own;
    `groups` says which of those words each is drawn around.
    """
    middles = examples(vocabulary, EXAMPLES) if words is None else list(dict.fromkeys(words))
    group_of = _groups(list(vectors.values()), middles)
    drawn = sorted(group_of, key=group_of.__getitem__)
    pictures = {name: _picture(each.select(drawn)) for name, each in vectors.items()}
    return Embedding(words=tuple(drawn), groups=tuple(group_of[word] for word in drawn), **pictures)


def _groups(ends: Sequence[WordVectors], middles: list[str]) -> dict[str, int]:
    """Each word to draw, and its group: a word of `middles`, and neighbours of it from every end in turn that no other
    group has."""
    enough = EXAMPLES * AROUND
    near = [nearest_words(each, middles, enough) for each in ends]
    group_of = {word: n for n, word in enumerate(middles)}
    for n, word in enumerate(middles):
        in_turn = chain.from_iterable(zip_longest(*([other for other, _ in end[word]] for end in near)))
        # Words that are only spelled are known at the input alone.
        free = dict.fromkeys(other for other in in_turn if other not in group_of and all(other in end for end in ends))
        group_of |= dict.fromkeys(islice(free, AROUND), n)
    return group_of


def _picture(vectors: WordVectors) -> Picture:
    """Rounded to what can be seen, so that records stay small; adding 0 turns -0 into 0."""
    found = principal_components(vectors.unit_VD)
    return Picture(
        xy=tuple(map(tuple, (found.places.round(3) + 0.0).tolist())),
        explained=tuple((found.explained.round(4) + 0.0).tolist()),
    )
