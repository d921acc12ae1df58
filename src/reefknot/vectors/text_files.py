"""Read and write word vectors in the text formats word2vec and GloVe, where each line is a word and its numbers.

    400000 300                the header: V words, D dimensions (only in word2vec)
    house 0.1 -0.2 ...        a word and D numbers

`files.py` calls `read_word2vec`, `read_glove`, the functions that write, and the checks that tell formats apart.

A word may contain spaces, as in GloVe's 840B file: the last D fields of a line are the numbers, and everything before
them is the word. Without a header, D is the number of numeric fields that most lines end with.

Shapes: V words, B words of a block (a part of the file that is read at once), D dimensions.
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
from reefknot.vectors.word_vectors import BLOCK_BYTES, Block, Float32Array, WordVectors, block_slices

BOM = b"\xef\xbb\xbf"
"""The byte order mark that some editors write at the start of a file."""
HEADER = re.compile(rb"(?P<num_words>\d{1,18}) (?P<dim>\d{1,9})[ \t]*\r?\n?")
NUMBER_FORMAT = "%.9g"
"""Nine significant digits restore a float32 exactly."""
_BLANK_BYTES = b" \t\r\n"
_SAMPLE_LINES = 1_000  # number of lines that are examined to find the dimension and the header of a file
_CONTROL_CHARACTER = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def read_word2vec(path: Path) -> Iterator[Block]:
    """Yield the words and vectors of a text file with a header, in blocks."""
    with path.open("rb") as file:
        num_words, dim = read_header(file, path)
        # A number takes at least two bytes: a digit and a separator.
        if num_words * dim * 2 > path.stat().st_size:
            raise DataError(f"{path} is truncated: its header declares {num_words:,} words of {dim:,} numbers")

        words_read = 0
        for block in _read_blocks(file, path, dim, first_line_number=2):
            words_read += len(block.words)
            if words_read > num_words:
                raise DataError(
                    f"{path} has more words than the {num_words:,} that its header declares; correct the header"
                )
            yield block
        if words_read < num_words:
            raise DataError(
                f"{path} is truncated: it has {words_read:,} of the {num_words:,} words that its header declares"
            )


def read_glove(path: Path) -> Iterator[Block]:
    """Yield the words and vectors of a text file without a header, in blocks. The first lines show the dimension."""
    with path.open("rb") as file:
        skip_bom(file)
        dim = _infer_dim(file.readlines(BLOCK_BYTES))
        if not dim:
            raise DataError(f"{path} contains no word vectors: no line is a word followed by numbers")
        file.seek(0)
        skip_bom(file)
        yield from _read_blocks(file, path, dim, first_line_number=1)


def write_word2vec(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words with a header, and yield the number of words written so far."""
    yield from _write_lines(vectors, path, header=f"{len(vectors)} {vectors.dim}\n")


def write_glove(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words without a header, and yield the number of words written so far."""
    number_format = NUMBER_FORMAT
    if vectors.dim == 1:
        # A line with two integers would look like a header, so a single number always gets a decimal point.
        number_format = "%#.9g"
    yield from _write_lines(vectors, path, header="", number_format=number_format)


def read_header(file: BinaryIO, path: Path) -> tuple[int, int]:
    """Return the number of words and the dimension that the first line of a word2vec file declares."""
    skip_bom(file)
    header = HEADER.fullmatch(file.readline(64))
    if not header:
        raise DataError(
            f"{path}: the first line is not a word2vec header, which is the number of words and the dimension, such as "
            "'400000 300'; if the file is text without a header, use the format glove"
        )
    num_words = int(header["num_words"])
    dim = int(header["dim"])
    if not num_words or not dim:
        raise DataError(f"{path} contains no word vectors: its header declares {num_words:,} words of {dim:,} numbers")
    return num_words, dim


def skip_bom(file: BinaryIO) -> None:
    """Skip the byte order mark at the start of a file, if there is one."""
    if file.read(len(BOM)) != BOM:
        file.seek(0)


def read_line_blocks(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the remaining lines of a file in lists of about `BLOCK_BYTES` bytes."""
    while True:
        lines = file.readlines(BLOCK_BYTES)
        if not lines:
            return
        yield lines


def parse_numbers(lines: list[bytes], dim: int, delimiter: str = " ") -> Float32Array | None:
    """Parse lines of `dim` numbers into vectors, (B, D). Return None if a line has another length or is not numeric.

    numpy parses all lines at once, because parsing numbers one by one is slow.
    """
    try:
        with np.errstate(over="ignore"):
            vectors_BD = np.loadtxt(
                lines, dtype=np.float32, comments=None, delimiter=delimiter, ndmin=2, encoding="latin-1"
            )
    except ValueError:
        return None
    return vectors_BD if vectors_BD.shape == (len(lines), dim) else None


def is_number(field: bytes) -> bool:
    """Return whether a field of a line is a number."""
    try:
        float(field)
    except ValueError:
        return False
    return b"_" not in field  # float() accepts 1_000, but numpy does not


def looks_like_text(data: bytes, dim: int) -> bool:
    """Return whether the data after a header looks like text rather than binary vectors.

    It is text if the first line ends with `dim` numbers. Because the first line may be damaged, it is also text if most
    fields of the first lines are numbers. The first field of a line does not count, because it belongs to the word.
    """
    first_line = data.partition(b"\n")[0].rstrip(_BLANK_BYTES)
    last_fields = first_line.rsplit(b" ", dim)[1:]
    if len(last_fields) == dim and all(map(is_number, last_fields)):
        return True

    num_fields = 0
    num_numeric_fields = 0
    for line in data[:10_000].splitlines():
        for field in line.split()[1:]:
            num_fields += 1
            num_numeric_fields += is_number(field)
    return 2 * num_numeric_fields > num_fields


def is_printable(data: bytes) -> bool:
    """Return whether the data is UTF-8 without control characters. It may end in the middle of a character."""
    try:
        codecs.utf_8_decode(data)
    except UnicodeDecodeError:
        return False
    return not _CONTROL_CHARACTER.search(data)


def has_header(lines: Iterable[bytes], num_words: int, dim: int) -> bool:
    """Return whether the first line of a text, `num_words dim`, is a header.

    The line may instead be a word that is a number, followed by a vector of one number. That is possible only if all
    lines that are examined have two fields. Even then it is a header if `num_words` is the number of lines that follow.
    """
    lines_after_first = islice(lines, 1, None)
    nonblank_lines = (line for line in lines_after_first if line.strip())
    sample = list(islice(nonblank_lines, _SAMPLE_LINES))
    field_counts = {len(line.split()) for line in sample}
    if dim == 1 or field_counts != {2}:
        return True
    num_lines_after_sample = sum(1 for _ in nonblank_lines)
    return num_words == len(sample) + num_lines_after_sample


def _infer_dim(lines: Iterable[bytes]) -> int:
    """Return the number of numeric fields that most of the first lines end with, or 0 if no line ends with a number.

    If two numbers are equally frequent, the number that occurs first in the file is returned.
    """
    dims: Counter[int] = Counter()
    for line in islice(lines, _SAMPLE_LINES):
        dim = _count_final_numbers(line.rstrip(_BLANK_BYTES))
        if dim:
            dims[dim] += 1
    if not dims:
        return 0
    most_frequent_dim, _ = dims.most_common(1)[0]
    return most_frequent_dim


def _count_final_numbers(line: bytes) -> int:
    """Count the numeric fields that a line ends with: 2 for `in 1991 0.1`. The first field belongs to the word."""
    fields = line.split(b" ")[1:]
    final_numbers = takewhile(is_number, reversed(fields))
    return sum(1 for _ in final_numbers)


def _read_blocks(file: BinaryIO, path: Path, dim: int, first_line_number: int) -> Iterator[Block]:
    """Yield the words and vectors of the remaining lines of a file, in blocks.

    Args:
        file: The file, after its header.
        path: The path of the file, for error messages.
        dim: The dimension of the vectors.
        first_line_number: The number of the next line of the file, for error messages.
    """
    block_line_number = first_line_number
    for lines in read_line_blocks(file):
        words: list[bytes] = []
        number_lines: list[bytes] = []
        for line_number, raw_line in enumerate(lines, start=block_line_number):
            line = raw_line.rstrip(_BLANK_BYTES)
            if not line:
                continue
            word_and_numbers = _split_line(line, dim)
            if word_and_numbers is None:
                raise _wrong_length_error(line, dim, path, line_number)
            word, numbers = word_and_numbers
            words.append(word)
            number_lines.append(numbers)

        if words:
            vectors_BD = parse_numbers(number_lines, dim)
            if vectors_BD is None:
                raise _parse_error(lines, dim, path, block_line_number)
            yield Block(words, vectors_BD)
        block_line_number += len(lines)


def _split_line(line: bytes, dim: int) -> tuple[bytes, bytes] | None:
    """Return the word of a line and its numbers, or None if the line does not have `dim` numbers."""
    num_spaces = line.count(b" ")
    if num_spaces < dim:
        return None
    if num_spaces == dim:
        word, _, numbers = line.partition(b" ")
        return word, numbers

    # The word contains spaces. If it ends with a number, the line has too many numbers instead.
    word, *fields = line.rsplit(b" ", dim)
    last_field_of_word = word.rpartition(b" ")[2]
    if is_number(last_field_of_word):
        return None
    return word, b" ".join(fields)


def _wrong_length_error(line: bytes, dim: int, path: Path, line_number: int) -> DataError:
    """Return the error for a line that has too few or too many numbers."""
    problem = f"expected {dim:,} numbers after the word, got {_count_final_numbers(line):,}"
    if b"  " in line:
        problem = "two spaces in a row where a number is expected"
    return DataError(f"{path}, line {line_number:,}: {problem}; correct the line")


def _parse_error(lines: list[bytes], dim: int, path: Path, first_line_number: int) -> DataError:
    """Return the error for the first field that is not a number. numpy does not say which field it is."""
    for line_number, raw_line in enumerate(lines, start=first_line_number):
        line = raw_line.rstrip(_BLANK_BYTES)
        if not line:
            continue
        fields = line.rsplit(b" ", dim)[1:]
        bad_field = next((field for field in fields if not is_number(field)), None)
        if bad_field is not None:
            problem = "two spaces in a row"
            if bad_field:
                readable_field = bad_field.decode(errors="backslashreplace")
                problem = repr(readable_field[:40])
            return DataError(
                f"{path}, line {line_number:,}: expected {dim:,} numbers after the word, got {problem}; "
                "correct the line"
            )
    end_line_number = first_line_number + len(lines)
    return DataError(f"{path}: cannot be parsed between lines {first_line_number:,} and {end_line_number:,}")


def _write_lines(vectors: WordVectors, path: Path, header: str, number_format: str = NUMBER_FORMAT) -> Iterator[int]:
    """Write the header and a line for each word, and yield the number of words written so far."""
    vector_format = " ".join([number_format] * vectors.dim)
    with path.open("wb") as file:
        file.write(header.encode())
        for block in block_slices(len(vectors), vectors.dim, bytes_per_number=16):
            lines = [
                f"{word} {vector_format % tuple(numbers)}\n"
                for word, numbers in zip(vectors.words[block], vectors.vectors_VD[block].tolist(), strict=True)
            ]
            file.write("".join(lines).encode())
            yield block.stop
