"""Reading lines of words. This is the only module that splits bytes into words.

Text is UTF-8. A line ends at `\\n` and nowhere else. Words are separated by ASCII whitespace (space, tab, carriage
return, vertical tab, form feed). A no-break space or another Unicode space is part of its word, because only then do
the counts of Penn Treebank and WikiText-2 equal the published ones. A leading byte order mark is dropped. A file whose
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
    """One line of a text: its number, counted from 1, its words, and its size in bytes including the line end."""

    number: int
    words: list[str]
    size: int


def read_file(path: Path) -> Iterator[Line]:
    """Yield the lines of a file. The file is never held in memory as a whole."""
    with _opened(path) as stream:
        yield from read_stream(stream, str(path))


def read_plain(path: Path) -> Iterator[str]:
    """Yield the lines of a file as strings, without their line ends."""
    with _opened(path) as stream:
        yield from (text for _, text, _ in _read(stream, str(path), _without_line_end))


def is_gzip(path: Path) -> bool:
    """Return whether the name of a file ends in .gz."""
    return path.suffix.lower() == ".gz"


def count_lines(path: Path) -> int:
    """Return the number of lines in a file."""
    with _opened(path) as stream:
        return sum(1 for _ in stream)


def words_in(text: str, where: str) -> list[str]:
    """Return the words of a string, split like the words of a file; `where` names the string in error messages."""
    return [word for line in read_text(text, where) for word in line.words]


def read_text(text: str, where: str) -> Iterator[Line]:
    """Yield the lines of a string; `where` names it in error messages."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start} is not valid Unicode; give UTF-8 text") from error
    return read_stream(io.BytesIO(data), where)


def read_stream(stream: Iterable[bytes], where: str) -> Iterator[Line]:
    """Yield the lines of a binary stream, such as standard input; `where` names it in error messages."""
    return (Line(*line) for line in _read(stream, where, _split))


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[bytes]]:
    try:
        with gzip.open(path) if is_gzip(path) else path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be unpacked: {error}; download it again") from error


def _read(lines: Iterable[bytes], where: str, parse: Callable[[bytes], T]) -> Iterator[tuple[int, T, int]]:
    """Yield the number of each line, the result of `parse`, and the size of the line in bytes."""
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
            parsed = parse(line)
        except UnicodeDecodeError:
            bad = _first_bad_byte(line)
            raise DataError(
                f"{where}, line {number}: byte {offset + bad} (0x{line[bad]:02x}) is not valid UTF-8;"
                " convert the text to UTF-8"
            ) from None
        yield number, parsed, len(line)
        offset += len(line)


def _split(line: bytes) -> list[str]:
    # bytes.split splits at ASCII whitespace only, str.split at all of Unicode. Joining the words before they are
    # decoded takes two calls instead of one per word; no word contains the line end.
    words = line.split()
    return b"\n".join(words).decode().split("\n") if words else []


def _without_line_end(line: bytes) -> str:
    return line.removesuffix(b"\n").removesuffix(b"\r").decode()


def _first_bad_byte(line: bytes) -> int:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return error.start
    raise AssertionError("the line is valid UTF-8")
