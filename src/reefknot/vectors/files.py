"""Read and write word vectors in the file formats of other programs.

    import reefknot as rk

    vectors = rk.read_vectors("glove.6B.100d.txt")              # the format is recognised from the content
    rk.write_vectors(vectors, "glove.bin", "word2vec-binary")

Formats, and the modules of this folder that read and write them block by block:

    word2vec          text_files.py          text with a header (Mikolov et al. 2013), like fastText's .vec files
    word2vec-binary   binary_files.py        the same in binary form, such as GoogleNews-vectors-negative300.bin
    glove             text_files.py          text without a header (Pennington et al. 2014)
    projector         projector.py           a folder for TensorBoard
    safetensors       safetensors_files.py   any word, and counts
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError, SettingsError
from reefknot.storage import files as durable
from reefknot.storage.cache import cache_folder, file_hash
from reefknot.storage.progress import Notify, report_progress, silent
from reefknot.vectors.binary_files import is_complete_binary, read_binary, write_binary
from reefknot.vectors.projector import FILES, METADATA, VECTORS, read_projector, write_projector
from reefknot.vectors.safetensors_files import read_safetensors, write_safetensors
from reefknot.vectors.text_files import (
    BOM,
    HEADER,
    has_header,
    is_number,
    is_printable,
    looks_like_text,
    read_glove,
    read_word2vec,
    write_glove,
    write_word2vec,
)
from reefknot.vectors.word_vectors import Block, Float32Array, WordVectors, first_non_finite_row, quote


@dataclass(frozen=True)
class Format:
    """A file format: its reader, its writer, and a pattern of the words that it cannot store."""

    read: Callable[[Path], Iterator[Block]]
    """Yields the words and vectors of a file in blocks."""
    write: Callable[[WordVectors, Path], Iterator[int]]
    """Writes a file, and yields the number of words written so far."""
    unsupported_word: re.Pattern[str] | None
    """Matches words that would not be read back the same. A format with a pattern cannot store the empty word either.
    None means that the format can store any word."""

    def supports(self, word: str) -> bool:
        """Return whether the format can store a word."""
        if self.unsupported_word is None:
            return True
        return word != "" and not self.unsupported_word.search(word)


_FORMATS = {
    # Programs differ in which whitespace ends a word, so the text formats reject all ASCII whitespace.
    "word2vec": Format(read_word2vec, write_word2vec, re.compile(r"[ \t\n\r\v\f]")),
    "word2vec-binary": Format(read_binary, write_binary, re.compile(r"[ \n]")),
    "glove": Format(read_glove, write_glove, re.compile(r"[ \t\n\r\v\f]|\A\ufeff")),
    "projector": Format(read_projector, write_projector, re.compile(r"[\t\n\r]|\A\ufeff")),
    "safetensors": Format(read_safetensors, write_safetensors, None),
}
FORMATS = tuple(_FORMATS)
"""The names of all formats."""
# The first bytes of gzip, zip, bzip2 and xz files.
_COMPRESSED = re.compile(rb"\x1f\x8b|PK\x03\x04|BZh[1-9]1AY&SY|\xfd7zXZ")


def read_vectors(
    path: str | Path, format: str | None = None, *, only: Collection[str] | None = None, notify: Notify = silent
) -> WordVectors:
    """Read word vectors from a file or from a projector folder.

    If a file has several vectors for a word, the first is used. Bytes that are not UTF-8 are read as \\xNN. Both are
    reported.

    Args:
        path: The file or folder.
        format: `word2vec`, `word2vec-binary`, `glove`, `projector` or `safetensors`. By default the format is detected
            from the content.
        only: Read the vectors of these words only. By default all words are read.
        notify: Called with lines of progress, and with notes about repeated words and invalid bytes.

    Returns:
        The words and their vectors, in the order of the file.
    """
    path = Path(path).expanduser()
    if format is None:
        format = detect_format(path)
    else:
        _check_format(format)
    return _read_file(path, format, str(path), only, notify)


def write_vectors(vectors: WordVectors, path: str | Path, format: str, *, notify: Notify = silent) -> None:
    """Write word vectors to a file, or to a folder for the format projector.

    The file is written under a temporary name, read back and compared before it replaces `path`. So `path` is complete
    or unchanged. Only the format safetensors stores counts. Words that a format cannot store raise a `DataError`.

    Args:
        vectors: The words and vectors to write.
        path: The file or folder to create or replace.
        format: `word2vec`, `word2vec-binary`, `glove`, `projector` or `safetensors`.
        notify: Called with lines of progress.
    """
    path = Path(path).expanduser()
    _check_format(format)
    _check_words(vectors, format)
    _check_destination(path, format)
    temporary = durable.temporary_path(path)
    durable.remove(temporary)
    try:
        with durable.writing(path):
            _write_file(vectors, temporary, path, format, notify)
        _check_detected_format(temporary, vectors, path, format)
        vectors_read_back = _read_file(temporary, format, f"{path} (verification)", notify=notify)
        _check_equal(vectors, vectors_read_back, path)
        with durable.writing(path):
            _move_into_place(temporary, path)
    except BaseException:
        durable.remove(temporary)
        raise


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of the content of a file, or of the two data files of a projector folder."""
    path = Path(path).expanduser()
    cache = cache_folder()
    if not path.is_dir():
        return file_hash(path, cache)
    vectors_hash = file_hash(path / VECTORS, cache)
    metadata_hash = file_hash(path / METADATA, cache)
    return hashlib.sha256(f"{vectors_hash}{metadata_hash}".encode()).hexdigest()


def _check_format(format: str) -> None:
    if format not in _FORMATS:
        raise SettingsError(f"unknown format of word vectors {quote(format)}; the formats are {', '.join(FORMATS)}")


# -- detecting the format ------------------------------------------------------------------------------------------


def detect_format(path: Path) -> str:
    """Return the format of a file or folder. Its content decides, not its name."""
    if path.is_dir():
        if (path / VECTORS).exists() or (path / METADATA).exists():
            return "projector"
        raise DataError(f"{path} is a folder without word vectors: it has no {VECTORS}")
    try:
        with path.open("rb") as file:
            return _detect_file_format(file, path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _detect_file_format(file: BinaryIO, path: Path) -> str:
    """Return the format of an open file. `path` is for error messages."""
    beginning = file.read(1 << 20)
    if not beginning:
        raise DataError(f"{path} is empty")
    if _COMPRESSED.match(beginning):
        raise DataError(f"{path} is compressed; unpack it and pass the unpacked file")

    # A safetensors file starts with the length of its JSON header in eight bytes.
    json_length = int.from_bytes(beginning[:8], "little")
    file_size = os.fstat(file.fileno()).st_size
    if beginning[8:9] == b"{" and json_length < file_size:
        return "safetensors"

    first_line, _, content = beginning.removeprefix(BOM).partition(b"\n")
    header = HEADER.fullmatch(first_line)
    if header:
        num_words = int(header["num_words"])
        dim = int(header["dim"])
        if not _is_text_after_header(content, num_words, dim):
            return "word2vec-binary"
        file.seek(0)
        if has_header(file, num_words, dim):
            return "word2vec"
        return "glove"

    fields = first_line.split()
    if len(fields) > 1 and is_number(fields[-1]):
        return "glove"
    raise DataError(f"{path} is not a file of word vectors in any of the formats {', '.join(FORMATS)}")


def _is_text_after_header(content: bytes, num_words: int, dim: int) -> bool:
    """Return whether the vectors after a header are text; if not, they are binary.

    Usually just one of two conditions is true: text is printable, and binary content is complete. Damaged text and
    truncated binary files are neither, and a small binary file may be both. Then the fields decide.
    """
    could_be_text = is_printable(content)
    could_be_binary = is_complete_binary(content, num_words, dim)
    if could_be_text == could_be_binary:
        return looks_like_text(content, dim)
    return could_be_text


# -- reading -------------------------------------------------------------------------------------------------------


def _read_file(
    path: Path, format: str, name: str, only: Collection[str] | None = None, notify: Notify = silent
) -> WordVectors:
    """Read word vectors, all or only those of the words in `only`. Messages call the file `name`."""
    collector = _VectorCollector(name, only)
    blocks = _FORMATS[format].read(path)
    blocks = report_progress(blocks, lambda _: f"{name}: {collector.words_read:,} words read", notify)
    try:
        for block in blocks:
            collector.add(block)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}") from error
    return collector.finish(notify)


class _VectorCollector:
    """Joins the blocks of a file into word vectors, in the order of the file. Repeated words are skipped.

    Args:
        name: The name of the file in messages.
        only: The words to collect. None means all words.
    """

    def __init__(self, name: str, only: Collection[str] | None) -> None:
        self.name = name
        self.words_read = 0
        self._only = None if only is None else frozenset(only)
        self._words: dict[str, None] = {}  # the keys are the collected words, in the order of the file
        self._vectors: Float32Array = np.empty((0, 0), dtype=np.float32)  # may have more rows than there are words
        self._counts: list[NDArray[np.int64]] = []
        self._duplicate_words: list[str] = []
        self._undecodable_words: list[str] = []

    def add(self, block: Block) -> None:
        """Add the new words of a block."""
        words = [self._decode(encoded_word) for encoded_word in block.words]
        bad_row = first_non_finite_row(block.vectors_BD)
        if bad_row is not None:
            raise DataError(
                f"{self.name}: the vector of {quote(words[bad_row])} (word {self.words_read + bad_row + 1:,}) "
                "contains NaN or a number too large for float32; correct it or remove the word"
            )

        num_words_before = len(self._words)
        new_rows = []  # the rows of the block whose words are collected
        for row, word in enumerate(words):
            if word in self._words:
                self._duplicate_words.append(word)
            elif self._only is None or word in self._only:
                self._words[word] = None
                new_rows.append(row)
        self.words_read += len(words)

        self._reserve_rows(dim=block.vectors_BD.shape[1])
        self._vectors[num_words_before : len(self._words)] = block.vectors_BD[new_rows]
        if block.counts is not None:
            self._counts.append(block.counts[new_rows])

    def _reserve_rows(self, dim: int) -> None:
        """Make the matrix large enough for all words so far.

        It is resized in place, because concatenating blocks at the end would need twice the memory.
        """
        num_words = len(self._words)
        num_rows, current_dim = self._vectors.shape
        if num_words > num_rows or current_dim == 0:
            new_num_rows = max(num_words, num_rows * 5 // 4)
            self._vectors.resize((new_num_rows, dim), refcheck=False)

    def _decode(self, encoded_word: bytes) -> str:
        """Decode a word, with \\xNN for each byte that is not valid UTF-8."""
        try:
            return encoded_word.decode()
        except UnicodeDecodeError:
            word = encoded_word.decode(errors="backslashreplace")
            self._undecodable_words.append(word)
            return word

    def finish(self, notify: Notify) -> WordVectors:
        """Return the vectors of all blocks, and report words that are repeated or not valid UTF-8."""
        if not self.words_read:
            raise DataError(f"{self.name} contains no word vectors")
        if self._undecodable_words:
            words_are = _count_words(self._undecodable_words)
            notify(f"{self.name}: {words_are} not valid UTF-8; the invalid bytes are read as \\xNN")
        if self._duplicate_words:
            words_are = _count_words(self._duplicate_words)
            notify(f"{self.name}: {words_are} repeated; only the first vector of a word is kept")
        self._vectors.resize((len(self._words), self._vectors.shape[1]), refcheck=False)
        counts = np.concatenate(self._counts) if self._counts else None
        return WordVectors(tuple(self._words), self._vectors, counts)


def _count_words(words: list[str]) -> str:
    """Return the number of words, an example and the verb: "1 word ('a') is"."""
    if len(words) == 1:
        return f"1 word ({quote(words[0])}) is"
    return f"{len(words):,} words (the first is {quote(words[0])}) are"


# -- writing -------------------------------------------------------------------------------------------------------


def _check_words(vectors: WordVectors, format: str) -> None:
    """Reject words that would not be read back, before anything is written."""
    if not len(vectors):
        raise DataError("there are no words to write")
    unsupported_words = [word for word in vectors.words if not _FORMATS[format].supports(word)]
    if not unsupported_words:
        return

    other_formats = [name for name in FORMATS if all(map(_FORMATS[name].supports, unsupported_words))]
    first_word = quote(unsupported_words[0])
    if len(unsupported_words) > 1:
        first_word += f" and {len(unsupported_words) - 1:,} more"
    raise DataError(f"the format {format} cannot store the word {first_word}; use {' or '.join(other_formats)}")


def _check_destination(path: Path, format: str) -> None:
    """Reject a path where something other than word vectors would be replaced."""
    if format != "projector":
        if path.is_dir():
            raise SettingsError(f"{path} is a folder; use the path of a file")
        return

    if path.exists() and not path.is_dir():
        raise SettingsError(f"{path} is a file; use the path of a folder")
    if path.is_dir():
        other_files = sorted({file.name for file in path.iterdir()} - set(FILES))
        if other_files:
            raise SettingsError(
                f"{path} contains {quote(other_files[0])}, which is not a file of the projector and would be lost; "
                "use another folder"
            )


def _write_file(vectors: WordVectors, temporary: Path, path: Path, format: str, notify: Notify) -> None:
    """Write a temporary file or folder and flush it to disk. `path` is its later name, for the progress messages."""
    words_written = 0
    write_progress = report_progress(
        _FORMATS[format].write(vectors, temporary),
        lambda _: f"{path}: {words_written:,} of {len(vectors):,} words written",
        notify,
    )
    for words_written in write_progress:  # noqa: B007 - the progress message uses it
        pass

    if temporary.is_dir():
        for file in temporary.iterdir():
            durable.sync(file)
    durable.sync(temporary)


def _check_detected_format(temporary: Path, vectors: WordVectors, path: Path, format: str) -> None:
    """Check that the format of the written file is detected correctly."""
    try:
        detected_format = detect_format(temporary)
    except DataError:
        detected_format = None
    if detected_format != format:
        raise DataError(
            f"{path} is not written: with {quote(vectors.words[0])} as its first word, a file in the format {format} "
            "would be mistaken for another kind of file; use safetensors"
        )


def _check_equal(written: WordVectors, read_back: WordVectors, path: Path) -> None:
    """Check that the file was read back with the same words and vectors, and the same counts if the format has any."""
    same_words = written.words == read_back.words
    same_vectors = np.array_equal(written.vectors_VD, read_back.vectors_VD)
    same_counts = True
    if read_back.counts is not None:
        same_counts = written.counts is not None and np.array_equal(written.counts, read_back.counts)
    if same_words and same_vectors and same_counts:
        return

    location = ""
    for written_word, word_read_back in zip(written.words, read_back.words, strict=False):
        if written_word != word_read_back:
            location = f" at {quote(written_word)}"
            break
    raise DataError(f"{path} is not written: the written data was not read back the same{location}")


def _move_into_place(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`. A folder cannot replace a folder, so the old one is renamed first."""
    if not path.is_dir():
        durable.commit(temporary, path)
        return
    # Not a temporary name, because files with temporary names are deleted after a crash. This may be the only copy.
    backup = path.with_name(f"{path.name}.old-{os.getpid()}")
    try:
        durable.commit(path, backup)
        durable.commit(temporary, path)
    finally:
        if path.exists():
            durable.remove(backup)
        else:
            durable.commit(backup, path)
