"""Word vectors in the files of other programs: written whole or not at all, and read back before that is said.

    word2vec          text with a header (Mikolov et al. 2013), fastText's .vec too
    word2vec-binary   the same in binary, as GoogleNews-vectors-negative300.bin
    glove             text without a header (Pennington et al. 2014)
    projector         a folder for TensorBoard
    safetensors       any word, and counts

Reading keeps the first of a word's vectors where a file has several, and shows bytes that are no UTF-8 as \\xNN; both
are told. Writing refuses a word that the format could not give back, and names those that could; what was written is
recognised without its format being named.
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
from reefknot.storage.progress import Say, reported, silent
from reefknot.vectors.binary_files import is_whole, read_binary, write_binary
from reefknot.vectors.contract import Block
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
from reefknot.vectors.word_vectors import Matrix, WordVectors, first_not_finite, shown


@dataclass(frozen=True)
class Format:
    """How a format is read and written, and which words it cannot hold."""

    read: Callable[[Path], Iterator[Block]]
    write: Callable[[WordVectors, Path], Iterator[int]]
    lost: re.Pattern[str] | None
    """Found in words that would not come back; an empty word is lost wherever there is such a pattern."""

    def holds(self, word: str) -> bool:
        return self.lost is None or (word != "" and not self.lost.search(word))


_KNOWN = {
    # Programs differ in which blanks end a word, so none of ASCII's is written into text.
    "word2vec": Format(read_word2vec, write_word2vec, re.compile(r"[ \t\n\r\v\f]")),
    "word2vec-binary": Format(read_binary, write_binary, re.compile(r"[ \n]")),
    "glove": Format(read_glove, write_glove, re.compile(r"[ \t\n\r\v\f]|\A\ufeff")),
    "projector": Format(read_projector, write_projector, re.compile(r"[\t\n\r]|\A\ufeff")),
    "safetensors": Format(read_safetensors, write_safetensors, None),
}
FORMATS = tuple(_KNOWN)
_COMPRESSED = re.compile(rb"\x1f\x8b|PK\x03\x04|BZh[1-9]1AY&SY|\xfd7zXZ")


def read_vectors(
    path: str | Path, format: str | None = None, *, only: Collection[str] | None = None, say: Say = silent
) -> WordVectors:
    """The word vectors of a file, or of the folder of a projector; `only` leaves out all words but these.

    Without a format, it is found out from what the file holds.
    """
    path = Path(path).expanduser()
    return _read(path, _checked(format) if format is not None else find_format(path), str(path), only, say)


def _read(path: Path, format: str, name: str, only: Collection[str] | None = None, say: Say = silent) -> WordVectors:
    """Likewise; `name` is what sentences call the file."""
    gathered = _Gathered(name, only)
    blocks = reported(_KNOWN[format].read(path), lambda _: f"{name}: {gathered.read:,} words read", say)
    try:
        for block in blocks:
            gathered.add(block)
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}") from error
    return gathered.finish(say)


def write_vectors(vectors: WordVectors, path: str | Path, format: str, *, say: Say = silent) -> None:
    """Replace `path` by word vectors. Success means that they were recognised and read back, and are the same.

    Counts are kept by safetensors alone: the other formats have no place for them.
    """
    path = Path(path).expanduser()
    form = _KNOWN[_checked(format)]
    _refuse_words(vectors, format)
    _refuse_place(path, format)
    prepared = durable.temporary(path)
    durable.remove(prepared)
    written = 0
    blocks = reported(
        form.write(vectors, prepared), lambda _: f"{path}: {written:,} of {len(vectors):,} words written", say
    )
    try:
        with durable.writing(path):
            for written in blocks:  # noqa: B007 - what the sentence tells
                pass
            for each in [*prepared.iterdir(), prepared] if prepared.is_dir() else [prepared]:
                durable.sync(each)
        _check_recognised(prepared, vectors, path, format)
        _check_same(vectors, _read(prepared, format, f"{path}, being checked", say=say), path)
        with durable.writing(path):
            _commit(prepared, path)
    except BaseException:
        durable.remove(prepared)
        raise


def find_format(path: Path) -> str:
    """The format of a file, by what it holds, whatever it is called."""
    if path.is_dir():
        if (path / VECTORS).exists() or (path / METADATA).exists():
            return "projector"
        raise DataError(f"{path} is a folder without word vectors: there is no {VECTORS} in it")
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
        raise DataError(f"{path} is compressed; unpack it and name the file inside")
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < os.fstat(stream.fileno()).st_size:
        return "safetensors"
    first, _, rest = start.removeprefix(BOM).partition(b"\n")
    if header := HEADER.fullmatch(first):
        size, dim = int(header[1]), int(header[2])
        printable, whole = is_printable(rest), is_whole(rest, size, dim)
        # Text may be damaged and binary may be cut off; a small file may be both whole and printable.
        if not (is_text(rest, dim) if printable == whole else printable):
            return "word2vec-binary"
        stream.seek(0)
        return "word2vec" if has_header(stream, size, dim) else "glove"
    pieces = first.split()
    if len(pieces) > 1 and is_number(pieces[-1]):
        return "glove"
    raise DataError(f"{path} is no file of word vectors; the formats are: {', '.join(FORMATS)}")


def fingerprint(path: Path) -> str:
    """SHA-256 of what the file, or the folder of a projector, holds."""
    path = Path(path).expanduser()
    cache = cache_folder()
    if not path.is_dir():
        return file_hash(path, cache)
    both = "".join(file_hash(path / name, cache) for name in (VECTORS, METADATA))
    return hashlib.sha256(both.encode()).hexdigest()


class _Gathered:
    """Blocks put together: each word once, in the order of the file."""

    def __init__(self, name: str, only: Collection[str] | None) -> None:
        self.name = name
        self.read = 0
        self._only = None if only is None else frozenset(only)
        self._rows: dict[str, None] = {}
        self._vectors: Matrix = np.empty((0, 0), dtype=np.float32)
        self._counts: list[NDArray[np.int64]] = []
        self._doubles: list[str] = []
        self._strange: list[str] = []

    def add(self, block: Block) -> None:
        words = [self._decode(word) for word in block.words]
        wrong = first_not_finite(block.vectors)
        if wrong is not None:
            raise DataError(
                f"{self.name}: the vector of {shown(words[wrong])} (word {self.read + wrong + 1:,}) holds NaN or a "
                "number too large for float32; mend it or leave it out"
            )
        kept = []
        for row, word in enumerate(words):
            if word in self._rows:
                self._doubles.append(word)
            elif self._only is None or word in self._only:
                self._rows[word] = None
                kept.append(row)
        self.read += len(words)
        self._make_room(block.vectors.shape[1])
        self._vectors[len(self._rows) - len(kept) : len(self._rows)] = block.vectors[kept]
        if block.counts is not None:
            self._counts.append(block.counts[kept])

    def _make_room(self, dim: int) -> None:
        """Rows for all words so far. An array that grows in its place is not there twice, as parts to be joined are."""
        rows = len(self._rows)
        if rows > len(self._vectors) or not self._vectors.shape[1]:
            self._vectors.resize((max(rows, len(self._vectors) * 5 // 4), dim), refcheck=False)

    def _decode(self, word: bytes) -> str:
        try:
            return word.decode()
        except UnicodeDecodeError:
            self._strange.append(word.decode(errors="backslashreplace"))
            return self._strange[-1]

    def finish(self, say: Say) -> WordVectors:
        if not self.read:
            raise DataError(f"{self.name} holds no word vectors")
        if self._strange:
            say(_told(self.name, self._strange, "no UTF-8; such bytes are shown as \\xNN"))
        if self._doubles:
            say(_told(self.name, self._doubles, "there already; the first vector of a word is the one that counts"))
        self._vectors.resize((len(self._rows), self._vectors.shape[1]), refcheck=False)
        return WordVectors(tuple(self._rows), self._vectors, np.concatenate(self._counts) if self._counts else None)


def _told(name: str, words: list[str], what: str) -> str:
    number = "1 word is" if len(words) == 1 else f"{len(words):,} words are"
    return f"{name}: {number} {what} (the first is {shown(words[0])})"


def _checked(format: str) -> str:
    if format not in _KNOWN:
        raise SettingsError(f"no format of word vectors is called {shown(format)}; there are: {', '.join(FORMATS)}")
    return format


def _refuse_words(vectors: WordVectors, format: str) -> None:
    """A word that would not come back is told before anything is written."""
    if not len(vectors):
        raise DataError("there are no words to write")
    form = _KNOWN[format]
    lost = [word for word in vectors.words if not form.holds(word)]
    if lost:
        able = [name for name, each in _KNOWN.items() if all(map(each.holds, lost))]
        more = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
        raise DataError(f"the format {format} cannot hold the word {shown(lost[0])}{more}; use {' or '.join(able)}")


def _refuse_place(path: Path, format: str) -> None:
    if format != "projector":
        if path.is_dir():
            raise SettingsError(f"{path} is a folder; name a file to write")
    elif path.is_dir():
        strangers = sorted({each.name for each in path.iterdir()} - set(FILES))
        if strangers:
            raise SettingsError(
                f"{path} holds {shown(strangers[0])}, which is not ours to replace; name another folder"
            )
    elif path.exists():
        raise SettingsError(f"{path} is a file; name a folder to write")


def _commit(prepared: Path, path: Path) -> None:
    """Rename into place. A folder cannot replace another: the old one steps aside until the new one is there."""
    if not path.is_dir():
        durable.commit(prepared, path)
        return
    # Not named as what is being prepared: that may be removed where a process was killed, and this is all there is.
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
    try:
        found = find_format(prepared)
    except DataError:
        found = None
    if found != format:
        raise DataError(
            f"{path} is not written: a file of the format {format} that begins with the word "
            f"{shown(vectors.words[0])} and its vector would be taken for something else; use safetensors"
        )


def _check_same(wanted: WordVectors, found: WordVectors, path: Path) -> None:
    counted = found.counts is None or (wanted.counts is not None and np.array_equal(wanted.counts, found.counts))
    if counted and wanted.words == found.words and np.array_equal(wanted.vectors_VD, found.vectors_VD):
        return
    pairs = zip(wanted.words, found.words, strict=False)
    word = next((one for one, other in pairs if one != other), "")
    raise DataError(
        f"{path} is not written: what was written does not read back the same{f' at {shown(word)}' if word else ''}"
    )
