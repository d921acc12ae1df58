"""Words as people write them, found among the words that have vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from reefknot.errors import DataError, shortened
from reefknot.nn.inputs.symbols import END_OF_LINE, END_OF_WORD, PADDING, START, UNKNOWN
from reefknot.vectors.word_vectors import WordVectors

_SYMBOLS = (UNKNOWN, END_OF_LINE, START, PADDING)
_LONGEST = 40  # letters; what is longer is no misspelt word
_APART = 2  # letters that a misspelt word may be longer or shorter


@dataclass(frozen=True)
class Lookup:
    """Looks a word up as it is written, then lower-cased.

    Among pieces of words, a word is there only where one piece is the whole of it: "car" is `car</w>`, not the `car`
    that "carpet" begins with. Where nobody knows whether these are pieces, it is either, plainly first.
    """

    vectors: WordVectors

    def find(self, word: str) -> int | None:
        """The row of a word, or None."""
        for written in (word, word.lower()):
            for token in (as_piece(written),) if self.vectors.pieces else (written, as_piece(written)):
                if token in self.vectors:
                    return self.vectors.id_of(token)
        return None

    def require(self, words: Sequence[str], where: str) -> list[int]:
        """The rows of words; if one has none, a sentence with the nearest spellings. `where` names the vectors."""
        rows = {word: self.find(word) for word in words}
        unknown = [word for word, row in rows.items() if row is None]
        if not unknown:
            return [row for word in words if (row := rows[word]) is not None]
        if self.vectors.pieces:
            whole = [word.removesuffix(END_OF_WORD) for word in self.vectors.words if word.endswith(END_OF_WORD)]
            raise not_known(unknown, whole, f"{where} as one piece")
        raise not_known(unknown, self.vectors.words, where)


def as_piece(word: str) -> str:
    """The piece that is the whole of a word."""
    return word if word in _SYMBOLS or word.endswith(END_OF_WORD) else f"{word}{END_OF_WORD}"


def not_known(unknown: Sequence[str], words: Sequence[str], where: str) -> DataError:
    """The sentence on words that a vocabulary, which `where` names, has not among its own."""
    hints = {word: near_spellings(word, words) for word in unknown}
    told = [shortened(word) + (f" (did you mean {' or '.join(near)}?)" if near else "") for word, near in hints.items()]
    return DataError(f"not in the vocabulary of {where}: {', '.join(told)}")


def near_spellings(word: str, words: Sequence[str]) -> list[str]:
    """At most two words spelled nearly so. Only those that begin alike are compared: there may be millions."""
    if not word or len(word) > _LONGEST:
        return []
    small = word.lower()
    alike: dict[str, str] = {}
    for known in words:
        if known[:1].lower() == small[0] and abs(len(known) - len(word)) <= _APART:
            alike.setdefault(known.lower(), known)
    return [alike[each] for each in get_close_matches(small, alike, n=2, cutoff=0.75)]
