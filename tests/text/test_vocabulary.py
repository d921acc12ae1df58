"""The vocabulary: its order, its limits, its policies and its file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from reefknot.errors import DataError
from reefknot.text.vocabulary import Vocabulary, VocabularySettings

COUNTS = {"the": 5, "<eos>": 4, "cat": 2, "bird": 2, "fish": 1, "ant": 1}


def vocabulary(counts: dict[str, int] = COUNTS, **settings: object) -> Vocabulary:
    return Vocabulary.from_counts(counts, VocabularySettings.model_validate(settings))


def test_words_are_in_order_of_frequency_then_of_characters() -> None:
    made = vocabulary()
    assert made.words == ("the", "<eos>", "bird", "cat", "ant", "fish", "<unk>")
    assert made.counts == (5, 4, 2, 2, 1, 1, 0)
    assert (made.eos, made.unk) == (1, 6)


@pytest.mark.parametrize(
    ("settings", "words", "unknown"),
    [
        ({"min_count": 2}, ("the", "<eos>", "<unk>", "bird", "cat"), 2),
        ({"max_size": 4}, ("the", "<eos>", "<unk>", "bird"), 4),
        ({"min_count": 3, "max_size": 4}, ("<unk>", "the", "<eos>"), 6),
        ({"min_count": 2, "max_size": 3}, ("<unk>", "the", "<eos>"), 6),
    ],
)
def test_unknown_takes_the_place_of_what_it_replaces(
    settings: dict[str, int], words: tuple[str, ...], unknown: int
) -> None:
    made = vocabulary(**settings)
    assert made.words == words
    assert made.counts[made.id_of("never seen")] == unknown
    assert sum(made.counts) == sum(COUNTS.values())


def test_literal_unknowns_count_too() -> None:
    made = vocabulary({**COUNTS, "<unk>": 3}, min_count=2)
    assert dict(zip(made.words, made.counts, strict=True))["<unk>"] == 5


def test_refusing_needs_no_unknown_unless_the_text_has_it() -> None:
    assert vocabulary(unknown="refuse").unk is None
    with_unknown = vocabulary({**COUNTS, "<unk>": 3}, unknown="refuse")
    assert with_unknown.words[2] == "<unk>"
    with pytest.raises(DataError, match="'wolf' is not in the vocabulary"):
        with_unknown.encode(["the", "wolf"], "refuse")


def test_end_of_line_is_there_when_asked_for_even_if_never_seen() -> None:
    assert vocabulary({"a": 1}).words == ("a", "<eos>", "<unk>")
    assert vocabulary({"a": 1}, end_of_line=False).eos is None


def test_encode_and_decode() -> None:
    made = vocabulary()
    assert made.encode(["the", "wolf", "cat"]) == [0, 6, 3]
    assert made.decode([0, 6, 3]) == ["the", "<unk>", "cat"]
    assert "cat" in made
    assert "wolf" not in made
    assert len(made) == 7
    with pytest.raises(DataError, match="'wolf' is not in the vocabulary"):
        vocabulary(unknown="refuse").id_of("wolf")


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 2**62)))
def test_any_word_survives_the_file(tmp_path_factory: pytest.TempPathFactory, counts: dict[str, int]) -> None:
    path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.json"
    made = Vocabulary.from_counts(counts, VocabularySettings())
    made.save(path)
    assert Vocabulary.load(path) == made
    assert Vocabulary.load(path).fingerprint == made.fingerprint


def test_fingerprint_tells_words_and_counts_apart() -> None:
    different = [vocabulary(), vocabulary({**COUNTS, "cat": 3}), vocabulary({**COUNTS, "wolf": 1})]
    assert len({made.fingerprint for made in different}) == 3
    assert vocabulary().fingerprint == vocabulary(dict(reversed(COUNTS.items()))).fingerprint


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (b"", "is torn or no JSON"),
        (b"\x80\x04]\x94.", "is torn or no JSON"),
        (b'{"format": 1, "words": ["a"', "is torn or no JSON"),
        (b"[" * 100_000, "is torn or no JSON"),
        (b'["a"]', "holds no JSON object"),
        ({"format": 2, "words": ["a"], "counts": [1]}, "must hold format 1, words and counts"),
        ({"format": 1, "words": ["a"]}, "must hold format 1, words and counts"),
        ({"format": 1, "words": ["a"], "counts": [1], "more": 1}, "must hold format 1, words and counts"),
        ({"format": 1, "words": "a", "counts": [1]}, "no words"),
        ({"format": 1, "words": ["a"], "counts": {"a": 1}}, "no words"),
        ({"format": 1, "words": ["a"], "counts": ["1"]}, "a count is no whole number"),
        ({"format": 1, "words": ["a"], "counts": [-1]}, "a count is no whole number"),
        ({"format": 1, "words": ["a"], "counts": [True]}, "a count is no whole number"),
        ({"format": 1, "words": ["a"], "counts": [1.0]}, "a count is no whole number"),
        ({"format": 1, "words": [1], "counts": [1]}, "a word is no text"),
        ({"format": 1, "words": ["\ud800"], "counts": [1]}, "a word is no text"),
        ({"format": 1, "words": ["a", "b"], "counts": [1]}, "2 words but 1 counts"),
        ({"format": 1, "words": ["a", "a"], "counts": [1, 1]}, "twice"),
        ({"format": 1, "words": ["a", "b", "a"], "counts": [3, 2, 1]}, "twice"),
        ({"format": 1, "words": ["a", "b"], "counts": [1, 2]}, "not in order"),
        ({"format": 1, "words": ["b", "a"], "counts": [1, 1]}, "not in order"),
        ({"format": 1, "words": [], "counts": []}, "no words"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_refused(stored: object, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.json"
    path.write_bytes(stored if isinstance(stored, bytes) else json.dumps(stored).encode())
    with pytest.raises(DataError, match=rf"vocabulary\.json .*{problem}"):
        Vocabulary.load(path)


def test_an_absent_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocabulary\.json is missing"):
        Vocabulary.load(tmp_path / "vocabulary.json")


@pytest.mark.parametrize("bad", [{"min_count": 0}, {"max_size": 2}, {"unknown": "drop"}, {"end_of_line": "yes"}])
def test_settings_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        VocabularySettings.model_validate(bad)


@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=1),
    st.integers(1, 4),
    st.none() | st.integers(3, 8),
)
def test_no_token_is_lost(tokens: list[str], min_count: int, max_size: int | None) -> None:
    settings = VocabularySettings(min_count=min_count, max_size=max_size)
    made = Vocabulary.from_counts(Counter(tokens), settings)
    assert sum(made.counts) == len(tokens)
    assert max_size is None or len(made) <= max_size
    encoded = Counter(made.decode(made.encode(tokens)))
    assert {word: count for word, count in zip(made.words, made.counts, strict=True) if count} == encoded
