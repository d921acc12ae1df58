"""Encode parallel text: write aligned files as ids to a folder, from which they are memory-mapped afterwards.

vocabulary.json          the vocabulary of the target
source/vocabulary.json   the vocabulary of the source, if it is not the same
SPLIT.SIDE.ids           little-endian 32-bit ids
SPLIT.SIDE.bounds        where each line begins in the ids, and the end (64 bits)
SPLIT.numbers            line number of each pair in its files (64 bits)
counts.json              sizes, with which the other files must agree
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from reefknot.errors import DataError
from reefknot.lab.config.settings import Settings
from reefknot.lab.text.corpus import SPLITS, PairFiles
from reefknot.lab.text.encoding import BUFFER, ID, encode_line, read_array
from reefknot.lab.text.pairs import Aligned
from reefknot.lab.text.vocabulary import END_OF_LINE, UnknownPolicy, Vocabulary, VocabularyPair, VocabularySettings
from reefknot.storage.cache import cache_folder, file_hash
from reefknot.storage.lines import read_plain
from reefknot.storage.progress import Notify, reported

FORMAT: Literal[1] = 1
Side = Literal["source", "target"]
SIDES: tuple[Side, Side] = ("source", "target")
_NUMBER = np.dtype("<i8")


class _Side(Settings):
    tokens: int
    words: int
    unknown: int


class _Counts(Settings):
    pairs: int
    source: _Side
    target: _Side
    bytes: int
    dropped: dict[str, int]


class _Record(Settings):
    """The contents of `counts.json`."""

    format: Literal[1]
    joint: bool
    vocabularies: tuple[str, str]
    splits: dict[str, _Counts]


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines of ids, each of which ends with `<eos>`: line i is `ids[bounds[i] : bounds[i + 1]]`."""

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]

    @classmethod
    def of(cls, lines: Iterable[Sequence[int]]) -> Lines:
        """Store lines in memory."""
        rows = list(lines)
        ids = np.fromiter(chain.from_iterable(rows), np.int32)
        return cls(ids, np.cumsum([0, *map(len, rows)], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        index = range(len(self))[index]
        return self.ids[self.bounds[index] : self.bounds[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of ids in each line, `<eos>` included."""
        return np.diff(self.bounds)


@dataclass(frozen=True, eq=False)
class PairSplit:
    """One encoded parallel text. All counts except `pairs` and `unknown_source` are of the target side."""

    name: str
    source: Lines
    target: Lines
    words: int
    """Number of words between whitespace, without `<eos>`."""
    bytes: int
    """Size of the target text in UTF-8, line ends included."""
    unknown: int
    """Number of target ids that are `<unk>`."""
    unknown_source: int
    dropped: dict[str, int]
    """Number of training pairs that were left out, by reason."""
    numbers: NDArray[np.int64]
    """Line number of each pair in its files, counted from 1."""
    files: Aligned
    sha256: str

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return len(self.target)

    @property
    def lines(self) -> int:
        """Number of target lines."""
        return len(self.target)

    @property
    def tokens(self) -> int:
        """Number of target ids, `<eos>` included."""
        return len(self.target.ids)

    def text(self, side: Side) -> list[str]:
        """Return the lines of one side as they are in the file, for the pairs that were not left out."""
        if self.files.sha256(lambda path: file_hash(path, cache_folder())) != self.sha256:
            raise DataError(
                f"{self.files.source} or {self.files.target} has changed since the pairs were encoded; run this again"
            )
        lines = list(read_plain(getattr(self.files, side)))
        return [lines[number - 1] for number in self.numbers]


def write_pairs(folder: Path, corpus: PairFiles, settings: VocabularySettings, notify: Notify) -> None:
    """Encode every split into `folder`, with vocabularies built from the training text."""
    words = VocabularyPair.from_counts(*_count(corpus, notify), settings)
    source, target = words.vocabularies
    target.save(folder / "vocabulary.json")
    if not words.joint:
        (folder / "source").mkdir()
        source.save(folder / "source" / "vocabulary.json")
    splits = {split: _write_split(folder, corpus, split, settings, words, notify) for split in SPLITS}
    fingerprints = (source.fingerprint, target.fingerprint)
    record = _Record(format=FORMAT, joint=words.joint, vocabularies=fingerprints, splits=splits)
    (folder / "counts.json").write_text(record.model_dump_json(indent=2), encoding="utf-8")


def read_pairs(folder: Path, corpus: PairFiles) -> tuple[VocabularyPair, dict[str, PairSplit]]:
    """Open a folder that `write_pairs` wrote. Raise a DataError if it is damaged. Ids are memory-mapped."""
    path = folder / "counts.json"
    try:
        record = _Record.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{path} is not what was written") from error
    words = _read_words(folder, record)
    if set(record.splits) != set(SPLITS):
        raise DataError(f"{path} is not what was written")
    return words, {name: _read_split(folder, corpus, name, record.splits[name]) for name in SPLITS}


def _count(corpus: PairFiles, notify: Notify) -> tuple[Counter[str], Counter[str]]:
    """Count the words of both sides of the training text, including pairs that are left out later."""
    source, target = Counter[str](), Counter[str]()
    for pair in reported(corpus.pairs("train"), lambda number: f"train: {number:,} pairs counted", notify):
        source.update(pair.source)
        target.update(pair.target)
        source[END_OF_LINE] += 1
        target[END_OF_LINE] += 1
    return source, target


@dataclass
class _Writer:
    """Writes the lines of one side and counts them."""

    vocabulary: Vocabulary
    unknown: UnknownPolicy
    file: Path
    stream: IO[bytes]
    bounds: array[int] = field(default_factory=lambda: array("q", [0]))
    words: int = 0
    unknown_ids: int = 0

    def encode(self, words: list[str], number: int) -> list[int]:
        line = [*words, END_OF_LINE]
        parts = self.vocabulary.known_parts(line) if self.unknown == "replace" else line
        return encode_line(parts, self.vocabulary, self.unknown, self.file, number)

    def add(self, words: list[str], ids: list[int]) -> None:
        self.stream.write(np.array(ids, dtype=ID).tobytes())
        self.bounds.append(self.bounds[-1] + len(ids))
        self.words += len(words)
        self.unknown_ids += 0 if self.vocabulary.unk is None else ids.count(self.vocabulary.unk)

    @property
    def counts(self) -> _Side:
        return _Side(tokens=self.bounds[-1], words=self.words, unknown=self.unknown_ids)


def _write_split(
    folder: Path, corpus: PairFiles, split: str, settings: VocabularySettings, words: VocabularyPair, notify: Notify
) -> _Counts:
    files, numbers, size = corpus.files[split], array("q"), 0
    dropped: Counter[str] = Counter()
    with ExitStack() as stack:
        source, target = (
            _Writer(
                vocabulary,
                settings.unknown,
                file,
                stack.enter_context(_path(folder, split, side, "ids").open("wb", BUFFER)),
            )
            for vocabulary, file, side in zip(words.vocabularies, files, SIDES, strict=True)
        )
        for pair in reported(corpus.pairs(split), lambda number: f"{split}: {number:,} pairs encoded", notify):
            ids, translated = source.encode(pair.source, pair.number), target.encode(pair.target, pair.number)
            if split == "train" and (reason := corpus.filters.leaves_out(len(ids) - 1, len(translated) - 1)):
                dropped[reason] += 1
                continue
            source.add(pair.source, ids)
            target.add(pair.target, translated)
            numbers.append(pair.number)
            size += pair.size
    if not source.words or not target.words:
        reason = f"every pair is left out ({describe_dropped(dropped)})" if dropped else "one side has no words"
        raise DataError(f"{files.source} and {files.target}: {reason}, so there is no {split} text")
    if dropped:
        notify(f"{split}: {len(numbers):,} pairs; left out: {describe_dropped(dropped)}")
    _path(folder, split, "source", "bounds").write_bytes(_little_endian(source.bounds))
    _path(folder, split, "target", "bounds").write_bytes(_little_endian(target.bounds))
    _numbers(folder, split).write_bytes(_little_endian(numbers))
    return _Counts(pairs=len(numbers), source=source.counts, target=target.counts, bytes=size, dropped=dict(dropped))


def describe_dropped(dropped: Mapping[str, int]) -> str:
    """Describe how many pairs were left out for each reason."""
    return ", ".join(f"{number:,} {reason}" for reason, number in dropped.items())


def _read_words(folder: Path, record: _Record) -> VocabularyPair:
    target = Vocabulary.load(folder / "vocabulary.json")
    source = target if record.joint else Vocabulary.load(folder / "source" / "vocabulary.json")
    if (source.fingerprint, target.fingerprint) != record.vocabularies:
        raise DataError(f"{folder}: a vocabulary is not what was written")
    return VocabularyPair(source, target)


def _read_split(folder: Path, corpus: PairFiles, name: str, counts: _Counts) -> PairSplit:
    return PairSplit(
        name,
        _read_lines(folder, name, "source", counts.pairs, counts.source.tokens),
        _read_lines(folder, name, "target", counts.pairs, counts.target.tokens),
        words=counts.target.words,
        bytes=counts.bytes,
        unknown=counts.target.unknown,
        unknown_source=counts.source.unknown,
        dropped=counts.dropped,
        numbers=read_array(_numbers(folder, name), _NUMBER, counts.pairs),
        files=corpus.files[name],
        sha256=corpus.hashes[name],
    )


def _read_lines(folder: Path, split: str, side: Side, pairs: int, tokens: int) -> Lines:
    ids = read_array(_path(folder, split, side, "ids"), ID, tokens)
    bounds = read_array(path := _path(folder, split, side, "bounds"), _NUMBER, pairs + 1)
    if bounds[0] != 0 or bounds[-1] != tokens or (np.diff(bounds) < 1).any():
        raise DataError(f"{path} is not what was written")
    return Lines(ids, bounds)


def _path(folder: Path, split: str, side: Side, what: str) -> Path:
    return folder / f"{split}.{side}.{what}"


def _numbers(folder: Path, split: str) -> Path:
    return folder / f"{split}.numbers"


def _little_endian(numbers: array[int]) -> bytes:
    return np.array(numbers, dtype=_NUMBER).tobytes()
