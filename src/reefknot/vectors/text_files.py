"""Text formats: each line is a word and its numbers, `word 0.1 -0.2 ...`.

word2vec (Mikolov et al. 2013) starts with the header `V D`; GloVe (Pennington et al. 2014) has no header. numpy parses
a block of lines at once, because parsing numbers one by one is slow. A word in another program's file may contain
spaces (some in GloVe's 840B file do): the last D fields of a line are the numbers, and everything before them is the
word. Without a header, D is the number of numeric fields that most lines end with.

Shapes: V words, B words of a block, D dimensions.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from reefknot.errors import DataError
from reefknot.vectors.word_vectors import BLOCK_BYTES, Block, Matrix, WordVectors, block_slices

BOM = b"\xef\xbb\xbf"
HEADER = re.compile(rb"(\d{1,18}) (\d{1,9})[ \t]*\r?\n?")
NUMBER = "%.9g"
"""Nine significant digits restore a float32 exactly."""
_BLANKS = b" \t\r\n"
_SAMPLE_LINES = 1_000  # number of lines that are examined to find the dimension and the header of a file
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def read_word2vec(path: Path) -> Iterator[Block]:
    """Read the words of a text file with a header."""
    with path.open("rb") as stream:
        size, dim = read_header(stream, path)
        # A number takes at least two bytes: a digit and a separator.
        if size * dim * 2 > path.stat().st_size:
            raise DataError(f"{path} is truncated: its header declares {size:,} words of {dim:,} numbers")
        words_read = 0
        for block in _read_blocks(stream, path, dim, first_line=2):
            words_read += len(block.words)
            if words_read > size:
                raise DataError(f"{path} has more words than the {size:,} that its header declares; correct the header")
            yield block
        if words_read < size:
            raise DataError(
                f"{path} is truncated: it has {words_read:,} of the {size:,} words that its header declares"
            )


def read_glove(path: Path) -> Iterator[Block]:
    """Read the words of a text file without a header. The first lines show the dimension."""
    with path.open("rb") as stream:
        skip_bom(stream)
        dim = _infer_dim(stream.readlines(BLOCK_BYTES))
        if not dim:
            raise DataError(f"{path} contains no word vectors: no line is a word followed by numbers")
        stream.seek(0)
        skip_bom(stream)
        yield from _read_blocks(stream, path, dim, first_line=1)


def write_word2vec(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words with a header, and yield the number of words written so far."""
    yield from _write(vectors, path, f"{len(vectors)} {vectors.dim}\n")


def write_glove(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words without a header, and yield the number of words written so far."""
    # A line with two integers would look like a header, so a single number always gets a decimal point.
    yield from _write(vectors, path, "", "%#.9g" if vectors.dim == 1 else NUMBER)


def read_header(stream: BinaryIO, path: Path) -> tuple[int, int]:
    """Return the number of words and the dimension that the first line of a word2vec file declares."""
    skip_bom(stream)
    header = HEADER.fullmatch(stream.readline(64))
    if not header:
        raise DataError(
            f"{path}: the first line is not a word2vec header, which is the number of words and the dimension, such as "
            "'400000 300'; if the file is text without a header, use the format glove"
        )
    size, dim = int(header[1]), int(header[2])
    if not size or not dim:
        raise DataError(f"{path} contains no word vectors: its header declares {size:,} words of {dim:,} numbers")
    return size, dim


def skip_bom(stream: BinaryIO) -> None:
    """Skip the byte order mark that some editors write at the start of a file."""
    if stream.read(len(BOM)) != BOM:
        stream.seek(0)


def parse_numbers(lines: list[bytes], dim: int, delimiter: str = " ") -> Matrix | None:
    """Parse lines of `dim` numbers into x_BD. Return None if a line has another length or is not numeric."""
    try:
        with np.errstate(over="ignore"):
            x_BD = np.loadtxt(lines, dtype=np.float32, comments=None, delimiter=delimiter, ndmin=2, encoding="latin-1")
    except ValueError:
        return None
    return x_BD if x_BD.shape == (len(lines), dim) else None


def is_number(field: bytes) -> bool:
    """Return whether a field of a line is a number."""
    try:
        float(field)
    except ValueError:
        return False
    return b"_" not in field  # float() accepts 1_000, but numpy does not


def is_text(data: bytes, dim: int) -> bool:
    """Return whether the data after a header looks like text rather than binary vectors.

    It is text if the first line ends with `dim` numbers. Because the first line may be damaged, it is also text if most
    fields of the first lines are numbers. The first field of a line does not count, because it belongs to the word.
    """
    fields = data.partition(b"\n")[0].rstrip(_BLANKS).rsplit(b" ", dim)[1:]
    if len(fields) == dim and all(map(is_number, fields)):
        return True
    fields = [field for line in data[:10_000].splitlines() for field in line.split()[1:]]
    return 2 * sum(map(is_number, fields)) > len(fields)


def is_printable(data: bytes) -> bool:
    """Return whether the data is UTF-8 without control characters. It may end in the middle of a character."""
    try:
        codecs.utf_8_decode(data)
    except UnicodeDecodeError:
        return False
    return not _CONTROL.search(data)


def has_header(lines: Iterable[bytes], size: int, dim: int) -> bool:
    """Return whether the first line of a text, `size dim`, is a header.

    The line may instead be a word that is a number, followed by a vector of one number. That is possible only if all
    lines that are examined have two fields. Even then it is a header if `size` is the number of lines that follow.
    """
    following = filter(bytes.strip, islice(lines, 1, None))
    sample = list(islice(following, _SAMPLE_LINES))
    if dim == 1 or {len(line.split()) for line in sample} != {2}:
        return True
    return size == len(sample) + sum(1 for _ in following)


def _infer_dim(lines: Iterable[bytes]) -> int:
    """Return the number of numeric fields that most of the first lines end with, or 0 if no line ends with a number.

    If two numbers are equally frequent, the number that occurs first in the file is returned.
    """
    lengths = Counter(
        length for line in islice(lines, _SAMPLE_LINES) if (length := _numbers_at_end(line.rstrip(_BLANKS)))
    )
    return lengths.most_common(1)[0][0] if lengths else 0


def _numbers_at_end(line: bytes) -> int:
    """Count the numeric fields that a line ends with. The first field always belongs to the word."""
    return sum(1 for _ in takewhile(is_number, reversed(line.split(b" ")[1:])))


def _read_blocks(stream: BinaryIO, path: Path, dim: int, first_line: int) -> Iterator[Block]:
    line_number = first_line
    while lines := stream.readlines(BLOCK_BYTES):
        words: list[bytes] = []
        number_lines: list[bytes] = []
        for offset, raw in enumerate(lines):
            line = raw.rstrip(_BLANKS)
            if not line:
                continue
            spaces = line.count(b" ")
            if spaces == dim:
                word, _, numbers = line.partition(b" ")
            elif spaces > dim:
                word, *fields = line.rsplit(b" ", dim)
                numbers = b" ".join(fields)
            # A word that ends with a number means that the line has too many numbers.
            if spaces < dim or (spaces > dim and is_number(word.rpartition(b" ")[2])):
                raise _wrong_length_error(line, dim, path, line_number + offset)
            words.append(word)
            number_lines.append(numbers)
        if words:
            vectors_BD = parse_numbers(number_lines, dim)
            if vectors_BD is None:
                raise _parse_error(lines, dim, path, line_number)
            yield Block(words, vectors_BD)
        line_number += len(lines)


def _wrong_length_error(line: bytes, dim: int, path: Path, line_number: int) -> DataError:
    length = _numbers_at_end(line)
    problem = f"expected {dim:,} numbers after the word, got {length:,}"
    if b"  " in line:
        problem = "two spaces in a row where a number is expected"
    return DataError(f"{path}, line {line_number:,}: {problem}; correct the line")


def _parse_error(lines: list[bytes], dim: int, path: Path, first_line: int) -> DataError:
    """Return the error for the first field that is not a number. numpy does not say which field it is."""
    for line_number, raw in enumerate(lines, start=first_line):
        line = raw.rstrip(_BLANKS)
        if not line:
            continue
        fields = line.rsplit(b" ", dim)[1:]
        bad_field = next((field for field in fields if not is_number(field)), None)
        if bad_field is not None:
            problem = repr(bad_field.decode(errors="backslashreplace")[:40]) if bad_field else "two spaces in a row"
            return DataError(
                f"{path}, line {line_number:,}: expected {dim:,} numbers after the word, got {problem}; "
                "correct the line"
            )
    return DataError(f"{path}: cannot be parsed between lines {first_line:,} and {first_line + len(lines):,}")


def _write(vectors: WordVectors, path: Path, header: str, number_format: str = NUMBER) -> Iterator[int]:
    line_format = " ".join([number_format] * vectors.dim)
    with path.open("wb") as stream:
        stream.write(header.encode())
        for rows in block_slices(len(vectors), vectors.dim, bytes_per_number=16):
            pairs = zip(vectors.words[rows], vectors.vectors_VD[rows].tolist(), strict=True)
            stream.write("".join(f"{word} {line_format % tuple(row)}\n" for word, row in pairs).encode())
            yield rows.stop
