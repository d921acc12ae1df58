"""Words and a vector for each, in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.vectors.word_vectors import WordVectors

THREE = np.array([[3.0, 4.0], [0.0, 0.0], [-1.0, 0.0]], dtype=np.float32)


def test_words_are_found_and_others_are_refused_by_name() -> None:
    vectors = WordVectors(("a", "b c", ""), THREE)
    assert (len(vectors), vectors.dim) == (3, 2)
    assert "b c" in vectors
    assert "c" not in vectors
    assert vectors.id_of("") == 2
    assert vectors.vector("a").tolist() == [3.0, 4.0]
    with pytest.raises(DataError, match="'z' is not among these 3 words"):
        vectors.vector("z")


def test_unit_vectors_have_length_one_and_a_zero_row_stays() -> None:
    vectors = WordVectors(("a", "b", "c"), THREE)
    np.testing.assert_allclose(vectors.unit_VD, [[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]])
    assert vectors.unit_VD is vectors.unit_VD
    assert vectors.vectors_VD.tolist() == THREE.tolist()


def test_lengths_beyond_float32_are_no_matter() -> None:
    vectors = WordVectors(("large", "small"), np.array([[3e38, 3e38], [1e-44, 0.0]], dtype=np.float32))
    np.testing.assert_allclose(np.linalg.norm(vectors.unit_VD.astype(np.float64), axis=1), [1.0, 1.0])


def test_a_selection_has_its_own_order_and_counts() -> None:
    vectors = WordVectors(("a", "b", "c"), THREE, np.array([5, 3, 1]), pieces=True)
    chosen = vectors.select(["c", "a"])
    assert chosen.pieces
    assert chosen.words == ("c", "a")
    assert chosen.vectors_VD.tolist() == [[-1.0, 0.0], [3.0, 4.0]]
    assert chosen.counts is not None
    assert chosen.counts.tolist() == [1, 5]
    assert len(vectors.select([])) == 0
    with pytest.raises(DataError, match="'d' is not among"):
        vectors.select(["a", "d"])


@pytest.mark.parametrize(
    ("words", "rows", "counts", "sentence"),
    [
        (("a", "b", "a"), THREE, None, "'a' stands twice"),
        (("a", "b"), THREE, None, r"2 words need as many rows .* \(3, 2\)"),
        (("a", "b", "c"), THREE[:, 0], None, "at least one number wide"),
        (("a", "b", "c"), THREE[:, :0], None, "at least one number wide"),
        (("a", "b", "c"), THREE.astype(int), None, "floating-point"),
        (("a", "b\t", "c"), THREE * [[1], [np.nan], [1]], None, r"the vector of 'b\\t' holds NaN"),
        (("a", "b", "c"), THREE.astype(np.float64) * 1e39, None, "the vector of 'a' holds NaN or an infinity"),
        (("a", "b", 3), THREE, None, "no text"),
        (("a", "b", "\ud800"), THREE, None, "half a character"),
        (("a", "b", "c"), THREE, np.array([1, 2]), "as many counts"),
        (("a", "b", "c"), THREE, np.array([1.0, 2.0, 3.0]), "whole numbers"),
        (("a", "b", "c"), THREE, np.array([1, -2, 3]), "'b' was seen -2 times"),
    ],
)
def test_what_is_no_word_vectors_is_refused_in_a_sentence(words: Any, rows: Any, counts: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        WordVectors(words, rows, counts)
