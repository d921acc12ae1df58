"""Pictures of word vectors: select a few words, and project their vectors to the plane of two principal components.

Start with `project_words`, which does both for the vectors of each end (input and output) of a model.

Shapes: W words, D dimension, C components, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reefknot.errors import DataError
from reefknot.lab.evaluation.neighbors import NUM_EXAMPLES, nearest_words, select_examples
from reefknot.lab.runs.result import Embedding, Picture
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.vectors.word_vectors import WordVectors

NEIGHBORS_PER_WORD = 4
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
    tolerance = np.finfo(np.float64).eps * max(centred_WD.shape, default=0) * np.linalg.norm(centred_WD)
    coordinates_WC, explained_C = np.zeros((len(centred_WD), count)), np.zeros(count)
    if centred_WD.size:
        centred_WD -= centred_WD.mean(axis=0)
        left_WR, singular_R, _ = np.linalg.svd(centred_WD, full_matrices=False)
        singular_R = singular_R[singular_R > tolerance]
        rank = min(count, len(singular_R))
        coordinates_WC[:, :rank] = left_WR[:, :rank] * singular_R[:rank]
        explained_C[:rank] = singular_R[:rank] ** 2 / (singular_R**2).sum()
    distances_WC = np.abs(coordinates_WC)
    for component in range(count if len(coordinates_WC) else 0):
        distances_W = distances_WC[:, component]
        # argmax returns the first word whose distance equals the largest distance up to rounding.
        farthest = np.argmax(distances_W >= (1 - 1e-6) * distances_W.max())
        if coordinates_WC[farthest, component] < 0:
            coordinates_WC[:, component] *= -1.0
    return Components(coordinates_WC, explained_C)


def project_words(
    vectors: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str] | None = None
) -> Embedding:
    """Return the positions of words in the plane of the first two principal components, for each end.

    Vectors are scaled to length 1, so that distances in a picture agree with the cosines that define neighbours. In the
    result, `groups[i]` says which centre word `words[i]` is shown around, as an index into the centre words.

    Args:
        vectors: The vectors of each end, by name.
        vocabulary: The vocabulary of the model.
        words: The centre words, each shown with some of its neighbours; by default, the examples of the vocabulary.
    """
    center_words = select_examples(vocabulary, NUM_EXAMPLES) if words is None else list(dict.fromkeys(words))
    group_of = _group_words(list(vectors.values()), center_words)
    selected_words = sorted(group_of, key=group_of.__getitem__)
    pictures = {end: _project(table.select(selected_words)) for end, table in vectors.items()}
    return Embedding(words=tuple(selected_words), groups=tuple(group_of[word] for word in selected_words), **pictures)


def _group_words(ends: Sequence[WordVectors], center_words: list[str]) -> dict[str, int]:
    """Return the words to show, each with the index of its group.

    A group is a word of `center_words` and some of its neighbours, taken from each end in turn. A word that is a
    neighbour of several centre words belongs to the first.
    """
    num_candidates = NUM_EXAMPLES * NEIGHBORS_PER_WORD
    neighbors_by_end = [nearest_words(end, center_words, num_candidates) for end in ends]
    group_of = {word: group for group, word in enumerate(center_words)}
    for group, word in enumerate(center_words):
        word_lists = [[neighbor for neighbor, _ in neighbors[word]] for neighbors in neighbors_by_end]
        added = 0
        # The nearest word of each end comes first, then the second nearest word of each end, and so on.
        for neighbor in chain.from_iterable(zip_longest(*word_lists)):
            # Words outside the vocabulary, which a character-based input end can read, have no vector at the output.
            if added < NEIGHBORS_PER_WORD and neighbor not in group_of and all(neighbor in end for end in ends):
                group_of[neighbor] = group
                added += 1
    return group_of


def _project(vectors: WordVectors) -> Picture:
    """Project vectors to the plane. Coordinates are rounded, so that records stay small. Adding 0 turns -0 into 0."""
    components = principal_components(vectors.unit_VD)
    return Picture(
        xy=tuple(map(tuple, (components.coordinates.round(3) + 0.0).tolist())),
        explained=tuple((components.explained.round(4) + 0.0).tolist()),
    )
