"""Check the contents of a vocabulary file (`vocabulary.json`) before `Vocabulary.load` uses them.

`find_problem` returns a message such as "a word occurs twice", or None if the contents are valid. `Vocabulary.save`
documents the format of the file. The checks are fast even for millions of words.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

_REQUIRED_KEYS = {"format", "words", "counts"}
_OPTIONAL_KEYS = {"spelled", "tokenizer", "unknown", "split", "ordered"}


def find_problem(contents: dict[str, Any]) -> str | None:
    """Return why the contents of a file are not a vocabulary, or None if they are."""
    if contents.keys() - _OPTIONAL_KEYS != _REQUIRED_KEYS or contents["format"] != 1:
        return "it must hold format 1, words and counts"
    words = contents["words"]
    counts = contents["counts"]

    problem = _find_word_problem(words, counts)
    if problem is None:
        problem = _find_order_problem(words, counts, contents.get("ordered", True))
    if problem is None:
        problem = _find_spelling_problem(words, contents.get("spelled", []))
    if problem is None:
        problem = _find_split_problem(contents.get("split", {}))
    return problem


def _find_word_problem(words: Any, counts: Any) -> str | None:
    if not isinstance(words, list) or not isinstance(counts, list) or not words:
        return "it has no words"
    if len(words) != len(counts):
        return f"{len(words)} words but {len(counts)} counts"
    if not _are_strings(words):
        return "a word is not a valid string"
    if set(map(type, counts)) != {int} or min(counts) < 0:
        return "a count is not a whole number from 0"
    if len(set(words)) != len(words):
        return "a word occurs twice"
    return None


def _find_order_problem(words: list[str], counts: list[int], ordered: Any) -> str | None:
    if not isinstance(ordered, bool):
        return "ordered is neither true nor false"
    if not ordered:
        return None
    for (word, count), (next_word, next_count) in pairwise(zip(words, counts, strict=True)):
        if count < next_count or (count == next_count and word > next_word):
            return "the words are not in order of frequency"
    return None


def _find_spelling_problem(words: list[str], spelled_words: Any) -> str | None:
    if not isinstance(spelled_words, list) or not _are_strings(spelled_words):
        return "a word in `spelled` is not a valid string"
    if len({*words, *spelled_words}) != len(words) + len(spelled_words):
        return "a word in `spelled` occurs twice"
    return None


def _find_split_problem(split_words: Any) -> str | None:
    if not isinstance(split_words, dict) or not set(map(type, split_words.values())) <= {int}:
        return "`split` does not give a count for each word"
    return None


def _are_strings(values: list[Any]) -> bool:
    """Return whether all values are strings that can be written to a file."""
    return set(map(type, values)) <= {str} and _is_unicode(values)


def _is_unicode(words: list[str]) -> bool:
    """Return whether all words can be encoded. JSON may contain lone surrogates, which cannot be written to a file."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return False
    return True
