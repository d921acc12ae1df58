"""Encode a text corpus as token ids and store them in a folder, from which they are memory-mapped.

`write_encoded` reads the text files of a corpus, builds a vocabulary and writes the folder. `read_encoded` opens the
folder and returns a `Split` for each of train, valid and test. `open_dataset` (`lab/text/dataset.py`) calls both.

The folder contains:

    vocabulary.json    the vocabulary (and tokenizer.json if words are split into sub-words)
    SPLIT.ids          the text as little-endian 32-bit ids
    SPLIT.inputs       ids for the model's embedding, if words outside the vocabulary keep their spelling
    counts.json        sizes, with which the other files must agree
    MANIFEST.json      size and SHA-256 of the other files; `load_or_create` writes and compares it
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.settings import Settings
from reefknot.lab.text.corpus import SPLITS, TextFiles
from reefknot.lab.text.shards import count_file, encode_file
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import UnknownPolicy, VocabularySettings
from reefknot.lab.text.workers import SEQUENTIAL_BYTES
from reefknot.nn.constants import END_OF_LINE
from reefknot.storage.lines import Line, is_gzip
from reefknot.storage.progress import Notify, report_progress

FORMAT: Literal[1] = 1
ID = np.dtype("<i4")
"""Type of the stored ids."""
BUFFER_BYTES = 1 << 18
"""Size of the write buffer."""
_MANY_WORDS = 1_000_000  # learning merges from more words takes seconds


@dataclass(frozen=True, eq=False)
class Split:
    """One encoded text: its ids, and the sizes of the original text.

    A token is an id; with sub-words, one word has several tokens.
    """

    name: str
    ids: NDArray[np.int32]
    """The ids of the text, which are the targets of a language model."""
    words: int
    """Number of whitespace-separated words, without `<eos>`."""
    lines: int
    bytes: int
    """Size of the text in UTF-8, line ends included."""
    unknown: int
    """Number of ids that are `<unk>`."""
    separate_inputs: NDArray[np.int32] | None = None
    """The same text as input ids, if they differ from `ids`: `Vocabulary.spelled_words` have their own input ids."""
    sha256: str | None = None
    """SHA-256 of the file, before the text is cut."""

    @property
    def inputs(self) -> NDArray[np.int32]:
        """The ids that an input end (embedding) reads; `ids` are the targets."""
        if self.separate_inputs is None:
            return self.ids
        return self.separate_inputs

    @property
    def tokens(self) -> int:
        """Number of ids, `<eos>` included."""
        return len(self.ids)


def shorten_split(split: Split, max_tokens: int | None, vocabulary: Vocabulary) -> Split:
    """Return the first `max_tokens` tokens of a text, or the whole text if it is not longer.

    The numbers of words, lines and bytes are estimated in proportion, not counted.
    """
    if max_tokens is None or max_tokens >= split.tokens:
        return split
    if max_tokens < 1:
        raise SettingsError(f"cannot take the first {max_tokens} tokens of a text: must be at least 1")
    ids = split.ids[:max_tokens]
    separate_inputs = split.separate_inputs
    if separate_inputs is not None:
        separate_inputs = separate_inputs[:max_tokens]
    share = max_tokens / split.tokens
    return replace(
        split,
        name=f"shortened {split.name}",
        ids=ids,
        separate_inputs=separate_inputs,
        unknown=vocabulary.count_unknown(ids),
        words=round(split.words * share),
        lines=round(split.lines * share),
        bytes=max(1, round(split.bytes * share)),
        sha256=None,
    )


class _SplitCounts(Settings):
    """The sizes of one split, as they are stored in `counts.json`."""

    tokens: int
    words: int
    lines: int
    bytes: int
    unknown: int


class _CountsFile(Settings):
    """The contents of `counts.json`."""

    format: Literal[1]
    vocabulary: str
    """Fingerprint of the vocabulary."""
    splits: dict[str, _SplitCounts]


def write_encoded(
    folder: Path,
    text_files: TextFiles,
    settings: VocabularySettings,
    notify: Notify,
    vocabulary: Vocabulary | None,
    work_folder: Path,
) -> None:
    """Encode every split into `folder`. Without a `vocabulary`, one is built from the training text.

    Large texts are cut into shards, which several processes count and encode. `work_folder` keeps the finished shards
    until the caller removes it, so that a killed program can continue.
    """
    work_folder.mkdir(parents=True, exist_ok=True)

    # Build the vocabulary.
    word_counts: Counter[str] = Counter()
    if vocabulary is None:
        word_counts = _count_words(text_files, "train", settings, work_folder, notify)
        if settings.bpe is not None and word_counts.total() > _MANY_WORDS:
            notify(f"learning {settings.bpe.merges:,} merges from {len(word_counts):,} distinct words")
        all_counts = None
        if settings.text == "all":
            all_counts = _count_all_words(text_files, settings, work_folder, notify)
        vocabulary = Vocabulary.from_counts(word_counts, settings, all_counts=all_counts)
    if settings.keep_spellings:
        unknown_words = _find_unknown_words(vocabulary, text_files, settings, word_counts, notify)
        vocabulary = replace(vocabulary, spelled_words=unknown_words)
    vocabulary.save(folder / "vocabulary.json")

    # Encode the splits.
    split_counts = {}
    for split in SPLITS:
        split_counts[split] = _write_ids(folder, text_files, split, settings, vocabulary, work_folder, notify)
    if vocabulary.spelled_words:
        for split in SPLITS:
            _write_inputs(folder, text_files, split, settings, vocabulary, notify)

    _check_published(text_files, split_counts, word_counts)
    contents = _CountsFile(format=FORMAT, vocabulary=vocabulary.fingerprint, splits=split_counts)
    (folder / "counts.json").write_text(contents.model_dump_json(indent=2), encoding="utf-8")


def read_encoded(folder: Path) -> tuple[Vocabulary, dict[str, Split]]:
    """Open a folder that `write_encoded` wrote, and return its vocabulary and its splits by name.

    Ids are memory-mapped. Raise a DataError if the folder is damaged.
    """
    counts_path = folder / "counts.json"
    try:
        stored = _CountsFile.model_validate_json(counts_path.read_bytes())
    except (OSError, ValidationError) as error:
        raise DataError(f"{counts_path} is not what was written") from error

    vocabulary = Vocabulary.load(folder / "vocabulary.json")
    if vocabulary.fingerprint != stored.vocabulary:
        raise DataError(f"{folder / 'vocabulary.json'} is not what was written")

    splits = {}
    for split in SPLITS:
        if split not in stored.splits:
            raise DataError(f"{counts_path} is not what was written")
        counts = stored.splits[split]
        ids = read_array(_ids_path(folder, split), ID, counts.tokens)
        inputs = None
        if vocabulary.spelled_words:
            inputs = read_array(_inputs_path(folder, split), ID, counts.tokens)
        splits[split] = Split(
            name=split,
            ids=ids,
            words=counts.words,
            lines=counts.lines,
            bytes=counts.bytes,
            unknown=counts.unknown,
            separate_inputs=inputs,
        )
    return vocabulary, splits


def read_array(path: Path, dtype: np.dtype[Any], length: int) -> NDArray[Any]:
    """Memory-map a file of `length` values of one type. Raise a DataError if the file has another size."""
    expected_bytes = length * dtype.itemsize
    if not path.is_file() or path.stat().st_size != expected_bytes:
        raise DataError(f"{path} does not have the {expected_bytes:,} bytes that were written")
    return np.memmap(path, dtype=dtype, mode="r")


def encode_line(
    tokens: Iterable[str], vocabulary: Vocabulary, unknown: UnknownPolicy, path: Path, line_number: int
) -> list[int]:
    """Return the ids of a line. The error for an unknown word names the file and the line."""
    try:
        return vocabulary.encode(tokens, unknown)
    except DataError as error:
        raise DataError(f"{path}, line {line_number}: {error}") from None


def _find_unknown_words(
    vocabulary: Vocabulary,
    text_files: TextFiles,
    settings: VocabularySettings,
    training_counts: Counter[str],
    notify: Notify,
) -> tuple[str, ...]:
    """Return the words of all splits outside the vocabulary, in the order of their first occurrence.

    `training_counts` holds the words of the training text, so only the other splits are read.
    """
    # A dict is a set that keeps the order of insertion.
    unknown_words = dict.fromkeys(word for word in training_counts if word not in vocabulary)
    for split in SPLITS[1:]:
        for line in _read_lines(text_files, split, settings, "searched", notify):
            unknown_words.update(dict.fromkeys(word for word in line.tokens if word not in vocabulary))
    return tuple(unknown_words)


def _can_shard(text_files: TextFiles, split: str) -> bool:
    """Return whether a split is read in shards: it is large, not cut by the settings, and not compressed."""
    path = text_files.files[split]
    is_cut = split == "train" and bool(text_files.settings.part or text_files.settings.tokens)
    return not is_cut and path.stat().st_size >= SEQUENTIAL_BYTES and not is_gzip(path)


def _count_words(
    text_files: TextFiles, split: str, settings: VocabularySettings, work_folder: Path, notify: Notify
) -> Counter[str]:
    """Return the counts of the words of a split, in the order of their first occurrence."""
    if _can_shard(text_files, split):
        return count_file(
            text_files.files[split], end_of_line=settings.end_of_line, work_folder=work_folder, notify=notify
        )
    word_counts: Counter[str] = Counter()
    for line in _read_lines(text_files, split, settings, "counted", notify):
        word_counts.update(line.tokens)
    return word_counts


def _count_all_words(
    text_files: TextFiles, settings: VocabularySettings, work_folder: Path, notify: Notify
) -> Counter[str]:
    """Return the counts of the words of all splits, with the whole training text even if the settings cut it."""
    uncut = text_files.settings.model_copy(update={"part": None, "tokens": None})
    text_files = replace(text_files, settings=uncut)
    word_counts: Counter[str] = Counter()
    for split in SPLITS:
        word_counts.update(_count_words(text_files, split, settings, work_folder, notify))
    return word_counts


def _write_ids(
    folder: Path,
    text_files: TextFiles,
    split: str,
    settings: VocabularySettings,
    vocabulary: Vocabulary,
    work_folder: Path,
    notify: Notify,
) -> _SplitCounts:
    """Write the ids of one split, and return its sizes."""
    text_path = text_files.files[split]
    if _can_shard(text_files, split):
        shard_sizes = encode_file(
            text_path,
            _ids_path(folder, split),
            folder / "vocabulary.json",
            end_of_line=settings.end_of_line,
            unknown=settings.unknown,
            work_folder=work_folder,
            notify=notify,
        )
        return _check_sizes(_SplitCounts(**shard_sizes), text_path, split)

    num_tokens = num_words = num_lines = num_bytes = num_unknown = 0
    with _ids_path(folder, split).open("wb", BUFFER_BYTES) as ids_file:
        for line in _read_lines(text_files, split, settings, "encoded", notify):
            ids = encode_line(line.tokens, vocabulary, settings.unknown, text_path, line.line_number)
            ids_file.write(np.array(ids, dtype=ID).tobytes())
            num_tokens += len(ids)
            num_words += line.num_words
            num_lines += 1
            num_bytes += line.num_bytes
            if vocabulary.unk is not None:
                num_unknown += ids.count(vocabulary.unk)
    sizes = _SplitCounts(tokens=num_tokens, words=num_words, lines=num_lines, bytes=num_bytes, unknown=num_unknown)
    return _check_sizes(sizes, text_path, split)


def _check_sizes(sizes: _SplitCounts, text_path: Path, split: str) -> _SplitCounts:
    if not sizes.words:
        raise DataError(f"{text_path}: the {split} text has no words")
    return sizes


def _write_inputs(
    folder: Path,
    text_files: TextFiles,
    split: str,
    settings: VocabularySettings,
    vocabulary: Vocabulary,
    notify: Notify,
) -> None:
    """Write the input ids of one split, in which `Vocabulary.spelled_words` have their own ids."""
    with _inputs_path(folder, split).open("wb", BUFFER_BYTES) as inputs_file:
        for line in _read_lines(text_files, split, settings, "spelled", notify):
            inputs = vocabulary.encode_inputs(line.tokens)
            inputs_file.write(np.array(inputs, dtype=ID).tobytes())


def _ids_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.ids"


def _inputs_path(folder: Path, split: str) -> Path:
    return folder / f"{split}.inputs"


class _TokenLine(NamedTuple):
    """The tokens of a line, or of the beginning of a line if the text is cut in the middle of it."""

    line_number: int
    tokens: list[str]
    """The words of the line, and `<eos>` if the settings ask for it."""
    num_words: int
    num_bytes: int


def _read_lines(
    text_files: TextFiles, split: str, settings: VocabularySettings, verb: str, notify: Notify
) -> Iterator[_TokenLine]:
    """Yield the lines of a split, with a line of progress every few seconds: "train: 1,000 tokens encoded"."""
    max_tokens = text_files.settings.tokens if split == "train" else None
    lines = _tokenize_lines(text_files.read_lines(split), settings, max_tokens)
    num_tokens = 0

    def describe_progress(_num_lines: int) -> str:
        return f"{split}: {num_tokens:,} tokens {verb}"

    for line in report_progress(lines, describe_progress, notify):
        yield line
        num_tokens += len(line.tokens)


def _tokenize_lines(
    lines: Iterator[Line], settings: VocabularySettings, max_tokens: int | None
) -> Iterator[_TokenLine]:
    """Yield lines as tokens. With a maximum, stop after that many tokens, in the middle of a line if necessary."""
    remaining = math.inf if max_tokens is None else max_tokens
    for line_number, words, num_bytes in lines:
        tokens = words
        if settings.end_of_line:
            tokens = [*words, END_OF_LINE]
        if len(tokens) > remaining:
            tokens = tokens[: int(remaining)]
            words = words[: int(remaining)]
            num_bytes = len(" ".join(words).encode())
        yield _TokenLine(line_number, tokens, len(words), num_bytes)
        remaining -= len(tokens)
        if remaining <= 0:
            return


def _check_published(text_files: TextFiles, split_counts: dict[str, _SplitCounts], word_counts: Counter[str]) -> None:
    """Compare the numbers of tokens and types with the published numbers, to check that the text is read correctly.

    A cut training text cannot be compared. Types are compared only if the words were counted.
    """
    published = text_files.corpus
    is_cut = bool(text_files.settings.part or text_files.settings.tokens)
    for split, published_tokens in published.tokens.items():
        if split == "train" and is_cut:
            continue
        num_tokens = split_counts[split].words + split_counts[split].lines
        if num_tokens != published_tokens:
            raise DataError(
                f"{text_files.files[split]}: {num_tokens:,} tokens with <eos>, {published_tokens:,} published"
            )

    if published.types is None or is_cut or not word_counts:
        return
    num_types = len(word_counts.keys() | {END_OF_LINE})
    if num_types != published.types:
        raise DataError(f"{text_files.files['train']}: {num_types:,} types with <eos>, {published.types:,} published")
