"""Words and numbers as text: `word 0.1 -0.2 ...`, a line each.

word2vec (Mikolov et al. 2013) writes a header, `V D`, before them; GloVe (Pennington et al. 2014) does not. Numbers are
parsed a block at a time by numpy, not one by one. A word of another program's file may hold spaces (GloVe's 840B file
has some): the last D pieces of a line are the numbers, whatever comes before them is the word. Where no header says D,
it is the length of the run of numbers that most lines end with.

Shapes: V words, B of a block, D width.
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
from reefknot.vectors.contract import BLOCK, Block, slices
from reefknot.vectors.word_vectors import Matrix, WordVectors

BOM = b"\xef\xbb\xbf"
HEADER = re.compile(rb"(\d{1,18}) (\d{1,9})[ \t]*\r?\n?")
NUMBER = "%.9g"
"""Nine digits are enough for a float32 to come back as it was."""
_BLANKS = b" \t\r\n"
_SEEN = 1_000  # lines that tell the width of a file without a header, and whether it has one
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def read_word2vec(path: Path) -> Iterator[Block]:
    """The words of a file with a header."""
    with path.open("rb") as stream:
        size, dim = read_header(stream, path)
        found = 0
        # A number takes a character, and one that ends it.
        if size * dim * 2 > path.stat().st_size:
            raise DataError(f"{path} is cut off: its header promises {size:,} words of {dim:,} numbers")
        for block in _blocks(stream, path, dim, first_line=2):
            found += len(block.words)
            if found > size:
                raise DataError(f"{path} has more words than the {size:,} that its header promises; mend the header")
            yield block
        if found < size:
            raise DataError(f"{path} is cut off: it has {found:,} of the {size:,} words that its header promises")


def read_glove(path: Path) -> Iterator[Block]:
    """The words of a file without a header. Its width is that of most of its first lines."""
    with path.open("rb") as stream:
        skip_bom(stream)
        dim = _width(stream.readlines(BLOCK))
        if not dim:
            raise DataError(f"{path} holds no word vectors: no line with a word and numbers")
        stream.seek(0)
        skip_bom(stream)
        yield from _blocks(stream, path, dim, first_line=1)


def write_word2vec(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words with a header; yields how many are written so far."""
    yield from _write(vectors, path, f"{len(vectors)} {vectors.dim}\n")


def write_glove(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words without a header, likewise."""
    # A number and another one, without a point, would be a header.
    yield from _write(vectors, path, "", "%#.9g" if vectors.dim == 1 else NUMBER)


def read_header(stream: BinaryIO, path: Path) -> tuple[int, int]:
    """The numbers of words and of columns that the first line of a word2vec file promises."""
    skip_bom(stream)
    found = HEADER.fullmatch(stream.readline(64))
    if not found:
        raise DataError(
            f"{path}: its first line is no header of word2vec, which says how many words and how many numbers each "
            "there are, such as '400000 300'; text without one is of the format glove"
        )
    size, dim = int(found[1]), int(found[2])
    if not size or not dim:
        raise DataError(f"{path} holds no word vectors: its header says {size:,} words of {dim:,} numbers")
    return size, dim


def skip_bom(stream: BinaryIO) -> None:
    """Go to the first byte that means something: some editors put a mark before it."""
    if stream.read(len(BOM)) != BOM:
        stream.seek(0)


def parse(numbers: list[bytes], dim: int, delimiter: str = " ") -> Matrix | None:
    """The rows of numbers, x_BD; None where some line has not `dim` of them, or what is no number."""
    try:
        with np.errstate(over="ignore"):
            x_BD = np.loadtxt(
                numbers, dtype=np.float32, comments=None, delimiter=delimiter, ndmin=2, encoding="latin-1"
            )
    except ValueError:
        return None
    return x_BD if x_BD.shape == (len(numbers), dim) else None


def is_number(piece: bytes) -> bool:
    try:
        float(piece)
    except ValueError:
        return False
    return b"_" not in piece  # Python's own spelling of thousands


def is_text(data: bytes, dim: int) -> bool:
    """Whether what follows a header is text, not binary: a line of a word and numbers, or, as a line may be wrong, at
    least numbers for the most part behind the first words. (A word may hold anything.)"""
    pieces = data.partition(b"\n")[0].rstrip(_BLANKS).rsplit(b" ", dim)[1:]
    if len(pieces) == dim and all(map(is_number, pieces)):
        return True
    pieces = [piece for line in data[:10_000].splitlines() for piece in line.split()[1:]]
    return 2 * sum(map(is_number, pieces)) > len(pieces)


def is_printable(data: bytes) -> bool:
    """Whether these bytes, which may end within a character, are UTF-8 that a person can read."""
    try:
        codecs.utf_8_decode(data)
    except UnicodeDecodeError:
        return False
    return not _CONTROL.search(data)


def has_header(lines: Iterable[bytes], size: int, dim: int) -> bool:
    """Whether the first line of a text, `size dim`, is a header: it may be a word that is a number, with a vector of
    one number as the lines below have. What promises as many words as there are lines below is a header all the same.
    """
    below = filter(bytes.strip, islice(lines, 1, None))
    seen = list(islice(below, _SEEN))
    if dim == 1 or {len(line.split()) for line in seen} != {2}:
        return True
    return size == len(seen) + sum(1 for _ in below)


def _width(lines: Iterable[bytes]) -> int:
    """How many numbers most of the first lines end with, as many as the first where two are equally frequent; 0 where
    none ends with a number."""
    runs = Counter(run for line in islice(lines, _SEEN) if (run := _numbers_at_end(line.rstrip(_BLANKS))))
    return runs.most_common(1)[0][0] if runs else 0


def _numbers_at_end(line: bytes) -> int:
    """The run of numbers that a line ends with; the first piece is a word, whatever it is."""
    return sum(1 for _ in takewhile(is_number, reversed(line.split(b" ")[1:])))


def _blocks(stream: BinaryIO, path: Path, dim: int, first_line: int) -> Iterator[Block]:
    line_number = first_line
    while lines := stream.readlines(BLOCK):
        words: list[bytes] = []
        numbers: list[bytes] = []
        for offset, raw in enumerate(lines):
            line = raw.rstrip(_BLANKS)
            if not line:
                continue
            spaces = line.count(b" ")
            if spaces == dim:
                word, _, rest = line.partition(b" ")
            elif spaces > dim:
                word, *pieces = line.rsplit(b" ", dim)
                rest = b" ".join(pieces)
            if spaces < dim or (spaces > dim and is_number(word.rpartition(b" ")[2])):
                raise _misfit(line, dim, path, line_number + offset)
            words.append(word)
            numbers.append(rest)
        if words:
            vectors_BD = parse(numbers, dim)
            if vectors_BD is None:
                raise _first_fault(lines, dim, path, line_number)
            yield Block(words, vectors_BD)
        line_number += len(lines)


def _misfit(line: bytes, dim: int, path: Path, number: int) -> DataError:
    have = _numbers_at_end(line)
    told = f"{have:,} number{'s' * (have != 1)} after the word where {dim:,} are expected"
    if b"  " in line:
        told = "two spaces in a row where a number is expected"
    return DataError(f"{path}, line {number:,}: {told}; mend the line")


def _first_fault(lines: list[bytes], dim: int, path: Path, first_line: int) -> DataError:
    """What numpy could not parse, looked for line by line."""
    for number, raw in enumerate(lines, start=first_line):
        line = raw.rstrip(_BLANKS)
        if not line:
            continue
        pieces = line.rsplit(b" ", dim)[1:]
        wrong = next((piece for piece in pieces if not is_number(piece)), None)
        if wrong is not None:
            told = repr(wrong.decode(errors="backslashreplace")[:40]) if wrong else "two spaces in a row"
            return DataError(f"{path}, line {number:,}: {told} where one of {dim:,} numbers is expected; mend the line")
    return DataError(f"{path}: cannot be parsed between its lines {first_line:,} and {first_line + len(lines):,}")


def _write(vectors: WordVectors, path: Path, header: str, number: str = NUMBER) -> Iterator[int]:
    line = " ".join([number] * vectors.dim)
    with path.open("wb") as stream:
        stream.write(header.encode())
        for rows in slices(len(vectors), vectors.dim, bytes_per_number=16):
            pairs = zip(vectors.words[rows], vectors.vectors_VD[rows].tolist(), strict=True)
            stream.write("".join(f"{word} {line % tuple(row)}\n" for word, row in pairs).encode())
            yield rows.stop
