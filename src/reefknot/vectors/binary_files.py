"""The binary format of word2vec: the header `V D`, then for each word its bytes, a space and D float32 numbers.

The original C program writes a newline after each vector; gensim and the GoogleNews file do not. So newlines before a
word are not part of it.

Shapes: B words of a block, D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reefknot.errors import DataError
from reefknot.vectors.text_files import read_header
from reefknot.vectors.word_vectors import BLOCK_BYTES, Block, WordVectors, block_slices

_MAX_WORD_BYTES = 1 << 16
"""If no word ends within this many bytes, the file is not in this format."""
_FLOAT = np.dtype("<f4")


def read_binary(path: Path) -> Iterator[Block]:
    """Read as many words as the header declares."""
    with path.open("rb") as stream:
        size, dim = read_header(stream, path)
        vector_bytes = dim * _FLOAT.itemsize
        if size * (vector_bytes + 1) > path.stat().st_size:
            raise DataError(f"{path} is truncated: its header declares {size:,} words of {dim:,} numbers")
        remainder, words_read = b"", 0
        while words_read < size:
            chunk = stream.read(max(BLOCK_BYTES, vector_bytes))
            data = remainder + chunk
            words, vectors, end = _split(data, vector_bytes, size - words_read)
            if not words and (not chunk or len(data) > vector_bytes + _MAX_WORD_BYTES):
                raise DataError(
                    f"{path} is truncated or not a word2vec file: no word with a vector follows the first "
                    f"{words_read:,} of the {size:,} words that its header declares"
                )
            words_read += len(words)
            remainder = data[end:]
            if words:
                yield Block(words, np.frombuffer(b"".join(vectors), dtype=_FLOAT).reshape(-1, dim))
        if (remainder + stream.read(1)).strip(b"\n"):
            raise DataError(f"{path} continues after the {size:,} words that its header declares; correct the header")


def is_complete(data: bytes, size: int, dim: int) -> bool:
    """Return whether the data after a header is exactly `size` words with vectors of `dim` numbers."""
    words, _, end = _split(data, dim * _FLOAT.itemsize, size)
    return len(words) == size and not data[end:].strip(b"\n")


def _split(data: bytes, vector_bytes: int, max_words: int) -> tuple[list[bytes], list[bytes], int]:
    """Split off at most `max_words` complete words with their vectors. Also return where the remainder starts."""
    words: list[bytes] = []
    vectors: list[bytes] = []
    start = 0
    while len(words) < max_words:
        space = data.find(b" ", start, start + _MAX_WORD_BYTES)
        stop = space + 1 + vector_bytes
        if space < 0 or stop > len(data):
            break
        words.append(data[start:space].lstrip(b"\n"))
        vectors.append(data[space + 1 : stop])
        start = stop
    return words, vectors, start


def write_binary(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words with a header, and yield the number of words written so far."""
    with path.open("wb") as stream:
        stream.write(f"{len(vectors)} {vectors.dim}\n".encode())
        for rows in block_slices(len(vectors), vectors.dim, bytes_per_number=_FLOAT.itemsize):
            pairs = zip(vectors.words[rows], vectors.vectors_VD[rows].astype(_FLOAT), strict=True)
            stream.write(b"".join(b"%b %b" % (word.encode(), row.tobytes()) for word, row in pairs))
            yield rows.stop
