"""Look up words as people type them, and suggest similar spellings for unknown words.

    lookup = Lookup(vectors)
    lookup.find("House")        # the row of "House" in the matrix of vectors, or of "house", or None

`Lookup` also finds whole words if the vectors belong to sub-words (parts of words from byte-pair encoding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from reefknot.errors import DataError, shorten
from reefknot.nn.constants import END_OF_LINE, END_OF_WORD, PADDING, START, UNKNOWN
from reefknot.vectors.word_vectors import WordVectors

_SYMBOLS = (UNKNOWN, END_OF_LINE, START, PADDING)  # tokens that are not words
_MAX_LENGTH = 40  # characters; longer input is not a misspelled word
_MAX_LENGTH_DIFFERENCE = 2  # characters, between a misspelled word and a suggestion


@dataclass(frozen=True)
class Lookup:
    """Looks up a word as it is written, then in lower case: "House" finds "house" if there is no "House".

    If the vectors belong to sub-words, a word has a vector only if a single sub-word is the whole word: "car" is
    `car</w>`, not the `car` at the start of "carpet". If it is not known whether they belong to sub-words, the plain
    word is tried first, then the sub-word.

    Args:
        vectors: The vectors to look words up in.
    """

    vectors: WordVectors

    def find(self, word: str) -> int | None:
        """Return the row of a word in `vectors.vectors_VD`, or None if the word has no vector."""
        for spelling in (word, word.lower()):
            if self.vectors.subwords:
                candidates = [as_subword(spelling)]
            else:
                candidates = [spelling, as_subword(spelling)]
            for candidate in candidates:
                if candidate in self.vectors:
                    return self.vectors.id_of(candidate)
        return None

    def require(self, words: Sequence[str], vectors_name: str) -> list[int]:
        """Return the row of each word in `vectors.vectors_VD`.

        Words without a vector raise a DataError that suggests similar spellings.

        Args:
            words: The words to look up.
            vectors_name: The name of the vectors in the error message.
        """
        rows: list[int] = []
        unknown_words: list[str] = []
        for word in words:
            row = self.find(word)
            if row is None:
                unknown_words.append(word)
            else:
                rows.append(row)
        if not unknown_words:
            return rows

        if self.vectors.subwords:
            whole_words = [word.removesuffix(END_OF_WORD) for word in self.vectors.words if word.endswith(END_OF_WORD)]
            raise unknown_words_error(unknown_words, whole_words, f"{vectors_name} as a single sub-word")
        raise unknown_words_error(unknown_words, self.vectors.words, vectors_name)


def as_subword(word: str) -> str:
    """Return the sub-word that is a whole word: `car</w>` for `car`. Symbols such as `<eos>` are returned unchanged."""
    if word in _SYMBOLS or word.endswith(END_OF_WORD):
        return word
    return f"{word}{END_OF_WORD}"


def unknown_words_error(unknown_words: Sequence[str], vocabulary: Sequence[str], owner: str) -> DataError:
    """Return the error for words that are missing from a vocabulary, with suggestions.

    Args:
        unknown_words: The missing words.
        vocabulary: The words of the vocabulary.
        owner: The name of the vocabulary's owner in the message.
    """
    descriptions = []
    for word in dict.fromkeys(unknown_words):
        description = shorten(word)
        suggestions = suggest_spellings(word, vocabulary)
        if suggestions:
            description += f" (did you mean {' or '.join(suggestions)}?)"
        descriptions.append(description)
    return DataError(f"not in the vocabulary of {owner}: {', '.join(descriptions)}")


def suggest_spellings(word: str, vocabulary: Sequence[str]) -> list[str]:
    """Return up to two words of the vocabulary with a similar spelling.

    Only words with the same first letter and about the same length are compared, because there may be millions.
    """
    if not word or len(word) > _MAX_LENGTH:
        return []
    lowercase_word = word.lower()

    candidate_by_lowercase: dict[str, str] = {}
    for candidate in vocabulary:
        has_same_first_letter = candidate[:1].lower() == lowercase_word[0]
        if has_same_first_letter and abs(len(candidate) - len(word)) <= _MAX_LENGTH_DIFFERENCE:
            candidate_by_lowercase.setdefault(candidate.lower(), candidate)

    matches = get_close_matches(lowercase_word, candidate_by_lowercase, n=2, cutoff=0.75)
    return [candidate_by_lowercase[match] for match in matches]
