"""Read and write word vectors in the binary format of word2vec. `files.py` calls these functions.

Layout of a file:

    V D                   header line: the number of words and the dimension, as text
    WORD VECTOR           V times: a word, a space and D float32 numbers, sometimes followed by a newline

The original C program writes a newline after each vector; gensim and the GoogleNews file do not. So newlines before a
word are not part of the word.

Shapes: V words, B words of a block (a part of the file that is read at once), D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reefknot.errors import DataError
from reefknot.vectors.text_files import read_header
from reefknot.vectors.word_vectors import BLOCK_BYTES, Block, WordVectors, block_slices

_MAX_WORD_BYTES = 1 << 16
"""If no word ends within this many bytes, the file is not in this format."""
_FLOAT32 = np.dtype("<f4")


def read_binary(path: Path) -> Iterator[Block]:
    """Yield the words of a file and their vectors in blocks. Check that the header declares the right number."""
    with path.open("rb") as file:
        num_words, dim = read_header(file, path)
        vector_bytes = dim * _FLOAT32.itemsize
        if num_words * (vector_bytes + 1) > path.stat().st_size:
            raise DataError(f"{path} is truncated: its header declares {num_words:,} words of {dim:,} numbers")

        words_read = 0
        remainder = b""  # the end of the last chunk, where a word or a vector is incomplete
        while words_read < num_words:
            chunk = file.read(max(BLOCK_BYTES, vector_bytes))
            data = remainder + chunk
            entries = _split_entries(data, vector_bytes, max_words=num_words - words_read)
            if not entries.words:
                is_file_end = not chunk
                is_word_too_long = len(data) > vector_bytes + _MAX_WORD_BYTES
                if is_file_end or is_word_too_long:
                    raise DataError(
                        f"{path} is truncated or not a word2vec file: no word with a vector follows the first "
                        f"{words_read:,} of the {num_words:,} words that its header declares"
                    )
            words_read += len(entries.words)
            remainder = data[entries.end :]
            if entries.words:
                vectors_BD = np.frombuffer(b"".join(entries.vectors), dtype=_FLOAT32).reshape(-1, dim)
                yield Block(entries.words, vectors_BD)

        unread_data = remainder + file.read(1)
        if unread_data.strip(b"\n"):
            raise DataError(
                f"{path} continues after the {num_words:,} words that its header declares; correct the header"
            )


def write_binary(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words with a header, and yield the number of words written so far."""
    with path.open("wb") as file:
        file.write(f"{len(vectors)} {vectors.dim}\n".encode())
        for block in block_slices(len(vectors), vectors.dim, bytes_per_number=_FLOAT32.itemsize):
            words = vectors.words[block]
            vectors_BD = vectors.vectors_VD[block].astype(_FLOAT32)
            entries = [
                b"%b %b" % (word.encode(), vector_D.tobytes()) for word, vector_D in zip(words, vectors_BD, strict=True)
            ]
            file.write(b"".join(entries))
            yield block.stop


def is_complete_binary(data: bytes, num_words: int, dim: int) -> bool:
    """Return whether the data after a header is exactly `num_words` words with vectors of `dim` numbers."""
    entries = _split_entries(data, dim * _FLOAT32.itemsize, max_words=num_words)
    remainder = data[entries.end :].strip(b"\n")
    return len(entries.words) == num_words and not remainder


class _Entries(NamedTuple):
    """Words and vectors from the start of some data, both as bytes."""

    words: list[bytes]
    vectors: list[bytes]
    end: int
    """Where the last vector ends in the data."""


def _split_entries(data: bytes, vector_bytes: int, max_words: int) -> _Entries:
    """Return the complete words with their vectors at the start of `data`, at most `max_words`."""
    words: list[bytes] = []
    vectors: list[bytes] = []
    word_start = 0
    while len(words) < max_words:
        space = data.find(b" ", word_start, word_start + _MAX_WORD_BYTES)
        vector_start = space + 1
        vector_end = vector_start + vector_bytes
        if space < 0 or vector_end > len(data):
            break
        words.append(data[word_start:space].lstrip(b"\n"))
        vectors.append(data[vector_start:vector_end])
        word_start = vector_end
    return _Entries(words, vectors, end=word_start)
