"""Nearest neighbours against cosines computed in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from reefknot.errors import DataError
from reefknot.lab.evaluation.neighbors import nearest_neighbors, select_examples
from reefknot.lab.text.vocabulary import Vocabulary


def vocabulary(size: int) -> Vocabulary:
    return Vocabulary(tuple(f"w{index:03d}" for index in range(size)), tuple(range(size, 0, -1)))


def test_neighbours_equal_brute_force() -> None:
    torch.manual_seed(0)
    words = vocabulary(50)
    vectors_VD = torch.randn(50, 6)
    neighbors = nearest_neighbors(vectors_VD, words, ["w007", "w031"], 5)
    v = vectors_VD.double().numpy()
    cosines = (v @ v.T) / np.outer(np.linalg.norm(v, axis=1), np.linalg.norm(v, axis=1))
    for word, index in (("w007", 7), ("w031", 31)):
        order = [i for i in np.argsort(-cosines[index]) if i != index][:5]
        assert [name for name, _ in neighbors[word]] == [words.words[i] for i in order]
        assert [value for _, value in neighbors[word]] == pytest.approx([cosines[index, i] for i in order], abs=1e-4)


def test_there_are_no_more_neighbours_than_other_words() -> None:
    assert len(nearest_neighbors(torch.randn(4, 2), vocabulary(4), ["w000"], 100)["w000"]) == 3


def test_word_is_never_its_own_neighbour() -> None:
    neighbors = nearest_neighbors(torch.ones(3, 2), vocabulary(3), ["w001"], 2)
    assert {name for name, _ in neighbors["w001"]} == {"w000", "w002"}
    assert {value for _, value in neighbors["w001"]} == {1.0}


def test_spelled_word_has_neighbours_but_is_not_a_neighbour() -> None:
    words = replace(vocabulary(3), spelled_words=("wolf", "ant"))
    vectors_SD = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    neighbors = nearest_neighbors(vectors_SD, words, ["wolf", "w001"], 9)
    assert list(neighbors["wolf"]) == [("w001", 1.0), ("w002", pytest.approx(0.5**0.5, abs=1e-4)), ("w000", 0.0)]
    assert [name for name, _ in neighbors["w001"]] == ["w002", "w000"]


def test_zero_vector_has_cosine_zero() -> None:
    vectors_VD = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    assert [value for _, value in nearest_neighbors(vectors_VD, vocabulary(3), ["w001"], 2)["w001"]] == [0.0, 0.0]


def test_no_words_give_no_neighbours() -> None:
    assert nearest_neighbors(torch.randn(4, 2), vocabulary(4), [], 3) == {}


def test_unknown_word_is_rejected_without_unk() -> None:
    with pytest.raises(DataError, match="'zebra' is not in the vocabulary"):
        nearest_neighbors(torch.randn(4, 2), vocabulary(4), ["zebra"], 2)


def test_examples_are_frequent_alphabetic_words() -> None:
    words = ("<eos>", "the", "return", "value", "1234", "string", "seldom")
    chosen = select_examples(Vocabulary(words, (900, 800, 700, 600, 500, 400, 19)), 8)
    assert chosen == ["return", "value", "string"]


@pytest.mark.parametrize("usable", [8, 9, 12, 30, 5_000])
def test_examples_spread_over_the_ranks(usable: int) -> None:
    suffixes = [chr(ord("a") + i % 26) + chr(ord("a") + i // 26 % 26) + chr(ord("a") + i // 676) for i in range(usable)]
    words = Vocabulary(tuple(f"word{suffix}" for suffix in suffixes), tuple(range(usable + 20, 20, -1)))
    chosen = select_examples(words, 8)
    assert 5 <= len(chosen) <= 8
    assert len(set(chosen)) == len(chosen)
    assert chosen[-1] == words.words[-1]
