"""Words and a vector for each: what the tables of a model, its classifiers and the files of other programs all come to.

Shapes: V words, D width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError, shortened

Matrix = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Vectors of distinct words, in an order that means something to whoever made them: often falling frequency."""

    words: tuple[str, ...]
    vectors_VD: Matrix = field(repr=False)  # noqa: N815 - named as its shape
    counts: NDArray[np.int64] | None = field(default=None, repr=False)
    """How often each word was seen in training, where that is known."""
    pieces: bool = False
    """Whether these are pieces of words, the last of a word ending in `</w>`. A run knows; of a file nobody does."""

    def __post_init__(self) -> None:
        vectors_VD = np.asarray(self.vectors_VD)
        if not np.issubdtype(vectors_VD.dtype, np.floating):
            raise DataError(f"word vectors must be floating-point numbers, not {vectors_VD.dtype}")
        with np.errstate(over="ignore"):
            vectors_VD = np.ascontiguousarray(vectors_VD, dtype=np.float32)
        object.__setattr__(self, "words", tuple(self.words))
        object.__setattr__(self, "vectors_VD", vectors_VD)
        _check_words(self.words)
        if vectors_VD.ndim != 2 or len(vectors_VD) != len(self.words) or not vectors_VD.shape[1]:
            raise DataError(
                f"{len(self.words):,} words need as many rows of vectors, at least one number wide; "
                f"these have the shape {vectors_VD.shape}"
            )
        wrong = first_not_finite(vectors_VD)
        if wrong is not None:
            raise DataError(
                f"the vector of {shown(self.words[wrong])} holds NaN or an infinity; mend it or leave it out"
            )
        if self.counts is not None:
            counts = np.asarray(self.counts)
            if counts.shape != (len(self.words),) or not np.issubdtype(counts.dtype, np.integer):
                raise DataError(f"{len(self.words):,} words need as many counts, which are whole numbers")
            if counts.size and counts.min() < 0:
                raise DataError(f"{shown(self.words[int(counts.argmin())])} was seen {counts.min()} times: at least 0")
            object.__setattr__(self, "counts", counts.astype(np.int64))

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._ids

    @property
    def dim(self) -> int:
        """The width of a vector."""
        return int(self.vectors_VD.shape[1])

    def id_of(self, word: str) -> int:
        """The row of a word; one that is not here is refused."""
        try:
            return self._ids[word]
        except KeyError:
            raise DataError(f"{shown(word)} is not among these {len(self):,} words") from None

    def vector(self, word: str) -> Matrix:
        """The vector of a word, likewise."""
        found: Matrix = self.vectors_VD[self.id_of(word)]
        return found

    @cached_property
    def unit_VD(self) -> Matrix:  # noqa: N802 - named as its shape
        """The vectors at length 1, whose products are cosines; one of zeros stays as it is."""
        squares_V = np.einsum("vd,vd->v", self.vectors_VD, self.vectors_VD, dtype=np.float64)
        lengths_V1 = np.sqrt(squares_V)[:, None]
        lengths_V1[lengths_V1 == 0.0] = 1.0
        # Divided in float64, a piece at a time: a length may be too large or too small for float32.
        unit_VD = np.empty_like(self.vectors_VD)
        for start in range(0, len(self), 8192):
            rows = slice(start, start + 8192)
            unit_VD[rows] = self.vectors_VD[rows] / lengths_V1[rows]
        return unit_VD

    def select(self, words: Iterable[str]) -> WordVectors:
        """These words, in this order."""
        words = tuple(words)
        rows = np.array([self.id_of(word) for word in words], dtype=np.int64)
        counts = None if self.counts is None else self.counts[rows]
        return replace(self, words=words, vectors_VD=self.vectors_VD[rows], counts=counts)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: row for row, word in enumerate(self.words)}


def first_not_finite(vectors_VD: Matrix) -> int | None:
    """The first row that holds NaN or an infinity."""
    # A sum is not finite if one of its terms is not: no array of flags as large as the vectors.
    with np.errstate(invalid="ignore"):
        suspects = np.flatnonzero(~np.isfinite(vectors_VD.sum(axis=1, dtype=np.float64)))
    return int(suspects[0]) if suspects.size else None


def shown(word: str) -> str:
    """A word in a sentence, whatever is in it."""
    return shortened(repr(word), 60)


def _check_words(words: tuple[str, ...]) -> None:
    if not set(map(type, words)) <= {str}:
        raise DataError("a word of word vectors is no text")
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        raise DataError("a word of word vectors holds half a character, which no file and no screen takes") from None
    if len(set(words)) != len(words):
        seen: set[str] = set()
        double = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
        raise DataError(f"{shown(double)} stands twice among the words; keep one of its vectors")
