"""Pictures of word vectors: select a few words, and project their vectors to the plane of two principal components.

Start with `project_words`, which does both for each end of a model: the input embeddings and the output classifier. A
picture shows a few centre words, each with some of its nearest neighbours.

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
    """Principal components of some vectors.

    If the vectors span fewer dimensions than requested, the other coordinates and shares are 0.
    """

    coordinates: NDArray[np.float64]
    """Coordinate of each word along each component, coordinates_WC."""
    explained: NDArray[np.float64]
    """Share of the variance that each component explains, explained_C."""


def principal_components(vectors_WD: ArrayLike, count: int = 2) -> Components:
    """Return the first `count` principal components of some vectors, in float64.

    The sign of a component is arbitrary. It is chosen so that the word farthest from the centre (the first one, if
    several are equally far) has a positive coordinate. So equal vectors give equal pictures.
    """
    raw_WD = np.array(vectors_WD, dtype=np.float64)
    if raw_WD.ndim != 2 or not np.isfinite(raw_WD).all():
        raise DataError("principal components need finite vectors, one per word; look for NaN or infinity")
    coordinates_WC = np.zeros((len(raw_WD), count))
    explained_C = np.zeros(count)
    if not raw_WD.size:
        return Components(coordinates_WC, explained_C)

    # The components are the singular vectors of the centred vectors. Singular values below the tolerance are rounding
    # errors.
    tolerance = np.finfo(np.float64).eps * max(raw_WD.shape) * np.linalg.norm(raw_WD)
    centred_WD = raw_WD - raw_WD.mean(axis=0)
    left_WR, singular_R, _ = np.linalg.svd(centred_WD, full_matrices=False)
    singular_R = singular_R[singular_R > tolerance]
    rank = min(count, len(singular_R))
    coordinates_WC[:, :rank] = left_WR[:, :rank] * singular_R[:rank]
    explained_C[:rank] = singular_R[:rank] ** 2 / (singular_R**2).sum()

    # Choose the sign of each component.
    for component in range(count):
        distances_W = np.abs(coordinates_WC[:, component])
        # argmax returns the first word whose distance equals the largest distance up to rounding.
        farthest_word = np.argmax(distances_W >= (1 - 1e-6) * distances_W.max())
        if coordinates_WC[farthest_word, component] < 0:
            coordinates_WC[:, component] *= -1.0
    return Components(coordinates_WC, explained_C)


def project_words(
    vectors: Mapping[str, WordVectors], vocabulary: Vocabulary, words: Sequence[str] | None = None
) -> Embedding:
    """Return the positions of words in the plane of the first two principal components, for each end.

    Vectors are scaled to length 1, so that distances in a picture agree with the cosines that define neighbours. In the
    result, `groups[i]` is the index of the centre word that `words[i]` belongs to.

    Args:
        vectors: The vectors of each end, by name.
        vocabulary: The vocabulary of the model.
        words: The centre words, each shown with some of its neighbours; by default, the examples of the vocabulary.
    """
    if words is None:
        center_words = select_examples(vocabulary, NUM_EXAMPLES)
    else:
        center_words = list(dict.fromkeys(words))  # without duplicates

    group_of_word = _group_words(list(vectors.values()), center_words)
    shown_words = sorted(group_of_word, key=group_of_word.__getitem__)
    groups = [group_of_word[word] for word in shown_words]
    pictures = {end: _project(end_vectors.select(shown_words)) for end, end_vectors in vectors.items()}
    return Embedding(words=tuple(shown_words), groups=tuple(groups), **pictures)


def _group_words(ends: Sequence[WordVectors], center_words: list[str]) -> dict[str, int]:
    """Return the words to show, each with the index of its group.

    A group is a word of `center_words` and some of its neighbours, taken from each end in turn. A word that is a
    neighbour of several centre words belongs to the first.
    """
    num_candidates = NUM_EXAMPLES * NEIGHBORS_PER_WORD
    neighbors_by_end = [nearest_words(end, center_words, num_candidates) for end in ends]
    group_of_word = {word: group for group, word in enumerate(center_words)}
    for group, center_word in enumerate(center_words):
        candidates_by_end = []
        for neighbors in neighbors_by_end:
            candidates_by_end.append([neighbor for neighbor, _ in neighbors[center_word]])

        num_added = 0
        # The nearest word of each end comes first, then the second nearest word of each end, and so on.
        for neighbor in chain.from_iterable(zip_longest(*candidates_by_end)):
            if num_added == NEIGHBORS_PER_WORD:
                break
            # Words outside the vocabulary, which a character-based input end can read, have no vector at the output.
            has_all_vectors = all(neighbor in end for end in ends)
            if has_all_vectors and neighbor not in group_of_word:
                group_of_word[neighbor] = group
                num_added += 1
    return group_of_word


def _project(vectors: WordVectors) -> Picture:
    """Project vectors to the plane. Coordinates are rounded, so that saved results stay small."""
    components = principal_components(vectors.unit_VD)
    # Adding 0 turns -0 into 0.
    xy_W2 = components.coordinates.round(3) + 0.0
    explained_2 = components.explained.round(4) + 0.0
    return Picture(xy=tuple(map(tuple, xy_W2.tolist())), explained=tuple(explained_2.tolist()))
