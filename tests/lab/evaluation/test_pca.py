"""Principal components against scipy's eigenvectors of the covariance and its distances, and what result.json gets."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.linalg import eigh
from scipy.spatial.distance import pdist

from reefknot.errors import DataError
from reefknot.lab.evaluation.neighbors import examples, nearest_words
from reefknot.lab.evaluation.pca import AROUND, EXAMPLES, embedding, principal_components
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.vectors.word_vectors import WordVectors


def vectors(words: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(words, width)) * np.linspace(1, 3, width)


def vocabulary(size: int = 300) -> Vocabulary:
    letters = "abcdefghijklmnopqrst"
    words = (f"word{letters[n // 400]}{letters[n // 20 % 20]}{letters[n % 20]}" for n in range(size))
    return Vocabulary(tuple(words), tuple(range(size + 20, 20, -1)))


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (3, 2)])
def test_components_are_eigenvectors_of_the_covariance(shape: tuple[int, int]) -> None:
    x_WD = vectors(*shape)
    found = principal_components(x_WD)
    variances, axes = eigh(np.cov(x_WD, rowvar=False))
    expected = (x_WD - x_WD.mean(axis=0)) @ axes[:, [-1, -2]]
    np.testing.assert_allclose(np.abs(found.places), np.abs(expected), atol=1e-10)
    np.testing.assert_allclose(found.explained, variances[[-1, -2]] / variances.sum(), atol=1e-12)


def test_all_components_keep_all_distances() -> None:
    x_WD = vectors(20, 5)
    found = principal_components(x_WD, 5)
    np.testing.assert_allclose(pdist(found.places), pdist(x_WD), atol=1e-10)
    assert found.explained.sum() == pytest.approx(1.0)


def test_a_picture_does_not_depend_on_where_vectors_are_or_how_they_are_turned() -> None:
    x_WD = vectors(15, 6)
    turn, _ = np.linalg.qr(vectors(6, 6, seed=1))
    first = principal_components(x_WD)
    for moved in (x_WD + 7.0, x_WD @ turn, -x_WD, x_WD * [1, 1, -1, 1, 1, 1]):
        np.testing.assert_allclose(principal_components(moved).places, first.places, atol=1e-9)


def test_the_farthest_word_lies_on_the_positive_side() -> None:
    for seed in range(8):
        places = principal_components(vectors(9, 4, seed)).places
        assert (places.max(axis=0) == np.abs(places).max(axis=0)).all()


def test_of_two_words_the_first_lies_on_the_positive_side() -> None:
    for seed in range(8):
        found = principal_components(vectors(2, 4, seed))
        assert found.places[0, 0] == pytest.approx(pdist(vectors(2, 4, seed))[0] / 2)
        np.testing.assert_allclose(found.places[1, 0], -found.places[0, 0])
        assert (found.places[:, 1] == 0).all()
        np.testing.assert_allclose(found.explained, [1, 0])


@pytest.mark.parametrize("x_WD", [np.full((5, 3), 0.1), np.full((1, 4), 7.3), np.zeros((4, 2)), np.zeros((0, 3))])
def test_without_variance_all_words_lie_in_the_middle(x_WD: np.ndarray) -> None:
    found = principal_components(x_WD)
    assert found.places.shape == (len(x_WD), 2)
    assert (found.places == 0).all()
    assert (found.explained == 0).all()


def test_width_one_has_one_component() -> None:
    found = principal_components([[1.0], [2.0], [6.0]])
    np.testing.assert_allclose(found.places, [[-2, 0], [-1, 0], [3, 0]], atol=1e-12)
    np.testing.assert_allclose(found.explained, [1, 0])


@pytest.mark.parametrize("bad", [[[1.0, np.nan]], [[np.inf]], [1.0, 2.0]])
def test_what_has_no_components_is_refused(bad: list[object]) -> None:
    with pytest.raises(DataError, match="finite vectors, one per word"):
        principal_components(np.array(bad, dtype=np.float64))


def word_vectors(words: Vocabulary, width: int, seed: int = 0) -> WordVectors:
    known = (*words.words, *words.spelled)
    return WordVectors(known, np.random.default_rng(seed).normal(size=(len(known), width)))


def test_words_are_the_examples_and_their_neighbours_at_either_end() -> None:
    words = vocabulary()
    ends = {"input": word_vectors(words, 8), "output": word_vectors(words, 5, seed=1)}
    found = embedding(ends, words)
    middles = examples(words, EXAMPLES)
    assert found.record().keys() == {"words", "groups", "input", "output"}
    assert len(found.words) == len(set(found.words)) == EXAMPLES * (AROUND + 1)
    assert found.groups == tuple(n for n in range(EXAMPLES) for _ in range(AROUND + 1))
    assert list(found.words[:: AROUND + 1]) == middles
    near = [nearest_words(each, middles, 20)[middles[0]] for each in ends.values()]
    in_turn = [word for both in zip(*near, strict=True) for word, _ in both if word not in middles]
    assert list(found.words[1 : AROUND + 1]) == in_turn[:AROUND]


def test_places_are_those_of_vectors_of_length_one() -> None:
    words, vectors = vocabulary(), word_vectors(vocabulary(), 8)
    found = embedding({"tied": vectors}, words)
    rows = vectors.vectors_VD[[words.id_of(word) for word in found.words]].astype(np.float64)
    expected = principal_components(rows / np.linalg.norm(rows, axis=1, keepdims=True))
    np.testing.assert_allclose(found.tied.xy, expected.places, atol=6e-4)
    np.testing.assert_allclose(found.tied.explained, expected.explained, atol=6e-5)
    longer = WordVectors(vectors.words, vectors.vectors_VD * 16)
    assert embedding({"tied": longer}, words) == found


def test_a_finding_is_small_and_the_same_every_time() -> None:
    words = vocabulary()
    ends = {"input": word_vectors(words, 64), "output": word_vectors(words, 64, seed=1)}
    found = json.dumps(embedding(ends, words).record())
    assert found == json.dumps(embedding(ends, words).record())
    assert len(found) < 3000
    assert "-0.0" not in json.dumps(embedding({"tied": WordVectors(words.words, np.ones((300, 2)))}, words).record())


def test_words_that_were_asked_for() -> None:
    words = vocabulary(6)
    vectors = {"tied": WordVectors(words.words, np.eye(6))}
    found = embedding(vectors, words, [words.words[2], words.words[2]])
    assert found.words[0] == words.words[2]
    assert found.groups == (0,) * (1 + AROUND)
    with pytest.raises(DataError, match="'zebra' is not among these 6 words"):
        embedding(vectors, words, ["zebra"])


def test_words_that_are_only_spelled_are_in_no_picture() -> None:
    words = replace(vocabulary(30), spelled=("wolf", "ant"))
    found = embedding({"input": word_vectors(words, 4), "output": word_vectors(vocabulary(30), 4)}, words)
    assert not {"wolf", "ant"} & set(found.words)
    assert len(found.words) == 30


def test_a_vocabulary_without_ordinary_words_gives_an_empty_picture() -> None:
    words = Vocabulary(("a", "b", "c"), (3, 2, 1))
    found = embedding({"tied": word_vectors(words, 2)}, words)
    assert found.record() == {"words": [], "groups": [], "tied": {"xy": [], "explained": [0.0, 0.0]}}
