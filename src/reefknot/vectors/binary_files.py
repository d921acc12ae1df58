"""word2vec's binary format: a header as in its text, then each word, a space, and its numbers as float32.

The C program ends each vector with a newline, gensim does not, nor does the file that Google published: a newline
before a word is not part of it.

Shapes: B words of a block, D width.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reefknot.errors import DataError
from reefknot.vectors.contract import BLOCK, Block, slices
from reefknot.vectors.text_files import read_header
from reefknot.vectors.word_vectors import WordVectors

LONGEST = 1 << 16
"""Bytes of a word; where none ends within so many, these are not words."""
_FLOAT = np.dtype("<f4")


def read_binary(path: Path) -> Iterator[Block]:
    """The words of a file, as many as its header promises."""
    with path.open("rb") as stream:
        size, dim = read_header(stream, path)
        width = dim * _FLOAT.itemsize
        if size * (width + 1) > path.stat().st_size:
            raise DataError(f"{path} is cut off: its header promises {size:,} words of {dim:,} numbers")
        rest, found = b"", 0
        while found < size:
            fresh = stream.read(max(BLOCK, width))
            data = rest + fresh
            words, vectors, end = _cut(data, width, size - found)
            if not words and (not fresh or len(data) > width + LONGEST):
                raise DataError(
                    f"{path} is cut off or no word2vec file: after {found:,} of the {size:,} words that its header "
                    "promises, there is no word with a vector"
                )
            found += len(words)
            rest = data[end:]
            if words:
                yield Block(words, np.frombuffer(b"".join(vectors), dtype=_FLOAT).reshape(-1, dim))
        if (rest + stream.read(1)).strip(b"\n"):
            raise DataError(f"{path} goes on after the {size:,} words that its header promises; mend the header")


def is_whole(data: bytes, size: int, dim: int) -> bool:
    """Whether what follows a header is as many words with vectors as it promises, and nothing else."""
    words, _, end = _cut(data, dim * _FLOAT.itemsize, size)
    return len(words) == size and not data[end:].strip(b"\n")


def _cut(data: bytes, width: int, most: int) -> tuple[list[bytes], list[bytes], int]:
    """Words and vectors that `data` holds whole, at most so many, and where what is left begins."""
    words: list[bytes] = []
    vectors: list[bytes] = []
    start = 0
    while len(words) < most:
        space = data.find(b" ", start, start + LONGEST)
        stop = space + 1 + width
        if space < 0 or stop > len(data):
            break
        words.append(data[start:space].lstrip(b"\n"))
        vectors.append(data[space + 1 : stop])
        start = stop
    return words, vectors, start


def write_binary(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words; yields how many are written so far."""
    with path.open("wb") as stream:
        stream.write(f"{len(vectors)} {vectors.dim}\n".encode())
        for rows in slices(len(vectors), vectors.dim, bytes_per_number=_FLOAT.itemsize):
            pairs = zip(vectors.words[rows], vectors.vectors_VD[rows].astype(_FLOAT), strict=True)
            stream.write(b"".join(b"%b %b" % (word.encode(), row.tobytes()) for word, row in pairs))
            yield rows.stop
