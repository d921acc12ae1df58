"""Lines of words: the one place where bytes become words.

Text is UTF-8. A line ends at `\\n` and nowhere else; words are what stands between ASCII whitespace (space,
tab, carriage return, vertical tab, form feed), so a no-break space or another Unicode space stays inside its
word, and the published counts of Penn Treebank and WikiText-2 hold. A leading byte order mark is dropped. A file whose
name ends in .gz is unpacked as it is read.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from reefknot.errors import DataError

T = TypeVar("T")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """One line of a text: its number from 1, its words, and its size in bytes with the line end."""

    number: int
    words: list[str]
    size: int


def read_file(path: Path) -> Iterator[Line]:
    """The lines of a file, read as they are asked for; the file is never held in memory."""
    with _opened(path) as stream:
        yield from read_stream(stream, str(path))


def read_plain(path: Path) -> Iterator[str]:
    """The lines of a file as they stand there, without their ends."""
    with _opened(path) as stream:
        yield from (text for _, text, _ in _read(stream, str(path), _without_end))


def is_packed(path: Path) -> bool:
    """Whether a file is packed by gzip, by its name."""
    return path.suffix.lower() == ".gz"


def count_lines(path: Path) -> int:
    """How many lines a file has, without looking at its words."""
    with _opened(path) as stream:
        return sum(1 for _ in stream)


def words_in(text: str, where: str) -> list[str]:
    """The words of a text in memory, cut as those of a corpus are."""
    return [word for line in read_text(text, where) for word in line.words]


def read_text(text: str, where: str) -> Iterator[Line]:
    """The lines of a text in memory; `where` names it in messages."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start} is not valid Unicode; give UTF-8 text") from error
    return read_stream(io.BytesIO(data), where)


def read_stream(stream: Iterable[bytes], where: str) -> Iterator[Line]:
    """The lines of what gives them as bytes, such as standard input; `where` names it in messages."""
    return (Line(*found) for found in _read(stream, where, _split))


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[bytes]]:
    try:
        with gzip.open(path) if is_packed(path) else path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be unpacked: {error}; copy it anew") from error


def _read(lines: Iterable[bytes], where: str, parse: Callable[[bytes], T]) -> Iterator[tuple[int, T, int]]:
    """Each line's number, what `parse` makes of it, and its size."""
    offset = 0
    for number, raw in enumerate(lines, start=1):
        line = raw
        if number == 1 and line.startswith(_BYTE_ORDER_MARK):
            line = line[len(_BYTE_ORDER_MARK) :]
            offset = len(_BYTE_ORDER_MARK)
        nul = line.find(b"\0")
        if nul >= 0:
            raise DataError(f"{where}, line {number}: NUL byte at byte {offset + nul}; is this a text file?")
        try:
            found = parse(line)
        except UnicodeDecodeError:
            bad = _first_bad_byte(line)
            raise DataError(
                f"{where}, line {number}: byte {offset + bad} (0x{line[bad]:02x}) is not valid UTF-8;"
                " convert the text to UTF-8"
            ) from None
        yield number, found, len(line)
        offset += len(line)


def _split(line: bytes) -> list[str]:
    # bytes.split knows ASCII whitespace only, str.split all of Unicode's. Joining before decoding keeps the
    # work in two calls; no word can hold the joining character.
    words = line.split()
    return b"\n".join(words).decode().split("\n") if words else []


def _without_end(line: bytes) -> str:
    return line.removesuffix(b"\n").removesuffix(b"\r").decode()


def _first_bad_byte(line: bytes) -> int:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return error.start
    raise AssertionError("the line is valid UTF-8")
