"""Principal components against scipy's eigenvectors of the covariance, and the picture stored in result.json."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.linalg import eigh
from scipy.spatial.distance import pdist

from reefknot.errors import DataError
from reefknot.lab.evaluation.neighbors import NUM_EXAMPLES, nearest_words, select_examples
from reefknot.lab.evaluation.pca import NEIGHBORS_PER_WORD, principal_components, project_words
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.vectors.word_vectors import WordVectors


def vectors(words: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(words, dim)) * np.linspace(1, 3, dim)


def vocabulary(size: int = 300) -> Vocabulary:
    letters = "abcdefghijklmnopqrst"
    words = (f"word{letters[n // 400]}{letters[n // 20 % 20]}{letters[n % 20]}" for n in range(size))
    return Vocabulary(tuple(words), tuple(range(size + 20, 20, -1)))


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (3, 2)])
def test_components_are_eigenvectors_of_the_covariance(shape: tuple[int, int]) -> None:
    inputs_WD = vectors(*shape)
    result = principal_components(inputs_WD)
    variances, axes = eigh(np.cov(inputs_WD, rowvar=False))
    expected = (inputs_WD - inputs_WD.mean(axis=0)) @ axes[:, [-1, -2]]
    np.testing.assert_allclose(np.abs(result.coordinates), np.abs(expected), atol=1e-10)
    np.testing.assert_allclose(result.explained, variances[[-1, -2]] / variances.sum(), atol=1e-12)


def test_all_components_preserve_all_distances() -> None:
    inputs_WD = vectors(20, 5)
    result = principal_components(inputs_WD, 5)
    np.testing.assert_allclose(pdist(result.coordinates), pdist(inputs_WD), atol=1e-10)
    assert result.explained.sum() == pytest.approx(1.0)


def test_places_do_not_depend_on_shift_or_rotation() -> None:
    inputs_WD = vectors(15, 6)
    rotation, _ = np.linalg.qr(vectors(6, 6, seed=1))
    first = principal_components(inputs_WD)
    for moved in (inputs_WD + 7.0, inputs_WD @ rotation, -inputs_WD, inputs_WD * [1, 1, -1, 1, 1, 1]):
        np.testing.assert_allclose(principal_components(moved).coordinates, first.coordinates, atol=1e-9)


def test_farthest_word_is_on_the_positive_side() -> None:
    for seed in range(8):
        places = principal_components(vectors(9, 4, seed)).coordinates
        assert (places.max(axis=0) == np.abs(places).max(axis=0)).all()


def test_first_of_two_words_is_on_the_positive_side() -> None:
    for seed in range(8):
        result = principal_components(vectors(2, 4, seed))
        assert result.coordinates[0, 0] == pytest.approx(pdist(vectors(2, 4, seed))[0] / 2)
        np.testing.assert_allclose(result.coordinates[1, 0], -result.coordinates[0, 0])
        assert (result.coordinates[:, 1] == 0).all()
        np.testing.assert_allclose(result.explained, [1, 0])


@pytest.mark.parametrize("inputs_WD", [np.full((5, 3), 0.1), np.full((1, 4), 7.3), np.zeros((4, 2)), np.zeros((0, 3))])
def test_words_without_variance_are_at_the_origin(inputs_WD: np.ndarray) -> None:
    result = principal_components(inputs_WD)
    assert result.coordinates.shape == (len(inputs_WD), 2)
    assert (result.coordinates == 0).all()
    assert (result.explained == 0).all()


def test_one_dimension_has_one_component() -> None:
    result = principal_components([[1.0], [2.0], [6.0]])
    np.testing.assert_allclose(result.coordinates, [[-2, 0], [-1, 0], [3, 0]], atol=1e-12)
    np.testing.assert_allclose(result.explained, [1, 0])


@pytest.mark.parametrize("values", [[[1.0, np.nan]], [[np.inf]], [1.0, 2.0]])
def test_invalid_vectors_are_rejected(values: list[object]) -> None:
    with pytest.raises(DataError, match="finite vectors, one per word"):
        principal_components(np.array(values, dtype=np.float64))


def word_vectors(words: Vocabulary, dim: int, seed: int = 0) -> WordVectors:
    known = (*words.words, *words.spelled_words)
    return WordVectors(known, np.random.default_rng(seed).normal(size=(len(known), dim)))


def test_picture_shows_examples_and_their_neighbours_at_both_ends() -> None:
    words = vocabulary()
    ends = {"input": word_vectors(words, 8), "output": word_vectors(words, 5, seed=1)}
    result = project_words(ends, words)
    centres = select_examples(words, NUM_EXAMPLES)
    assert result.record().keys() == {"words", "groups", "input", "output"}
    assert len(result.words) == len(set(result.words)) == NUM_EXAMPLES * (NEIGHBORS_PER_WORD + 1)
    assert result.groups == tuple(n for n in range(NUM_EXAMPLES) for _ in range(NEIGHBORS_PER_WORD + 1))
    assert list(result.words[:: NEIGHBORS_PER_WORD + 1]) == centres
    near = [nearest_words(vectors_of_end, centres, 20)[centres[0]] for vectors_of_end in ends.values()]
    in_turn = [word for both in zip(*near, strict=True) for word, _ in both if word not in centres]
    assert list(result.words[1 : NEIGHBORS_PER_WORD + 1]) == in_turn[:NEIGHBORS_PER_WORD]


def test_places_are_computed_from_unit_vectors() -> None:
    words = vocabulary()
    vectors = word_vectors(vocabulary(), 8)
    result = project_words({"tied": vectors}, words)
    rows = vectors.vectors_VD[[words.id_of(word) for word in result.words]].astype(np.float64)
    expected = principal_components(rows / np.linalg.norm(rows, axis=1, keepdims=True))
    np.testing.assert_allclose(result.tied.xy, expected.coordinates, atol=6e-4)
    np.testing.assert_allclose(result.tied.explained, expected.explained, atol=6e-5)
    longer = WordVectors(vectors.words, vectors.vectors_VD * 16)
    assert project_words({"tied": longer}, words) == result


def test_picture_is_small_and_reproducible() -> None:
    words = vocabulary()
    ends = {"input": word_vectors(words, 64), "output": word_vectors(words, 64, seed=1)}
    result = json.dumps(project_words(ends, words).record())
    assert result == json.dumps(project_words(ends, words).record())
    assert len(result) < 3000
    assert "-0.0" not in json.dumps(
        project_words({"tied": WordVectors(words.words, np.ones((300, 2)))}, words).record()
    )


def test_picture_of_requested_words() -> None:
    words = vocabulary(6)
    vectors = {"tied": WordVectors(words.words, np.eye(6))}
    result = project_words(vectors, words, [words.words[2], words.words[2]])
    assert result.words[0] == words.words[2]
    assert result.groups == (0,) * (1 + NEIGHBORS_PER_WORD)
    with pytest.raises(DataError, match="'zebra' is not among these 6 words"):
        project_words(vectors, words, ["zebra"])


def test_spelled_words_are_not_in_the_picture() -> None:
    words = replace(vocabulary(30), spelled_words=("wolf", "ant"))
    result = project_words({"input": word_vectors(words, 4), "output": word_vectors(vocabulary(30), 4)}, words)
    assert not {"wolf", "ant"} & set(result.words)
    assert len(result.words) == 30


def test_vocabulary_without_alphabetic_words_gives_an_empty_picture() -> None:
    words = Vocabulary(("a", "b", "c"), (3, 2, 1))
    result = project_words({"tied": word_vectors(words, 2)}, words)
    assert result.record() == {"words": [], "groups": [], "tied": {"xy": [], "explained": [0.0, 0.0]}}
