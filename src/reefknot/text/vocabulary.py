"""The word vocabulary: which words there are, in order of their frequency in the training text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from reefknot import durable
from reefknot.errors import DataError
from reefknot.settings import Count, Settings

UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"

UnknownPolicy = Literal["replace", "refuse"]


class VocabularySettings(Settings):
    """Which training words get a vector of their own, and what becomes of the others."""

    min_count: Annotated[Count, Field(description="keep words seen at least so many times in the training text")] = 1
    max_size: Annotated[
        int | None,
        Field(ge=3, le=10**9, description="keep at most so many types, <unk> and <eos> included"),
    ] = None
    unknown: Annotated[
        UnknownPolicy,
        Field(description="a word outside the vocabulary: replace it by <unk>, or refuse the text"),
    ] = "replace"
    end_of_line: Annotated[bool, Field(description="end each line with <eos>")] = True


@dataclass(frozen=True)
class Vocabulary:
    """Words by id, most frequent first (ties in the order of their characters), and their training counts."""

    words: tuple[str, ...]
    counts: tuple[int, ...]

    @classmethod
    def from_counts(cls, counts: Mapping[str, int], settings: VocabularySettings) -> Vocabulary:
        """The vocabulary of a training text in which each token, `<eos>` included, was counted.

        `<unk>` counts for its own occurrences and for every word it replaces.
        """
        policy = {END_OF_LINE: settings.end_of_line, UNKNOWN: settings.unknown == "replace"}
        kept = {word: counts.get(word, 0) for word, reserved in policy.items() if reserved}
        room = None if settings.max_size is None else settings.max_size - len(kept)
        others = [(w, n) for w, n in counts.items() if w not in kept and n >= settings.min_count]
        kept.update(sorted(others, key=_frequency_order)[:room])
        if UNKNOWN in kept:
            kept[UNKNOWN] += sum(n for word, n in counts.items() if word not in kept)
        words, numbers = zip(*sorted(kept.items(), key=_frequency_order), strict=True)
        return cls(words, numbers)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self._ids

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}

    @property
    def unk(self) -> int | None:
        """The id of `<unk>`, if the vocabulary has it."""
        return self._ids.get(UNKNOWN)

    @property
    def eos(self) -> int | None:
        """The id of `<eos>`, if the vocabulary has it."""
        return self._ids.get(END_OF_LINE)

    def id_of(self, word: str) -> int:
        """The id of a word; that of `<unk>` for a word outside the vocabulary."""
        return self.encode([word])[0]

    def encode(self, words: Iterable[str], unknown: UnknownPolicy = "replace") -> list[int]:
        """Ids of words. A vocabulary without `<unk>` refuses an unknown word whatever the policy."""
        ids, unk = self._ids, self.unk
        if unknown == "replace" and unk is not None:
            return [ids.get(word, unk) for word in words]
        try:
            return [ids[word] for word in words]
        except KeyError as error:
            raise DataError(
                f"'{error.args[0]}' is not in the vocabulary; use another word, or train with unknown = \"replace\""
            ) from None

    def text(self, ids: Iterable[int]) -> str:
        """Words with spaces between them; an `<eos>` ends its line."""
        words = ("\n" if word == END_OF_LINE else word for word in self.decode(ids))
        return " ".join(words).replace(" \n", "\n").replace("\n ", "\n")

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Words of ids."""
        return [self.words[index] for index in ids]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of its file."""
        return hashlib.sha256(self._file()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the vocabulary as JSON in ASCII; any word survives, control characters included."""
        durable.write_bytes(path, self._file())

    def _file(self) -> bytes:
        stored = {"format": 1, "words": self.words, "counts": self.counts}
        return json.dumps(stored, indent=0).encode()

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what `save` wrote; a file that is not sound is refused."""
        data = durable.read_bytes(path)
        stored = durable.decode_object(data, path)
        fault = _fault(stored)
        if fault:
            raise DataError(f"{path} is not a vocabulary: {fault}")
        vocabulary = cls(tuple(stored["words"]), tuple(stored["counts"]))
        vars(vocabulary)["fingerprint"] = hashlib.sha256(data).hexdigest()  # as if computed already: it takes long
        return vocabulary


def _frequency_order(item: tuple[str, int]) -> tuple[int, str]:
    word, count = item
    return -count, word


def _fault(stored: dict[str, Any]) -> str | None:
    """Why what was read is no vocabulary, or None. There may be millions of words: each check is a plain loop."""
    if stored.keys() != {"format", "words", "counts"} or stored["format"] != 1:
        return "it must hold format 1, words and counts"
    words, counts = stored["words"], stored["counts"]
    if not isinstance(words, list) or not isinstance(counts, list) or not words:
        return "it holds no words"
    if len(words) != len(counts):
        return f"{len(words)} words but {len(counts)} counts"
    if set(map(type, words)) != {str} or not _is_unicode(words):
        return "a word is no text"
    if set(map(type, counts)) != {int} or min(counts) < 0:
        return "a count is no whole number from 0"
    if len(set(words)) != len(words):
        return "a word stands in it twice"
    if any(a < b or (a == b and v > w) for (a, v), (b, w) in pairwise(zip(counts, words, strict=True))):
        return "the words are not in order of frequency"
    return None


def _is_unicode(words: list[str]) -> bool:
    """JSON can spell halves of characters, which no file and no screen takes."""
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        return False
    return True
