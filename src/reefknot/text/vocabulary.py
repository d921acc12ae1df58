"""The word vocabulary: which words there are, in order of their frequency in the training text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from reefknot.durable import write_bytes
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


class _Stored(Settings):
    """The file format."""

    format: Literal[1]
    words: list[str]
    counts: list[Annotated[int, Field(ge=0)]]


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
        """SHA-256 of the file that `save` writes."""
        return hashlib.sha256(self._file()).hexdigest()

    def save(self, path: Path) -> None:
        """Write the vocabulary as JSON in ASCII; any word survives, control characters included."""
        write_bytes(path, self._file())

    def _file(self) -> bytes:
        stored = {"format": 1, "words": self.words, "counts": self.counts}
        return json.dumps(stored, indent=0).encode()

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read what `save` wrote; a file that is not sound is refused."""
        try:
            stored = _Stored.model_validate_json(path.read_bytes())
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise DataError(f"{path}: not a vocabulary: {place}: {first['msg']}") from None
        fault = _fault(stored)
        if fault:
            raise DataError(f"{path}: not a vocabulary: {fault}")
        return cls(tuple(stored.words), tuple(stored.counts))


def _frequency_order(item: tuple[str, int]) -> tuple[int, str]:
    word, count = item
    return -count, word


def _fault(stored: _Stored) -> str | None:
    """Why a vocabulary that was read cannot be used, or None."""
    if not stored.words:
        return "it holds no words"
    if len(stored.words) != len(stored.counts):
        return f"{len(stored.words)} words but {len(stored.counts)} counts"
    if len(set(stored.words)) != len(stored.words):
        return "a word stands in it twice"
    order = map(_frequency_order, zip(stored.words, stored.counts, strict=True))
    if any(before > after for before, after in pairwise(order)):
        return "the words are not in order of frequency"
    return None
