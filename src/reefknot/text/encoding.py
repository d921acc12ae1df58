"""Encoding: from a corpus to a folder of ids, and back from the folder.

The folder holds `vocabulary.json`, one file of little-endian 32-bit ids per split, and `counts.json`, with
which the other files must agree.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from reefknot.errors import DataError
from reefknot.settings import Settings
from reefknot.text.corpora import SPLITS, Corpus
from reefknot.text.lines import Line
from reefknot.text.vocabulary import END_OF_LINE, Vocabulary, VocabularySettings

FORMAT: Literal[1] = 1
_ID = np.dtype("<i4")
_CHUNK = 1 << 16  # tokens held before they are written
_SECONDS = 3.0  # between two lines of progress

Say = Callable[[str], None]


class _Counts(Settings):
    tokens: int
    words: int
    lines: int
    bytes: int
    unknown: int


class _Record(Settings):
    """The contents of `counts.json`."""

    format: Literal[1]
    vocabulary: str
    splits: dict[str, _Counts]


@dataclass(frozen=True, eq=False)
class Split:
    """One encoded text."""

    name: str
    ids: NDArray[np.int32]
    words: int
    """Words between whitespace, so `<eos>` does not count."""
    lines: int
    bytes: int
    """Size of the text in UTF-8, line ends included."""
    unknown: int
    """How many of the ids are `<unk>`."""

    @property
    def tokens(self) -> int:
        """How many ids there are, `<eos>` included."""
        return len(self.ids)


class _Piece(NamedTuple):
    """A line, or the part of it that a cut leaves, as tokens."""

    number: int
    tokens: list[str]
    words: int
    size: int


def write_encoded(folder: Path, corpus: Corpus, settings: VocabularySettings, say: Say) -> None:
    """Count the words of the training text, then encode every split into `folder`."""
    counts: Counter[str] = Counter()
    for piece in _read(corpus, "train", settings, "counted", say):
        counts.update(piece.tokens)
    vocabulary = Vocabulary.from_counts(counts, settings)
    vocabulary.save(folder / "vocabulary.json")
    splits = {split: _write_split(folder, corpus, split, settings, vocabulary, say) for split in SPLITS}
    _check_published(corpus, splits, counts)
    record = _Record(format=FORMAT, vocabulary=vocabulary.fingerprint, splits=splits)
    (folder / "counts.json").write_text(record.model_dump_json(indent=2), encoding="utf-8")


def read_encoded(folder: Path) -> tuple[Vocabulary, dict[str, Split]]:
    """Open what `write_encoded` wrote, DataError if it is damaged; ids stay on disk until they are used."""
    try:
        record = _Record.model_validate_json((folder / "counts.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{folder / 'counts.json'} is not what was written") from error
    vocabulary = Vocabulary.load(folder / "vocabulary.json")
    if vocabulary.fingerprint != record.vocabulary:
        raise DataError(f"{folder / 'vocabulary.json'} is not what was written")
    splits = {}
    for name in SPLITS:
        path, counts = _ids_file(folder, name), record.splits.get(name)
        size = counts.tokens * _ID.itemsize if counts else 0
        if counts is None or not path.is_file() or path.stat().st_size != size:
            raise DataError(f"{path} does not have the {size:,} bytes that were written")
        ids = np.memmap(path, dtype=_ID, mode="r")
        splits[name] = Split(name, ids, **counts.model_dump(exclude={"tokens"}))
    return vocabulary, splits


def _ids_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.ids"


def _write_split(
    folder: Path, corpus: Corpus, split: str, settings: VocabularySettings, vocabulary: Vocabulary, say: Say
) -> _Counts:
    tokens = words = lines = size = unknown = 0
    ids: list[int] = []
    with _ids_file(folder, split).open("wb") as stream:

        def flush() -> None:
            nonlocal tokens, unknown
            chunk = np.array(ids, dtype=_ID)
            stream.write(chunk.tobytes())
            tokens += len(chunk)
            unknown += int(np.count_nonzero(chunk == vocabulary.unk))
            ids.clear()

        for piece in _read(corpus, split, settings, "encoded", say):
            ids += _encode(piece, settings, vocabulary, str(corpus.files[split]))
            words += piece.words
            lines += 1
            size += piece.size
            if len(ids) >= _CHUNK:
                flush()
        flush()
    if not words:
        raise DataError(f"{corpus.files[split]}: the {split} text holds no words")
    return _Counts(tokens=tokens, words=words, lines=lines, bytes=size, unknown=unknown)


def _encode(piece: _Piece, settings: VocabularySettings, vocabulary: Vocabulary, where: str) -> list[int]:
    try:
        return vocabulary.encode(piece.tokens, settings.unknown)
    except DataError as error:
        raise DataError(f"{where}, line {piece.number}: {error}") from None


def _read(corpus: Corpus, split: str, settings: VocabularySettings, deed: str, say: Say) -> Iterator[_Piece]:
    """The pieces of a split, with a line of progress every few seconds."""
    limit = corpus.settings.tokens if split == "train" else None
    tokens, reported = 0, time.monotonic()
    for piece in _pieces(corpus.lines(split), settings, limit):
        yield piece
        tokens += len(piece.tokens)
        now = time.monotonic()
        if now - reported > _SECONDS:
            say(f"{split}: {tokens:,} tokens {deed}")
            reported = now


def _pieces(lines: Iterator[Line], settings: VocabularySettings, limit: int | None) -> Iterator[_Piece]:
    """Lines as tokens; of a limited text the first `limit` tokens, the last line cut short if need be."""
    left = limit
    for number, words, size in lines:
        tokens = [*words, END_OF_LINE] if settings.end_of_line else words
        if left is not None and len(tokens) >= left:
            if len(tokens) > left:
                tokens, words = tokens[:left], words[:left]
                size = len(" ".join(words).encode())
            yield _Piece(number, tokens, len(words), size)
            return
        yield _Piece(number, tokens, len(words), size)
        if left is not None:
            left -= len(tokens)


def _check_published(corpus: Corpus, splits: dict[str, _Counts], counts: Counter[str]) -> None:
    """The bytes of a known corpus were checked before; here the way we read them is."""
    known = corpus.known
    if known is None:
        return
    cut = corpus.settings.part or corpus.settings.tokens
    for split, found in splits.items():
        tokens, published = found.words + found.lines, known.files[split].tokens
        if tokens != published and not (cut and split == "train"):
            raise DataError(f"{corpus.files[split]}: {tokens:,} tokens with <eos>, {published:,} published")
    types = len(counts.keys() | {END_OF_LINE})
    if types != known.types and not cut:
        raise DataError(f"{corpus.files['train']}: {types:,} types with <eos>, {known.types:,} published")
