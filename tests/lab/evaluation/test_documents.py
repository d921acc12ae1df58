"""Documents begin at headings, or after empty lines."""

from __future__ import annotations

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.lab.evaluation.documents import document_boundaries
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import BPESettings, VocabularySettings

WORDS = Vocabulary(("<eos>", "a", "="), (9, 5, 3))
IDS = {".": 0, "a": 1, "=": 2}


def boundaries(text: str) -> list[int]:
    """Return the document boundaries of a text where `a` and `=` are words and `.` is an end of line."""
    ids = np.array([IDS[letter] for letter in text], dtype=np.int32)
    split = Split("test", ids, words=text.count("a"), lines=text.count("."), bytes=len(text), unknown=0)
    return [int(boundary) for boundary in document_boundaries(split, WORDS)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aa.a.", [0, 5]),
        ("a..a.", [0, 3, 5]),
        ("a...aa..a.", [0, 4, 8, 10]),
        (".a.", [0, 1, 3]),
        ("a..", [0, 3]),
        ("...", [0, 3]),
        ("a", [0, 1]),
        ("a.a..aa", [0, 5, 7]),
    ],
)
def test_documents_begin_after_empty_lines(text: str, expected: list[int]) -> None:
    assert boundaries(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (".=a=..a.", [0, 1, 8]),
        (".=a=..aa..==a==..a..=aa=..a.", [0, 1, 20, 28]),
        ("=a=.a..a.", [0, 9]),
        ("==a==..a.", [0, 7, 9]),
        ("a=a.=..a", [0, 7, 8]),
        ("=a=", [0, 3]),
    ],
)
def test_articles_begin_at_their_headings(text: str, expected: list[int]) -> None:
    """Section headings have two marks on each side; a text without article headings is split at empty lines."""
    assert boundaries(text) == expected


def test_heading_in_sub_words_is_recognised() -> None:
    """A mark that is a word is another sub-word than a mark inside a word."""
    settings = VocabularySettings(bpe=BPESettings(merges=2))
    words = Vocabulary.from_counts({"=": 4, "aa": 5, "a=a": 2, "<eos>": 9}, settings)
    assert words.eos is not None
    lines = [["=", "aa", "="], [], ["aa", "a=a"], [], ["=", "a=a", "aa", "="], ["aa"]]
    ids = np.array([index for line in lines for index in [*words.encode(line), words.eos]], dtype=np.int32)
    split = Split("test", ids, words=10, lines=len(lines), bytes=len(ids), unknown=0)
    before = sum(len(words.encode(line)) + 1 for line in lines[:4])
    assert document_boundaries(split, words).tolist() == [0, before, len(ids)]


def test_documents_need_eos() -> None:
    split = Split("test", np.array([0], dtype=np.int32), words=1, lines=1, bytes=2, unknown=0)
    with pytest.raises(DataError, match="--by blocks"):
        document_boundaries(split, Vocabulary(("a",), (1,)))
