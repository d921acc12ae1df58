"""`WordVectors`: look-up, unit vectors, selection and validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.vectors.word_vectors import WordVectors

THREE = np.array([[3.0, 4.0], [0.0, 0.0], [-1.0, 0.0]], dtype=np.float32)


def test_words_are_looked_up_and_unknown_words_are_rejected() -> None:
    vectors = WordVectors(("a", "b c", ""), THREE)
    assert (len(vectors), vectors.dim) == (3, 2)
    assert "b c" in vectors
    assert "c" not in vectors
    assert vectors.id_of("") == 2
    assert vectors.vector("a").tolist() == [3.0, 4.0]
    with pytest.raises(DataError, match="'z' is not among these 3 words"):
        vectors.vector("z")


def test_unit_vectors_have_length_one_and_zero_vectors_stay_zero() -> None:
    vectors = WordVectors(("a", "b", "c"), THREE)
    np.testing.assert_allclose(vectors.unit_VD, [[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]])
    assert vectors.unit_VD is vectors.unit_VD
    assert vectors.vectors_VD.tolist() == THREE.tolist()


def test_unit_vectors_are_correct_for_lengths_outside_float32() -> None:
    vectors = WordVectors(("large", "small"), np.array([[3e38, 3e38], [1e-44, 0.0]], dtype=np.float32))
    np.testing.assert_allclose(np.linalg.norm(vectors.unit_VD.astype(np.float64), axis=1), [1.0, 1.0])


def test_select_keeps_the_given_order_and_the_counts() -> None:
    vectors = WordVectors(("a", "b", "c"), THREE, np.array([5, 3, 1]), subwords=True)
    selected = vectors.select(["c", "a"])
    assert selected.subwords
    assert selected.words == ("c", "a")
    assert selected.vectors_VD.tolist() == [[-1.0, 0.0], [3.0, 4.0]]
    assert selected.counts is not None
    assert selected.counts.tolist() == [1, 5]
    assert len(vectors.select([])) == 0
    with pytest.raises(DataError, match="'d' is not among"):
        vectors.select(["a", "d"])


@pytest.mark.parametrize(
    ("words", "rows", "counts", "message"),
    [
        (("a", "b", "a"), THREE, None, "'a' occurs twice"),
        (("a", "b"), THREE, None, r"2 words need a matrix with 2 rows .* \(3, 2\)"),
        (("a", "b", "c"), THREE[:, 0], None, "at least one column"),
        (("a", "b", "c"), THREE[:, :0], None, "at least one column"),
        (("a", "b", "c"), THREE.astype(int), None, "floating-point"),
        (("a", "b\t", "c"), THREE * [[1], [np.nan], [1]], None, r"the vector of 'b\\t' contains NaN"),
        (("a", "b", "c"), THREE.astype(np.float64) * 1e39, None, "the vector of 'a' contains NaN or infinity"),
        (("a", "b", 3), THREE, None, "must all be strings"),
        (("a", "b", "\ud800"), THREE, None, "lone surrogate"),
        (("a", "b", "c"), THREE, np.array([1, 2]), "3 integer counts"),
        (("a", "b", "c"), THREE, np.array([1.0, 2.0, 3.0]), "3 integer counts, not float64"),
        (("a", "b", "c"), THREE, np.array([1, -2, 3]), "the count of 'b' is -2"),
    ],
)
def test_invalid_word_vectors_are_rejected(words: Any, rows: Any, counts: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        WordVectors(words, rows, counts)
