"""Lines of words: the one place where bytes become words.

Text is UTF-8. A line ends at `\\n` and nowhere else; words are what stands between ASCII whitespace (space,
tab, carriage return, vertical tab, form feed), so a no-break space or another Unicode space stays inside its
word, and the published counts of Penn Treebank and WikiText-2 hold. A leading byte order mark is dropped.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from reefknot.errors import DataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """One line of a text: its number from 1, its words, and its size in bytes with the line end."""

    number: int
    words: list[str]
    size: int


def read_file(path: Path) -> Iterator[Line]:
    """The lines of a file, read as they are asked for; the file is never held in memory."""
    with _opened(path) as stream:
        yield from _read(stream, str(path))


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
    return _read(io.BytesIO(data), where)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as stream:
            yield stream
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _read(lines: Iterable[bytes], where: str) -> Iterator[Line]:
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
            words = _split(line)
        except UnicodeDecodeError:
            bad = _first_bad_byte(line)
            raise DataError(
                f"{where}, line {number}: byte {offset + bad} (0x{line[bad]:02x}) is not valid UTF-8;"
                " convert the text to UTF-8"
            ) from None
        yield Line(number, words, len(line))
        offset += len(line)


def _split(line: bytes) -> list[str]:
    # bytes.split knows ASCII whitespace only, str.split all of Unicode's. Joining before decoding keeps the
    # work in two calls; no word can hold the joining character.
    words = line.split()
    return b"\n".join(words).decode().split("\n") if words else []


def _first_bad_byte(line: bytes) -> int:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return error.start
    raise AssertionError("the line is valid UTF-8")
