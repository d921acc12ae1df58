"""Read and write word vectors in the file formats of other programs.

    word2vec          text with a header (Mikolov et al. 2013), also fastText's .vec
    word2vec-binary   the same in binary, such as GoogleNews-vectors-negative300.bin
    glove             text without a header (Pennington et al. 2014)
    projector         a folder for TensorBoard
    safetensors       any word, and counts

The format of a file is recognised from its content. If a file has several vectors for a word, the first is used. Bytes
that are not UTF-8 are read as \\xNN. Both are reported.

Words that a format cannot store are rejected with a message that names other formats. A file is written under a
temporary name, read back and compared before it replaces `path`, so it is complete or absent.
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
from reefknot.vectors.binary_files import is_complete, read_binary, write_binary
from reefknot.vectors.projector import FILES, METADATA, VECTORS, read_projector, write_projector
from reefknot.vectors.safetensors_files import read_safetensors, write_safetensors
from reefknot.vectors.text_files import (
    BOM,
    HEADER,
    has_header,
    is_number,
    is_printable,
    is_text,
    read_glove,
    read_word2vec,
    write_glove,
    write_word2vec,
)
from reefknot.vectors.word_vectors import Block, Matrix, WordVectors, first_non_finite_row, quote


@dataclass(frozen=True)
class Format:
    """A file format: its reader, its writer, and a pattern of the words that it cannot store."""

    read: Callable[[Path], Iterator[Block]]
    write: Callable[[WordVectors, Path], Iterator[int]]
    unsupported: re.Pattern[str] | None
    """Matches words that would not be read back the same. A format with a pattern cannot store the empty word either.
    None means that the format can store any word."""

    def supports(self, word: str) -> bool:
        """Return whether the format can store a word."""
        return self.unsupported is None or (word != "" and not self.unsupported.search(word))


_FORMATS = {
    # Programs differ in which whitespace ends a word, so the text formats reject all ASCII whitespace.
    "word2vec": Format(read_word2vec, write_word2vec, re.compile(r"[ \t\n\r\v\f]")),
    "word2vec-binary": Format(read_binary, write_binary, re.compile(r"[ \n]")),
    "glove": Format(read_glove, write_glove, re.compile(r"[ \t\n\r\v\f]|\A\ufeff")),
    "projector": Format(read_projector, write_projector, re.compile(r"[\t\n\r]|\A\ufeff")),
    "safetensors": Format(read_safetensors, write_safetensors, None),
}
FORMATS = tuple(_FORMATS)
_COMPRESSED = re.compile(rb"\x1f\x8b|PK\x03\x04|BZh[1-9]1AY&SY|\xfd7zXZ")


def read_vectors(
    path: str | Path, format: str | None = None, *, only: Collection[str] | None = None, notify: Notify = silent
) -> WordVectors:
    """Read word vectors from a file or from a projector folder.

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
    return _read(path, _check_format(format) if format is not None else detect_format(path), str(path), only, notify)


def _read(
    path: Path, format: str, name: str, only: Collection[str] | None = None, notify: Notify = silent
) -> WordVectors:
    """Read word vectors. Messages call the file `name`."""
    collector = _Collector(name, only)
    blocks = report_progress(_FORMATS[format].read(path), lambda _: f"{name}: {collector.words_read:,} words read", notify)
    try:
        for block in blocks:
            collector.add(block)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}") from error
    return collector.finish(notify)


def write_vectors(vectors: WordVectors, path: str | Path, format: str, *, notify: Notify = silent) -> None:
    """Write word vectors to a file, or to a folder for the format projector.

    An existing file is replaced only after the new file has been read back and compared. Only the format safetensors
    stores counts.

    Args:
        vectors: The words and vectors to write.
        path: The file or folder to create or replace.
        format: `word2vec`, `word2vec-binary`, `glove`, `projector` or `safetensors`.
        notify: Called with lines of progress.
    """
    path = Path(path).expanduser()
    file_format = _FORMATS[_check_format(format)]
    _check_words(vectors, format)
    _check_destination(path, format)
    prepared = durable.temporary_path(path)
    durable.remove(prepared)
    written = 0
    progress = report_progress(
        file_format.write(vectors, prepared), lambda _: f"{path}: {written:,} of {len(vectors):,} words written", notify
    )
    try:
        with durable.writing(path):
            for written in progress:  # noqa: B007 - the progress message uses it
                pass
            for part in [*prepared.iterdir(), prepared] if prepared.is_dir() else [prepared]:
                durable.sync(part)
        _check_recognised(prepared, vectors, path, format)
        _check_same(vectors, _read(prepared, format, f"{path} (verification)", notify=notify), path)
        with durable.writing(path):
            _commit(prepared, path)
    except BaseException:
        durable.remove(prepared)
        raise


def detect_format(path: Path) -> str:
    """Return the format of a file or folder. Its content decides, not its name."""
    if path.is_dir():
        if (path / VECTORS).exists() or (path / METADATA).exists():
            return "projector"
        raise DataError(f"{path} is a folder without word vectors: it has no {VECTORS}")
    try:
        with path.open("rb") as stream:
            return _format_of(stream, path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _format_of(stream: BinaryIO, path: Path) -> str:
    start = stream.read(1 << 20)
    if not start:
        raise DataError(f"{path} is empty")
    if _COMPRESSED.match(start):
        raise DataError(f"{path} is compressed; unpack it and pass the unpacked file")
    # A safetensors file starts with the length of its JSON header in eight bytes.
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < os.fstat(stream.fileno()).st_size:
        return "safetensors"
    first_line, _, content = start.removeprefix(BOM).partition(b"\n")
    if header := HEADER.fullmatch(first_line):
        size, dim = int(header[1]), int(header[2])
        printable, complete = is_printable(content), is_complete(content, size, dim)
        # Usually just one of the two is true: text is printable, and binary content is complete. Damaged text and
        # truncated binary files are neither, and a small binary file may be both. Then the fields decide.
        if not (is_text(content, dim) if printable == complete else printable):
            return "word2vec-binary"
        stream.seek(0)
        return "word2vec" if has_header(stream, size, dim) else "glove"
    fields = first_line.split()
    if len(fields) > 1 and is_number(fields[-1]):
        return "glove"
    raise DataError(f"{path} is not a file of word vectors in any of the formats {', '.join(FORMATS)}")


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of the content of a file, or of the two data files of a projector folder."""
    path = Path(path).expanduser()
    cache = cache_folder()
    if not path.is_dir():
        return file_hash(path, cache)
    hashes = "".join(file_hash(path / name, cache) for name in (VECTORS, METADATA))
    return hashlib.sha256(hashes.encode()).hexdigest()


class _Collector:
    """Joins the blocks of a file into word vectors, in the order of the file. Repeated words are skipped."""

    def __init__(self, name: str, only: Collection[str] | None) -> None:
        self.name = name
        self.words_read = 0
        self._only = None if only is None else frozenset(only)
        self._words: dict[str, None] = {}
        self._vectors: Matrix = np.empty((0, 0), dtype=np.float32)
        self._counts: list[NDArray[np.int64]] = []
        self._duplicates: list[str] = []
        self._undecodable: list[str] = []

    def add(self, block: Block) -> None:
        """Add the new words of a block."""
        words = [self._decode(word) for word in block.words]
        bad_row = first_non_finite_row(block.vectors_BD)
        if bad_row is not None:
            raise DataError(
                f"{self.name}: the vector of {quote(words[bad_row])} (word {self.words_read + bad_row + 1:,}) "
                "contains NaN or a number too large for float32; correct it or remove the word"
            )
        new_rows = []
        for row, word in enumerate(words):
            if word in self._words:
                self._duplicates.append(word)
            elif self._only is None or word in self._only:
                self._words[word] = None
                new_rows.append(row)
        self.words_read += len(words)
        self._reserve(block.vectors_BD.shape[1])
        self._vectors[len(self._words) - len(new_rows) : len(self._words)] = block.vectors_BD[new_rows]
        if block.counts is not None:
            self._counts.append(block.counts[new_rows])

    def _reserve(self, dim: int) -> None:
        """Make the matrix large enough for all words so far.

        It is resized in place, because concatenating blocks at the end would need twice the memory.
        """
        rows = len(self._words)
        if rows > len(self._vectors) or not self._vectors.shape[1]:
            self._vectors.resize((max(rows, len(self._vectors) * 5 // 4), dim), refcheck=False)

    def _decode(self, word: bytes) -> str:
        try:
            return word.decode()
        except UnicodeDecodeError:
            self._undecodable.append(word.decode(errors="backslashreplace"))
            return self._undecodable[-1]

    def finish(self, notify: Notify) -> WordVectors:
        """Return the vectors of all blocks, and report irregular words."""
        if not self.words_read:
            raise DataError(f"{self.name} contains no word vectors")
        if self._undecodable:
            notify(f"{self.name}: {_describe(self._undecodable)} not valid UTF-8; the invalid bytes are read as \\xNN")
        if self._duplicates:
            notify(f"{self.name}: {_describe(self._duplicates)} repeated; only the first vector of a word is kept")
        self._vectors.resize((len(self._words), self._vectors.shape[1]), refcheck=False)
        return WordVectors(tuple(self._words), self._vectors, np.concatenate(self._counts) if self._counts else None)


def _describe(words: list[str]) -> str:
    """Return the number of words, an example and the verb: "1 word ('a') is"."""
    if len(words) == 1:
        return f"1 word ({quote(words[0])}) is"
    return f"{len(words):,} words (the first is {quote(words[0])}) are"


def _check_format(format: str) -> str:
    if format not in _FORMATS:
        raise SettingsError(f"unknown format of word vectors {quote(format)}; the formats are {', '.join(FORMATS)}")
    return format


def _check_words(vectors: WordVectors, format: str) -> None:
    """Reject words that would not be read back, before anything is written."""
    if not len(vectors):
        raise DataError("there are no words to write")
    unsupported = [word for word in vectors.words if not _FORMATS[format].supports(word)]
    if unsupported:
        alternatives = [name for name, other in _FORMATS.items() if all(map(other.supports, unsupported))]
        more = f" and {len(unsupported) - 1:,} more" if len(unsupported) > 1 else ""
        raise DataError(
            f"the format {format} cannot store the word {quote(unsupported[0])}{more}; use {' or '.join(alternatives)}"
        )


def _check_destination(path: Path, format: str) -> None:
    """Reject a path where something other than word vectors would be replaced."""
    if format != "projector":
        if path.is_dir():
            raise SettingsError(f"{path} is a folder; name a file to write")
    elif path.is_dir():
        foreign = sorted({file.name for file in path.iterdir()} - set(FILES))
        if foreign:
            raise SettingsError(
                f"{path} contains {quote(foreign[0])}, which is not a file of the projector and would be lost; "
                "name another folder"
            )
    elif path.exists():
        raise SettingsError(f"{path} is a file; name a folder to write")


def _commit(prepared: Path, path: Path) -> None:
    """Rename `prepared` to `path`. A folder cannot replace a folder, so the old one is renamed first."""
    if not path.is_dir():
        durable.commit(prepared, path)
        return
    # Not a temporary name, because files with temporary names are deleted after a crash. This may be the only copy.
    old = path.with_name(f"{path.name}.old-{os.getpid()}")
    try:
        durable.commit(path, old)
        durable.commit(prepared, path)
    finally:
        if path.exists():
            durable.remove(old)
        else:
            durable.commit(old, path)


def _check_recognised(prepared: Path, vectors: WordVectors, path: Path, format: str) -> None:
    """Check that the format of the written file is detected correctly."""
    try:
        detected = detect_format(prepared)
    except DataError:
        detected = None
    if detected != format:
        raise DataError(
            f"{path} is not written: with {quote(vectors.words[0])} as its first word, a file in the format {format} "
            "would be mistaken for another kind of file; use safetensors"
        )


def _check_same(expected: WordVectors, actual: WordVectors, path: Path) -> None:
    """Check that the file was read back with the same words and vectors, and the same counts if the format has any."""
    same_counts = actual.counts is None or (
        expected.counts is not None and np.array_equal(expected.counts, actual.counts)
    )
    if same_counts and expected.words == actual.words and np.array_equal(expected.vectors_VD, actual.vectors_VD):
        return
    pairs = zip(expected.words, actual.words, strict=False)
    first_difference = next((word for word, read_back in pairs if word != read_back), None)
    at = "" if first_difference is None else f" at {quote(first_difference)}"
    raise DataError(f"{path} is not written: the written data was not read back the same{at}")
