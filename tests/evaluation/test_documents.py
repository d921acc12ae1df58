"""Where documents begin: after empty lines."""

from __future__ import annotations

import numpy as np
import pytest

from reefknot.errors import DataError
from reefknot.evaluation.documents import document_boundaries
from reefknot.text.dataset import Split
from reefknot.text.vocabulary import Vocabulary

WORDS = Vocabulary(("<eos>", "a"), (9, 5))


def boundaries(text: str) -> list[int]:
    """`a` is a word, `.` an end of line."""
    ids = np.array([WORDS.words.index("a") if letter == "a" else 0 for letter in text], dtype=np.int32)
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


def test_line_ends_must_be_tokens() -> None:
    split = Split("test", np.array([0], dtype=np.int32), words=1, lines=1, bytes=2, unknown=0)
    with pytest.raises(DataError, match="compare by blocks"):
        document_boundaries(split, Vocabulary(("a",), (1,)))
