"""Encode a corpus: write its splits as ids to a folder, from which they are memory-mapped afterwards.

vocabulary.json    the vocabulary (and tokenizer.json if words are split)
SPLIT.ids          little-endian 32-bit ids
SPLIT.inputs       ids for the input end, if words outside the vocabulary keep their spelling
counts.json        sizes, with which the other files must agree
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from reefknot.errors import DataError
from reefknot.lab.config.settings import Settings
from reefknot.lab.text.corpus import SPLITS, TextFiles
from reefknot.lab.text.vocabulary import END_OF_LINE, UnknownPolicy, Vocabulary, VocabularySettings
from reefknot.storage.lines import Line
from reefknot.storage.progress import Notify

FORMAT: Literal[1] = 1
ID = np.dtype("<i4")
BUFFER = 1 << 18  # bytes
_SECONDS = 3.0  # between two lines of progress


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
    """Number of whitespace-separated words, without `<eos>`."""
    lines: int
    bytes: int
    """Size of the text in UTF-8, line ends included."""
    unknown: int
    """Number of ids that are `<unk>`."""
    spelled: NDArray[np.int32] | None = None
    """The same text as input ids, in which the words of `Vocabulary.spelled` have their own ids."""
    sha256: str | None = None
    """SHA-256 of the file, before the text is cut."""

    @property
    def inputs(self) -> NDArray[np.int32]:
        """The ids that an input end reads; `ids` are the targets."""
        return self.ids if self.spelled is None else self.spelled

    @property
    def tokens(self) -> int:
        """Number of ids, `<eos>` included."""
        return len(self.ids)


class _Part(NamedTuple):
    """The tokens of a line, or of the beginning of a line if the text is cut in the line."""

    number: int
    tokens: list[str]
    words: int
    size: int


def write_encoded(
    folder: Path, corpus: TextFiles, settings: VocabularySettings, notify: Notify, words: Vocabulary | None = None
) -> None:
    """Encode every split into `folder`, with the vocabulary `words` or a vocabulary of the training text."""
    counts: Counter[str] = Counter()
    if words is None:
        for part in _read(corpus, "train", settings, "counted", notify):
            counts.update(part.tokens)
        words = Vocabulary.from_counts(counts, settings)
    vocabulary = words
    if settings.keep_spellings:
        vocabulary = replace(vocabulary, spelled=_outside(vocabulary, corpus, settings, counts, notify))
    vocabulary.save(folder / "vocabulary.json")
    splits = {split: _write_split(folder, corpus, split, settings, vocabulary, notify) for split in SPLITS}
    if vocabulary.spelled:
        for split in SPLITS:
            _write_inputs(folder, corpus, split, settings, vocabulary, notify)
    _check_published(corpus, splits, counts)
    record = _Record(format=FORMAT, vocabulary=vocabulary.fingerprint, splits=splits)
    (folder / "counts.json").write_text(record.model_dump_json(indent=2), encoding="utf-8")


def read_encoded(folder: Path) -> tuple[Vocabulary, dict[str, Split]]:
    """Open a folder that `write_encoded` wrote. Raise a DataError if it is damaged. Ids are memory-mapped."""
    try:
        record = _Record.model_validate_json((folder / "counts.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{folder / 'counts.json'} is not what was written") from error
    vocabulary = Vocabulary.load(folder / "vocabulary.json")
    if vocabulary.fingerprint != record.vocabulary:
        raise DataError(f"{folder / 'vocabulary.json'} is not what was written")
    splits = {}
    for name in SPLITS:
        counts = record.splits.get(name)
        if counts is None:
            raise DataError(f"{folder / 'counts.json'} is not what was written")
        ids = read_array(_ids_file(folder, name), ID, counts.tokens)
        spelled = read_array(_inputs_file(folder, name), ID, counts.tokens) if vocabulary.spelled else None
        splits[name] = Split(name, ids, **counts.model_dump(exclude={"tokens"}), spelled=spelled)
    return vocabulary, splits


def _ids_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.ids"


def _inputs_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.inputs"


def read_array(path: Path, kind: np.dtype[Any], number: int) -> NDArray[Any]:
    """Memory-map a file of `number` values of one type. Raise a DataError if the file has another size."""
    size = number * kind.itemsize
    if not path.is_file() or path.stat().st_size != size:
        raise DataError(f"{path} does not have the {size:,} bytes that were written")
    return np.memmap(path, dtype=kind, mode="r")


def _outside(
    vocabulary: Vocabulary, corpus: TextFiles, settings: VocabularySettings, counts: Counter[str], notify: Notify
) -> tuple[str, ...]:
    """Return the words outside the vocabulary, in the order of their first occurrence."""
    words = dict.fromkeys(word for word in counts if word not in vocabulary)
    for split in SPLITS[1:]:
        for part in _read(corpus, split, settings, "searched", notify):
            words.update(dict.fromkeys(word for word in part.tokens if word not in vocabulary))
    return tuple(words)


def _write_split(
    folder: Path, corpus: TextFiles, split: str, settings: VocabularySettings, vocabulary: Vocabulary, notify: Notify
) -> _Counts:
    tokens = words = lines = size = unknown = 0
    unk = -1 if vocabulary.unk is None else vocabulary.unk
    with _ids_file(folder, split).open("wb", BUFFER) as stream:
        for part in _read(corpus, split, settings, "encoded", notify):
            ids = encode_line(part.tokens, vocabulary, settings.unknown, corpus.files[split], part.number)
            stream.write(np.array(ids, dtype=ID).tobytes())
            tokens += len(ids)
            unknown += ids.count(unk)
            words += part.words
            lines += 1
            size += part.size
    if not words:
        raise DataError(f"{corpus.files[split]}: the {split} text has no words")
    return _Counts(tokens=tokens, words=words, lines=lines, bytes=size, unknown=unknown)


def _write_inputs(
    folder: Path, corpus: TextFiles, split: str, settings: VocabularySettings, vocabulary: Vocabulary, notify: Notify
) -> None:
    with _inputs_file(folder, split).open("wb", BUFFER) as stream:
        for part in _read(corpus, split, settings, "spelled", notify):
            stream.write(np.array(vocabulary.encode_inputs(part.tokens), dtype=ID).tobytes())


def encode_line(
    tokens: Iterable[str], vocabulary: Vocabulary, unknown: UnknownPolicy, path: Path, number: int
) -> list[int]:
    """Return the ids of a line. The error for an unknown word names the file and the line."""
    try:
        return vocabulary.encode(tokens, unknown)
    except DataError as error:
        raise DataError(f"{path}, line {number}: {error}") from None


def _read(corpus: TextFiles, split: str, settings: VocabularySettings, verb: str, notify: Notify) -> Iterator[_Part]:
    """Yield the lines of a split, with a line of progress every few seconds."""
    limit = corpus.settings.tokens if split == "train" else None
    tokens, reported = 0, time.monotonic()
    for part in _parts(corpus.lines(split), settings, limit):
        yield part
        tokens += len(part.tokens)
        now = time.monotonic()
        if now - reported > _SECONDS:
            notify(f"{split}: {tokens:,} tokens {verb}")
            reported = now


def _parts(lines: Iterator[Line], settings: VocabularySettings, limit: int | None) -> Iterator[_Part]:
    """Yield lines as tokens. With a limit, stop after that many tokens, in the middle of a line if necessary."""
    remaining = limit
    for number, words, size in lines:
        tokens = [*words, END_OF_LINE] if settings.end_of_line else words
        if remaining is not None and len(tokens) >= remaining:
            if len(tokens) > remaining:
                tokens, words = tokens[:remaining], words[:remaining]
                size = len(" ".join(words).encode())
            yield _Part(number, tokens, len(words), size)
            return
        yield _Part(number, tokens, len(words), size)
        if remaining is not None:
            remaining -= len(tokens)


def _check_published(corpus: TextFiles, splits: dict[str, _Counts], counts: Counter[str]) -> None:
    """Compare the numbers of tokens and types with the published numbers, to check that the text is read correctly."""
    known = corpus.corpus
    cut = corpus.settings.part or corpus.settings.tokens
    for split, published in known.tokens.items():
        tokens = splits[split].words + splits[split].lines
        if tokens != published and not (cut and split == "train"):
            raise DataError(f"{corpus.files[split]}: {tokens:,} tokens with <eos>, {published:,} published")
    types = len(counts.keys() | {END_OF_LINE})
    if known.types is not None and counts and types != known.types and not cut:
        raise DataError(f"{corpus.files['train']}: {types:,} types with <eos>, {known.types:,} published")
