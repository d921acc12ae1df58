"""Encode parallel text as token ids and store them in a folder, from which they are memory-mapped.

`write_encoded_pairs` reads two aligned files per split and writes the folder. `read_encoded_pairs` opens it and returns
a `PairSplit` for each of train, valid and test. `open_pairs` (`lab/text/pair_dataset.py`) calls both.

The folder contains these files, where SPLIT is train, valid or test and SIDE is source or target:

    vocabulary.json          the vocabulary of the target
    source/vocabulary.json   the vocabulary of the source, if it is not the same
    SPLIT.SIDE.ids           little-endian 32-bit ids
    SPLIT.SIDE.bounds        where each line begins in the ids, and the end (64 bits)
    SPLIT.numbers            line number of each pair in its files (64 bits)
    counts.json              sizes, with which the other files must agree
    MANIFEST.json            size and SHA-256 of the other files; `load_or_create` writes and compares it
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
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.text.vocabulary_settings import UnknownPolicy, VocabularySettings
from reefknot.nn.constants import END_OF_LINE
from reefknot.storage.cache import cache_folder, file_hash
from reefknot.storage.lines import read_plain
from reefknot.storage.progress import Notify, report_progress

FORMAT: Literal[1] = 1
Side = Literal["source", "target"]
SIDES: tuple[Side, Side] = ("source", "target")
_INT64 = np.dtype("<i8")


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
        bounds = np.cumsum([0, *map(len, line_list)], dtype=np.int64)
        return cls(ids, bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        index = range(len(self))[index]  # counts negative indices from the end, and raises an IndexError
        return self.ids[self.bounds[index] : self.bounds[index + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of ids in each line, `<eos>` included."""
        return np.diff(self.bounds)


@dataclass(frozen=True, eq=False)
class PairSplit:
    """One encoded parallel text. `words`, `bytes`, `unknown`, `lines` and `tokens` count the target side."""

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
    """Number of source ids that are `<unk>`."""
    dropped: dict[str, int]
    """Number of training pairs that were left out, by reason."""
    line_numbers: NDArray[np.int64]
    """Line number of each pair in its files, counted from 1."""
    files: AlignedFiles
    """The source file and the target file that the pairs were read from."""
    sha256: str
    """SHA-256 over both files when they were encoded."""

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

    def read_text(self, side: Side) -> list[str]:
        """Return the lines of one side as they are in the file, for the pairs that were not left out."""
        current_sha256 = self.files.sha256(lambda path: file_hash(path, cache_folder()))
        if current_sha256 != self.sha256:
            raise DataError(
                f"{self.files.source} or {self.files.target} has changed since the pairs were encoded; run this again"
            )
        path = self.files.source if side == "source" else self.files.target
        lines = list(read_plain(path))
        return [lines[line_number - 1] for line_number in self.line_numbers]


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


def write_encoded_pairs(folder: Path, pair_files: PairFiles, settings: VocabularySettings, notify: Notify) -> None:
    """Encode every split into `folder`, with vocabularies built from the training text."""
    # Build the vocabularies.
    source_counts, target_counts = _count_words(pair_files, notify)
    vocabulary_pair = VocabularyPair.from_counts(source_counts, target_counts, settings)
    source, target = vocabulary_pair.vocabularies
    target.save(folder / "vocabulary.json")
    if not vocabulary_pair.joint:
        (folder / "source").mkdir()
        source.save(folder / "source" / "vocabulary.json")

    # Encode the splits.
    split_counts = {}
    for split in SPLITS:
        split_counts[split] = _write_split(folder, pair_files, split, settings, vocabulary_pair, notify)

    contents = _CountsFile(
        format=FORMAT,
        joint=vocabulary_pair.joint,
        vocabularies=(source.fingerprint, target.fingerprint),
        splits=split_counts,
    )
    (folder / "counts.json").write_text(contents.model_dump_json(indent=2), encoding="utf-8")


def read_encoded_pairs(folder: Path, pair_files: PairFiles) -> tuple[VocabularyPair, dict[str, PairSplit]]:
    """Open a folder that `write_encoded_pairs` wrote, and return its vocabularies and its splits by name.

    Ids are memory-mapped. Raise a DataError if the folder is damaged.
    """
    counts_path = folder / "counts.json"
    try:
        stored = _CountsFile.model_validate_json(counts_path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{counts_path} is not what was written") from error
    vocabulary_pair = _read_vocabularies(folder, stored)
    if set(stored.splits) != set(SPLITS):
        raise DataError(f"{counts_path} is not what was written")
    splits = {split: _read_split(folder, pair_files, split, stored.splits[split]) for split in SPLITS}
    return vocabulary_pair, splits


def _count_words(pair_files: PairFiles, notify: Notify) -> tuple[Counter[str], Counter[str]]:
    """Return the word counts of the source and of the target of the training text.

    Pairs that are left out later are included.
    """
    source_counts: Counter[str] = Counter()
    target_counts: Counter[str] = Counter()
    pairs = pair_files.read_pairs("train")
    for pair in report_progress(pairs, lambda count: f"train: {count:,} pairs counted", notify):
        source_counts.update(pair.source)
        target_counts.update(pair.target)
        source_counts[END_OF_LINE] += 1
        target_counts[END_OF_LINE] += 1
    return source_counts, target_counts


@dataclass
class _SideWriter:
    """Encodes the lines of one side of a split, writes their ids to a file and counts them."""

    vocabulary: Vocabulary
    unknown: UnknownPolicy
    text_path: Path
    """The text, for error messages."""
    ids_file: IO[bytes]
    bounds: array[int] = field(default_factory=lambda: array("q", [0]))
    """Where each line begins in the ids, and the end."""
    num_words: int = 0
    num_unknown: int = 0

    def encode(self, words: list[str], line_number: int) -> list[int]:
        """Return the ids of a line, `<eos>` included."""
        tokens: Sequence[str] = [*words, END_OF_LINE]
        if self.unknown == "replace":
            tokens = self.vocabulary.split_at_unknown(tokens)
        return encode_line(tokens, self.vocabulary, self.unknown, self.text_path, line_number)

    def write(self, words: list[str], ids: list[int]) -> None:
        """Write the ids of a line, and count the line."""
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
    pair_files: PairFiles,
    split: str,
    settings: VocabularySettings,
    vocabulary_pair: VocabularyPair,
    notify: Notify,
) -> _SplitCounts:
    """Write the ids of one split, and return its sizes. Training pairs that the filters reject are left out."""
    line_numbers = array("q")
    num_bytes = 0
    dropped: Counter[str] = Counter()

    with ExitStack() as stack:
        # Open a file for the ids of each side.
        writers = []
        for side, vocabulary, text_path in zip(
            SIDES, vocabulary_pair.vocabularies, pair_files.files[split], strict=True
        ):
            ids_path = _side_path(folder, split, side, "ids")
            ids_file = stack.enter_context(ids_path.open("wb", BUFFER_BYTES))
            writers.append(_SideWriter(vocabulary, settings.unknown, text_path, ids_file))
        source, target = writers

        # Encode and filter the pairs.
        pairs = pair_files.read_pairs(split)
        for pair in report_progress(pairs, lambda count: f"{split}: {count:,} pairs encoded", notify):
            source_ids = source.encode(pair.source, pair.line_number)
            target_ids = target.encode(pair.target, pair.line_number)
            if split == "train":
                reason = pair_files.filters.reason_to_drop(len(source_ids) - 1, len(target_ids) - 1)  # without <eos>
                if reason is not None:
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
    _check_has_words(counts, pair_files, split)
    if dropped:
        notify(f"{split}: {counts.pairs:,} pairs; left out: {describe_dropped(dropped)}")

    _side_path(folder, split, "source", "bounds").write_bytes(_to_int64_bytes(source.bounds))
    _side_path(folder, split, "target", "bounds").write_bytes(_to_int64_bytes(target.bounds))
    _line_numbers_path(folder, split).write_bytes(_to_int64_bytes(line_numbers))
    return counts


def _check_has_words(counts: _SplitCounts, pair_files: PairFiles, split: str) -> None:
    """Raise an error if a side of a split has no words, for example because all pairs were left out."""
    if counts.source.words and counts.target.words:
        return
    problem = "one side has no words"
    if counts.dropped:
        problem = f"every pair is left out ({describe_dropped(counts.dropped)})"
    files = pair_files.files[split]
    raise DataError(f"{files.source} and {files.target}: {problem}, so there is no {split} text")


def describe_dropped(dropped: Mapping[str, int]) -> str:
    """Describe how many pairs were left out for each reason: "12 too long, 3 ratio"."""
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())


def _read_vocabularies(folder: Path, stored: _CountsFile) -> VocabularyPair:
    target = Vocabulary.load(folder / "vocabulary.json")
    source = target
    if not stored.joint:
        source = Vocabulary.load(folder / "source" / "vocabulary.json")
    if (source.fingerprint, target.fingerprint) != stored.vocabularies:
        raise DataError(f"{folder}: a vocabulary is not what was written")
    return VocabularyPair(source, target)


def _read_split(folder: Path, pair_files: PairFiles, split: str, counts: _SplitCounts) -> PairSplit:
    return PairSplit(
        name=split,
        source=_read_lines(folder, split, "source", counts.pairs, counts.source.tokens),
        target=_read_lines(folder, split, "target", counts.pairs, counts.target.tokens),
        words=counts.target.words,
        bytes=counts.bytes,
        unknown=counts.target.unknown,
        unknown_source=counts.source.unknown,
        dropped=counts.dropped,
        line_numbers=read_array(_line_numbers_path(folder, split), _INT64, counts.pairs),
        files=pair_files.files[split],
        sha256=pair_files.hashes[split],
    )


def _read_lines(folder: Path, split: str, side: Side, num_pairs: int, num_tokens: int) -> Lines:
    ids = read_array(_side_path(folder, split, side, "ids"), ID, num_tokens)
    bounds_path = _side_path(folder, split, side, "bounds")
    bounds = read_array(bounds_path, _INT64, num_pairs + 1)
    has_empty_line = (np.diff(bounds) < 1).any()
    if bounds[0] != 0 or bounds[-1] != num_tokens or has_empty_line:
        raise DataError(f"{bounds_path} is not what was written")
    return Lines(ids, bounds)


def _side_path(folder: Path, split: str, side: Side, suffix: str) -> Path:
    return folder / f"{split}.{side}.{suffix}"


def _line_numbers_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.numbers"


def _to_int64_bytes(values: array[int]) -> bytes:
    """Return the bytes of integers in the stored type: little-endian, 64 bits."""
    return np.array(values, dtype=_INT64).tobytes()
