"""Read and write word vectors in the binary format of word2vec.

The file starts with the header `V D`. For each word follow its bytes, a space and D float32 numbers. `files.py` calls
`read_binary` and `write_binary`.

The original C program writes a newline after each vector; gensim and the GoogleNews file do not. So newlines before a
word are not part of it.

Shapes: V words, B words of a block (a part of the file that is read at once), D dimensions.
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
_FLOAT32 = np.dtype("<f4")


def read_binary(path: Path) -> Iterator[Block]:
    """Read as many words as the header declares."""
    with path.open("rb") as file:
        num_words, dim = read_header(file, path)
        vector_bytes = dim * _FLOAT32.itemsize
        if num_words * (vector_bytes + 1) > path.stat().st_size:
            raise DataError(f"{path} is truncated: its header declares {num_words:,} words of {dim:,} numbers")
        remainder, words_read = b"", 0
        while words_read < num_words:
            chunk = file.read(max(BLOCK_BYTES, vector_bytes))
            data = remainder + chunk
            words, vectors, end = _split_entries(data, vector_bytes, num_words - words_read)
            if not words and (not chunk or len(data) > vector_bytes + _MAX_WORD_BYTES):
                raise DataError(
                    f"{path} is truncated or not a word2vec file: no word with a vector follows the first "
                    f"{words_read:,} of the {num_words:,} words that its header declares"
                )
            words_read += len(words)
            remainder = data[end:]
            if words:
                yield Block(words, np.frombuffer(b"".join(vectors), dtype=_FLOAT32).reshape(-1, dim))
        if (remainder + file.read(1)).strip(b"\n"):
            raise DataError(
                f"{path} continues after the {num_words:,} words that its header declares; correct the header"
            )


def is_complete(data: bytes, num_words: int, dim: int) -> bool:
    """Return whether the data after a header is exactly `num_words` words with vectors of `dim` numbers."""
    words, _, end = _split_entries(data, dim * _FLOAT32.itemsize, num_words)
    return len(words) == num_words and not data[end:].strip(b"\n")


def _split_entries(data: bytes, vector_bytes: int, max_words: int) -> tuple[list[bytes], list[bytes], int]:
    """Split off at most `max_words` complete words with their vectors. Also return where the remainder starts."""
    words: list[bytes] = []
    vectors: list[bytes] = []
    start = 0
    while len(words) < max_words:
        space = data.find(b" ", start, start + _MAX_WORD_BYTES)
        end = space + 1 + vector_bytes
        if space < 0 or end > len(data):
            break
        words.append(data[start:space].lstrip(b"\n"))
        vectors.append(data[space + 1 : end])
        start = end
    return words, vectors, start


def write_binary(vectors: WordVectors, path: Path) -> Iterator[int]:
    """Write the words with a header, and yield the number of words written so far."""
    with path.open("wb") as file:
        file.write(f"{len(vectors)} {vectors.dim}\n".encode())
        for block in block_slices(len(vectors), vectors.dim, bytes_per_number=_FLOAT32.itemsize):
            entries = zip(vectors.words[block], vectors.vectors_VD[block].astype(_FLOAT32), strict=True)
            file.write(b"".join(b"%b %b" % (word.encode(), vector_D.tobytes()) for word, vector_D in entries))
            yield block.stop
