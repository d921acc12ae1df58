"""Look up words as people write them: in either case, or as whole words among sub-words. Suggest similar spellings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from reefknot.errors import DataError, shortened
from reefknot.nn.constants import END_OF_LINE, END_OF_WORD, PADDING, START, UNKNOWN
from reefknot.vectors.word_vectors import WordVectors

_SYMBOLS = (UNKNOWN, END_OF_LINE, START, PADDING)
_MAX_LENGTH = 40  # characters; longer input is not a misspelled word
_MAX_LENGTH_DIFFERENCE = 2  # characters, between a misspelled word and a suggestion


@dataclass(frozen=True)
class Lookup:
    """Looks up a word as it is written, then in lower case.

    If the vectors belong to sub-words, a word has a vector only if a single sub-word is the whole word: "car" is
    `car</w>`, not the `car` at the start of "carpet". If it is not known whether they belong to sub-words, the plain
    word is tried first, then the sub-word.

    Args:
        vectors: The vectors to look words up in.
    """

    vectors: WordVectors

    def find(self, word: str) -> int | None:
        """Return the row of a word, or None if it has no vector."""
        for spelling in (word, word.lower()):
            for token in (as_subword(spelling),) if self.vectors.subwords else (spelling, as_subword(spelling)):
                if token in self.vectors:
                    return self.vectors.id_of(token)
        return None

    def require(self, words: Sequence[str], where: str) -> list[int]:
        """Return the rows of the words. Words without a vector raise a DataError that suggests similar spellings.

        Args:
            words: The words to look up.
            where: The name of the vectors in the error message.
        """
        rows = {word: self.find(word) for word in words}
        unknown = [word for word, row in rows.items() if row is None]
        if not unknown:
            return [row for word in words if (row := rows[word]) is not None]
        if self.vectors.subwords:
            whole_words = [word.removesuffix(END_OF_WORD) for word in self.vectors.words if word.endswith(END_OF_WORD)]
            raise unknown_words_error(unknown, whole_words, f"{where} as a single sub-word")
        raise unknown_words_error(unknown, self.vectors.words, where)


def as_subword(word: str) -> str:
    """Return the sub-word that is a whole word: `car</w>` for `car`. Symbols such as `<eos>` are returned unchanged."""
    return word if word in _SYMBOLS or word.endswith(END_OF_WORD) else f"{word}{END_OF_WORD}"


def unknown_words_error(unknown: Sequence[str], words: Sequence[str], where: str) -> DataError:
    """Return the error for words that are missing from a vocabulary, with suggestions.

    Args:
        unknown: The missing words.
        words: The words of the vocabulary.
        where: The name of the vocabulary's owner in the message.
    """
    described = []
    for word in dict.fromkeys(unknown):
        suggestions = suggest_spellings(word, words)
        described.append(shortened(word) + (f" (did you mean {' or '.join(suggestions)}?)" if suggestions else ""))
    return DataError(f"not in the vocabulary of {where}: {', '.join(described)}")


def suggest_spellings(word: str, words: Sequence[str]) -> list[str]:
    """Return up to two of the words with a similar spelling.

    Only words with the same first letter and about the same length are compared, because there may be millions.
    """
    if not word or len(word) > _MAX_LENGTH:
        return []
    lowered = word.lower()
    candidates: dict[str, str] = {}
    for known in words:
        if known[:1].lower() == lowered[0] and abs(len(known) - len(word)) <= _MAX_LENGTH_DIFFERENCE:
            candidates.setdefault(known.lower(), known)
    return [candidates[match] for match in get_close_matches(lowered, candidates, n=2, cutoff=0.75)]
