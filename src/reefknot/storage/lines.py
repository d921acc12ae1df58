"""Read text files line by line and split the lines into words.

    for line in read_file(path):
        print(line.number, line.words)

`read_text` and `read_stream` do the same for a string and for a binary stream. No other module splits bytes into words,
so all texts follow the same rules:

* Text is UTF-8. A leading byte order mark is dropped. A gzipped file is unpacked as it is read, whatever its name.
* A line ends at `\\n` and nowhere else.
* Words are separated by ASCII whitespace (space, tab, carriage return, vertical tab, form feed). A no-break space or
  another Unicode space is part of its word, because only then do the counts of Penn Treebank and WikiText-2 equal the
  published ones.
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
    """One line of a text."""

    number: int
    """Line number, counted from 1."""
    words: list[str]
    size: int
    """Size in bytes, line end included."""


def read_file(path: Path) -> Iterator[Line]:
    """Yield the lines of a file. The file is never held in memory as a whole."""
    with _open_bytes(path) as stream:
        yield from read_stream(stream, str(path))


def read_plain(path: Path) -> Iterator[str]:
    """Yield the lines of a file as strings, without their line ends."""
    with _open_bytes(path) as stream:
        for _number, text, _size in _parse_lines(stream, str(path), _decode_without_line_end):
            yield text


def decode_lines(data: bytes, source: Path | str) -> Iterator[str]:
    """Yield the lines of a file that was read already; error messages call it `source`."""
    for _number, text, _size in _parse_lines(io.BytesIO(data), str(source), _decode_without_line_end):
        yield text


def is_gzip(path: Path) -> bool:
    """Return whether a file is gzipped: its name ends in .gz, or its first two bytes are those of gzip."""
    if path.suffix.lower() == ".gz":
        return True
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def count_lines(path: Path) -> int:
    """Return the number of lines in a file."""
    with _open_bytes(path) as stream:
        return sum(1 for _ in stream)


def words_in(text: str, source_name: str) -> list[str]:
    """Return the words of a string, split like the words of a file; error messages call the string `source_name`."""
    words: list[str] = []
    for line in read_text(text, source_name):
        words.extend(line.words)
    return words


def read_text(text: str, source_name: str) -> Iterator[Line]:
    """Yield the lines of a string; error messages call it `source_name`."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{source_name}: character {error.start} is not valid Unicode; give UTF-8 text") from error
    return read_stream(io.BytesIO(data), source_name)


def read_stream(stream: Iterable[bytes], source_name: str, first_line: int = 1, first_byte: int = 0) -> Iterator[Line]:
    """Yield the lines of a binary stream, such as standard input; error messages call it `source_name`.

    If the stream is a part of a text, `first_line` is the number of its first line, and `first_byte` its offset.
    """
    for number, words, size in _parse_lines(stream, source_name, _split_words, first_line, first_byte):
        yield Line(number, words, size)


@contextmanager
def _open_bytes(path: Path) -> Iterator[Iterable[bytes]]:
    """Open a file, gzipped or not, for reading. Turn errors while it is open into a DataError."""
    try:
        with _open_file(path) as stream:
            yield stream
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be unpacked: {error}; download it again") from error


def _open_file(path: Path) -> io.BufferedIOBase:
    if is_gzip(path):
        return gzip.open(path)
    return path.open("rb")


def _parse_lines(
    raw_lines: Iterable[bytes],
    source_name: str,
    parse: Callable[[bytes], T],
    first_line: int = 1,
    first_byte: int = 0,
) -> Iterator[tuple[int, T, int]]:
    """Yield three values for each line: its number, the result of `parse`, and its size in bytes."""
    line_start = first_byte  # offset in the file, in bytes
    for line_number, raw_line in enumerate(raw_lines, start=first_line):
        line = raw_line
        if line_number == 1 and line.startswith(_BYTE_ORDER_MARK):
            line = line[len(_BYTE_ORDER_MARK) :]
            line_start = len(_BYTE_ORDER_MARK)

        # Text does not contain NUL bytes, but most binary files do.
        nul_index = line.find(b"\0")
        if nul_index >= 0:
            raise DataError(
                f"{source_name}, line {line_number}: NUL byte at byte {line_start + nul_index}; is this a text file?"
            )

        try:
            parsed_line = parse(line)
        except UnicodeDecodeError:
            bad_index = _find_bad_byte(line)
            raise DataError(
                f"{source_name}, line {line_number}: byte {line_start + bad_index} (0x{line[bad_index]:02x}) is not"
                " valid UTF-8; convert the text to UTF-8"
            ) from None

        yield line_number, parsed_line, len(line)
        line_start += len(line)


def _split_words(line: bytes) -> list[str]:
    """Return the words of a line, which are separated by ASCII whitespace."""
    encoded_words = line.split()  # bytes.split splits at ASCII whitespace only, str.split at all Unicode whitespace
    if not encoded_words:
        return []
    # Decoding all words at once is faster than decoding each word. No word contains the separator, the line end.
    return b"\n".join(encoded_words).decode().split("\n")


def _decode_without_line_end(line: bytes) -> str:
    """Return a line as a string, without its line end."""
    return line.removesuffix(b"\n").removesuffix(b"\r").decode()


def _find_bad_byte(line: bytes) -> int:
    """Return the index of the first byte that is not valid UTF-8."""
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return error.start
    raise AssertionError("the line is valid UTF-8")
