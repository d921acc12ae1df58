"""Encode parallel text as token ids and store them in a folder, from which they are memory-mapped.

`write_encoded_pairs` reads two aligned files per split and writes the folder. `read_encoded_pairs` opens it and returns
a `PairSplit` for each of train, valid and test. `open_pairs` (`lab/text/pair_dataset.py`) calls both.

The folder contains:

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
from reefknot.lab.text.encoding import BUFFER_BYTES, ID, encode_line, read_array
from reefknot.lab.text.pairs import AlignedFiles
from reefknot.lab.text.vocabulary import END_OF_LINE, UnknownPolicy, Vocabulary, VocabularyPair, VocabularySettings
from reefknot.storage.cache import cache_folder, file_hash
from reefknot.storage.lines import read_plain
from reefknot.storage.progress import Notify, report_progress

FORMAT: Literal[1] = 1
Side = Literal["source", "target"]
SIDES: tuple[Side, Side] = ("source", "target")
_INT64 = np.dtype("<i8")


class _SideCounts(Settings):
    """The sizes of one side of a split."""

    tokens: int
    words: int
    unknown: int


class _SplitCounts(Settings):
    """The sizes of one split, as they are stored in `counts.json`."""

    pairs: int
    source: _SideCounts
    target: _SideCounts
    bytes: int
    dropped: dict[str, int]


class _CountsFile(Settings):
    """The contents of `counts.json`."""

    format: Literal[1]
    joint: bool
    vocabularies: tuple[str, str]
    """Fingerprints of the vocabularies, source first."""
    splits: dict[str, _SplitCounts]


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines of ids, each of which ends with `<eos>`: line i is `ids[bounds[i] : bounds[i + 1]]`."""

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]

    @classmethod
    def from_lists(cls, lines: Iterable[Sequence[int]]) -> Lines:
        """Store lines in memory: [[5, 6, 0], [7, 0]] has the ids [5, 6, 0, 7, 0] and the bounds [0, 3, 5]."""
        line_list = list(lines)
        ids = np.fromiter(chain.from_iterable(line_list), np.int32)
        return cls(ids, np.cumsum([0, *map(len, line_list)], dtype=np.int64))

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
    line_numbers: NDArray[np.int64]
    """Line number of each pair in its files, counted from 1."""
    files: AlignedFiles
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
        return [lines[line_number - 1] for line_number in self.line_numbers]


def write_encoded_pairs(folder: Path, corpus: PairFiles, settings: VocabularySettings, notify: Notify) -> None:
    """Encode every split into `folder`, with vocabularies built from the training text."""
    source_counts, target_counts = _count_words(corpus, notify)
    vocabulary_pair = VocabularyPair.from_counts(source_counts, target_counts, settings)
    source, target = vocabulary_pair.vocabularies
    target.save(folder / "vocabulary.json")
    if not vocabulary_pair.joint:
        (folder / "source").mkdir()
        source.save(folder / "source" / "vocabulary.json")
    splits = {split: _write_split(folder, corpus, split, settings, vocabulary_pair, notify) for split in SPLITS}
    contents = _CountsFile(
        format=FORMAT,
        joint=vocabulary_pair.joint,
        vocabularies=(source.fingerprint, target.fingerprint),
        splits=splits,
    )
    (folder / "counts.json").write_text(contents.model_dump_json(indent=2), encoding="utf-8")


def read_encoded_pairs(folder: Path, corpus: PairFiles) -> tuple[VocabularyPair, dict[str, PairSplit]]:
    """Open a folder that `write_encoded_pairs` wrote. Raise a DataError if it is damaged. Ids are memory-mapped."""
    path = folder / "counts.json"
    try:
        stored = _CountsFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{path} is not what was written") from error
    vocabulary_pair = _read_vocabularies(folder, stored)
    if set(stored.splits) != set(SPLITS):
        raise DataError(f"{path} is not what was written")
    return vocabulary_pair, {name: _read_split(folder, corpus, name, stored.splits[name]) for name in SPLITS}


def _count_words(corpus: PairFiles, notify: Notify) -> tuple[Counter[str], Counter[str]]:
    """Count the words of both sides of the training text, including pairs that are left out later."""
    source, target = Counter[str](), Counter[str]()
    for pair in report_progress(corpus.read_pairs("train"), lambda count: f"train: {count:,} pairs counted", notify):
        source.update(pair.source)
        target.update(pair.target)
        source[END_OF_LINE] += 1
        target[END_OF_LINE] += 1
    return source, target


@dataclass
class _SideWriter:
    """Encodes the lines of one side of a split, writes their ids to a file and counts them."""

    vocabulary: Vocabulary
    unknown: UnknownPolicy
    text_path: Path
    ids_file: IO[bytes]
    bounds: array[int] = field(default_factory=lambda: array("q", [0]))
    num_words: int = 0
    num_unknown: int = 0

    def encode(self, words: list[str], line_number: int) -> list[int]:
        tokens: Sequence[str] = [*words, END_OF_LINE]
        if self.unknown == "replace":
            tokens = self.vocabulary.split_at_unknown(tokens)
        return encode_line(tokens, self.vocabulary, self.unknown, self.text_path, line_number)

    def write(self, words: list[str], ids: list[int]) -> None:
        self.ids_file.write(np.array(ids, dtype=ID).tobytes())
        self.bounds.append(self.bounds[-1] + len(ids))
        self.num_words += len(words)
        if self.vocabulary.unk is not None:
            self.num_unknown += ids.count(self.vocabulary.unk)

    @property
    def counts(self) -> _SideCounts:
        return _SideCounts(tokens=self.bounds[-1], words=self.num_words, unknown=self.num_unknown)


def _write_split(
    folder: Path,
    corpus: PairFiles,
    split: str,
    settings: VocabularySettings,
    vocabulary_pair: VocabularyPair,
    notify: Notify,
) -> _SplitCounts:
    """Write the ids of one split, and return its sizes. Training pairs that the filters reject are left out."""
    line_numbers, num_bytes = array("q"), 0
    dropped: Counter[str] = Counter()
    with ExitStack() as stack:
        source, target = (
            _SideWriter(
                vocabulary=vocabulary,
                unknown=settings.unknown,
                text_path=text_path,
                ids_file=stack.enter_context(_side_path(folder, split, side, "ids").open("wb", BUFFER_BYTES)),
            )
            for vocabulary, text_path, side in zip(
                vocabulary_pair.vocabularies, corpus.files[split], SIDES, strict=True
            )
        )
        pairs = corpus.read_pairs(split)
        for pair in report_progress(pairs, lambda count: f"{split}: {count:,} pairs encoded", notify):
            source_ids = source.encode(pair.source, pair.line_number)
            target_ids = target.encode(pair.target, pair.line_number)
            reason = None
            if split == "train":
                reason = corpus.filters.reason_to_drop(len(source_ids) - 1, len(target_ids) - 1)  # without <eos>
            if reason:
                dropped[reason] += 1
                continue
            source.write(pair.source, source_ids)
            target.write(pair.target, target_ids)
            line_numbers.append(pair.line_number)
            num_bytes += pair.size
    counts = _SplitCounts(
        pairs=len(line_numbers),
        source=source.counts,
        target=target.counts,
        bytes=num_bytes,
        dropped=dict(dropped),
    )
    _check_has_words(counts, corpus, split)
    if dropped:
        notify(f"{split}: {counts.pairs:,} pairs; left out: {describe_dropped(dropped)}")
    _side_path(folder, split, "source", "bounds").write_bytes(_to_int64_bytes(source.bounds))
    _side_path(folder, split, "target", "bounds").write_bytes(_to_int64_bytes(target.bounds))
    _line_numbers_path(folder, split).write_bytes(_to_int64_bytes(line_numbers))
    return counts


def _check_has_words(counts: _SplitCounts, corpus: PairFiles, split: str) -> None:
    """Raise an error if a side of a split has no words, for example because all pairs were left out."""
    if counts.source.words and counts.target.words:
        return
    problem = "one side has no words"
    if counts.dropped:
        problem = f"every pair is left out ({describe_dropped(counts.dropped)})"
    files = corpus.files[split]
    raise DataError(f"{files.source} and {files.target}: {problem}, so there is no {split} text")


def describe_dropped(dropped: Mapping[str, int]) -> str:
    """Describe how many pairs were left out for each reason: "12 too long, 3 ratio"."""
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())


def _read_vocabularies(folder: Path, stored: _CountsFile) -> VocabularyPair:
    target = Vocabulary.load(folder / "vocabulary.json")
    source = target if stored.joint else Vocabulary.load(folder / "source" / "vocabulary.json")
    if (source.fingerprint, target.fingerprint) != stored.vocabularies:
        raise DataError(f"{folder}: a vocabulary is not what was written")
    return VocabularyPair(source, target)


def _read_split(folder: Path, corpus: PairFiles, name: str, counts: _SplitCounts) -> PairSplit:
    return PairSplit(
        name,
        _read_lines(folder, name, "source", counts.pairs, counts.source.tokens),
        _read_lines(folder, name, "target", counts.pairs, counts.target.tokens),
        words=counts.target.words,
        bytes=counts.bytes,
        unknown=counts.target.unknown,
        unknown_source=counts.source.unknown,
        dropped=counts.dropped,
        line_numbers=read_array(_line_numbers_path(folder, name), _INT64, counts.pairs),
        files=corpus.files[name],
        sha256=corpus.hashes[name],
    )


def _read_lines(folder: Path, split: str, side: Side, num_pairs: int, num_tokens: int) -> Lines:
    ids = read_array(_side_path(folder, split, side, "ids"), ID, num_tokens)
    bounds_path = _side_path(folder, split, side, "bounds")
    bounds = read_array(bounds_path, _INT64, num_pairs + 1)
    if bounds[0] != 0 or bounds[-1] != num_tokens or (np.diff(bounds) < 1).any():
        raise DataError(f"{bounds_path} is not what was written")
    return Lines(ids, bounds)


def _side_path(folder: Path, split: str, side: Side, suffix: str) -> Path:
    return folder / f"{split}.{side}.{suffix}"


def _line_numbers_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.numbers"


def _to_int64_bytes(values: array[int]) -> bytes:
    """Return the bytes of integers in the stored type: little-endian, 64 bits."""
    return np.array(values, dtype=_INT64).tobytes()
