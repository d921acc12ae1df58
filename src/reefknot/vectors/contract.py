"""What a format of files promises: words and vectors come a block at a time, and go the same way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reefknot.vectors.word_vectors import Matrix

BLOCK = 1 << 24
"""Bytes of a file that are held at a time, roughly."""


class Block(NamedTuple):
    """Some words of a file, in the bytes that spell them there, and their vectors."""

    words: list[bytes]
    vectors: Matrix
    counts: NDArray[np.int64] | None = None


def slices(words: int, dim: int, bytes_per_number: int) -> Iterator[slice]:
    """All rows, cut so that what is made of the rows of a slice is about a block."""
    rows = max(1, BLOCK // (bytes_per_number * dim))
    for start in range(0, words, rows):
        yield slice(start, min(start + rows, words))
