"""Looking up words as people write them."""

from __future__ import annotations

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.vectors.lookup import Lookup, suggest_spellings
from reefknot.vectors.word_vectors import WordVectors


def lookup(*words: str, subwords: bool = False) -> Lookup:
    return Lookup(WordVectors(words, np.eye(len(words), dtype=np.float32), subwords=subwords))


def test_word_is_looked_up_as_written_then_in_lower_case() -> None:
    words = lookup("turkey", "Turkey", "paris")
    assert [words.find(word) for word in ("Turkey", "turkey", "Paris", "PARIS", "rome")] == [1, 0, 2, 2, None]
    assert lookup("Paris").find("paris") is None


def test_among_sub_words_only_whole_words_are_found() -> None:
    words = lookup("<unk>", "car", "car</w>", "pet</w>", "mount", subwords=True)
    assert [words.find(word) for word in ("car", "Car", "pet", "car</w>", "<unk>")] == [2, 2, 3, 2, 0]
    assert words.find("mount") is None
    with pytest.raises(DataError, match=r"^not in the vocabulary of x as a single sub-word: mount$"):
        words.require(["car", "mount"], "x")


def test_plain_words_are_found_next_to_end_of_word_marks() -> None:
    words = lookup("king", "Queen", "html</w>", "queen</w>")
    queries = ("king", "King", "Queen", "queen", "html", "HTML", "html</w>", "pear")
    assert [words.find(word) for word in queries] == [0, 0, 1, 3, 2, 2, 2, None]
    with pytest.raises(DataError, match=r"^not in the vocabulary of x: kin \(did you mean king\?\)$"):
        words.require(["kin"], "x")


def test_rows_are_in_the_order_of_the_words_with_repetitions() -> None:
    assert lookup("a", "b").require(["b", "a", "b"], "x") == [1, 0, 1]


def test_unknown_word_is_reported_with_similar_spellings() -> None:
    words = lookup("queen", "king", "Kingdom", "<eos>")
    with pytest.raises(DataError, match=r"^not in the vocabulary of f: quen \(did you mean queen\?\), zebra$"):
        words.require(["quen", "zebra", "king", "quen"], "f")
    with pytest.raises(DataError, match=r"kingdom \(did you mean Kingdom\?\)"):
        words.require(["kingdom"], "f")


@pytest.mark.parametrize("word", ["", "x" * 10_000, "\n"])
def test_nonsense_has_no_similar_spelling(word: str) -> None:
    assert suggest_spellings(word, ["x", "xy"]) == []


def test_unknown_word_message_is_short_and_printable() -> None:
    with pytest.raises(DataError) as caught:
        lookup("a").require(["\x1b[31m", "y" * 5000], "f")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 300
