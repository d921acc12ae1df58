"""Word vectors in memory: words with a matrix of vectors, and conversion to and from gensim.

`WordVectors` is the main class. The embeddings of a model, the class vectors of its output, skip-gram vectors and the
files of other programs all become `WordVectors`. Files are read in blocks (`Block`), which `vectors/files.py` joins.

Shapes: V words, B words of a block (a part of a file that is read at once), D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError, shorten
from reefknot.extras import import_extra

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

Float32Array = NDArray[np.float32]

BLOCK_BYTES = 1 << 24
"""Approximate number of bytes of a file that are processed at once."""


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Distinct words and their vectors, in any order, often by decreasing frequency.

        vectors = rk.read_vectors("glove.6B.100d.txt")
        vectors.vector("house")         # numpy array with shape (D,)
        vectors.vectors_VD              # all vectors, with shape (V, D)

    A `DataError` is raised if words are repeated, if shapes do not match, or if a number is NaN or infinite.

    Args:
        words: V distinct words.
        vectors_VD: One vector per word, with shape (V, D). They are converted to float32.
        counts: Number of occurrences of each word in the training text, with shape (V,), or None if it is not known.
        subwords: Whether the words are known to be sub-words, in which the last sub-word of a word ends in `</w>`.
            Files do not contain this information; runs do.
    """

    words: tuple[str, ...]
    vectors_VD: Float32Array = field(repr=False)  # noqa: N815 - named as its shape
    counts: NDArray[np.int64] | None = field(default=None, repr=False)
    subwords: bool = False

    def __post_init__(self) -> None:
        words = tuple(self.words)
        vectors_VD = _to_float32(self.vectors_VD)
        # The fields of a frozen dataclass can only be set by `object.__setattr__`.
        object.__setattr__(self, "words", words)
        object.__setattr__(self, "vectors_VD", vectors_VD)

        _check_words(words)
        _check_vectors(words, vectors_VD)
        if self.counts is not None:
            counts = np.asarray(self.counts)
            _check_counts(words, counts)
            object.__setattr__(self, "counts", counts.astype(np.int64))

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._row_of_word

    @property
    def dim(self) -> int:
        """Dimension of the vectors, D."""
        return int(self.vectors_VD.shape[1])

    def id_of(self, word: str) -> int:
        """Return the row of a word in `vectors_VD`. Raise a `DataError` if the word does not have a vector.

        Args:
            word: The word, exactly as in `words`.
        """
        try:
            return self._row_of_word[word]
        except KeyError:
            raise DataError(f"{quote(word)} is not among these {len(self):,} words") from None

    def vector(self, word: str) -> Float32Array:
        """Return the vector of a word, with shape (D,). Raise a `DataError` if the word does not have a vector.

        Args:
            word: The word, exactly as in `words`.
        """
        vector_D: Float32Array = self.vectors_VD[self.id_of(word)]
        return vector_D

    @cached_property
    def unit_VD(self) -> Float32Array:  # noqa: N802 - named as its shape
        """The vectors scaled to length 1, (V, D), so that dot products are cosines. Zero vectors stay zero."""
        squared_lengths_V = np.einsum("vd,vd->v", self.vectors_VD, self.vectors_VD, dtype=np.float64)
        lengths_V1 = np.sqrt(squared_lengths_V)[:, None]
        lengths_V1[lengths_V1 == 0.0] = 1.0

        # A length may overflow or underflow in float32, so divide in float64, in slices that bound the extra memory.
        unit_VD = np.empty_like(self.vectors_VD)
        for start in range(0, len(self), 8192):
            rows = slice(start, start + 8192)
            unit_VD[rows] = self.vectors_VD[rows] / lengths_V1[rows]
        return unit_VD

    def select(self, words: Iterable[str]) -> WordVectors:
        """Return the vectors of some of the words. Raise a `DataError` if a word does not have a vector.

        Args:
            words: The words to select, in the order of the result.
        """
        words = tuple(words)
        rows = np.array([self.id_of(word) for word in words], dtype=np.int64)
        counts = None
        if self.counts is not None:
            counts = self.counts[rows]
        return replace(self, words=words, vectors_VD=self.vectors_VD[rows], counts=counts)

    @cached_property
    def _row_of_word(self) -> dict[str, int]:
        return {word: row for row, word in enumerate(self.words)}


class Block(NamedTuple):
    """Consecutive words of a file, not yet decoded, with their vectors."""

    words: list[bytes]
    vectors_BD: Float32Array  # noqa: N815 - named as its shape
    counts: NDArray[np.int64] | None = None


def block_slices(num_rows: int, dim: int, bytes_per_number: int) -> Iterator[slice]:
    """Cut `num_rows` rows of `dim` numbers into slices of about `BLOCK_BYTES` each."""
    rows_per_block = max(1, BLOCK_BYTES // (bytes_per_number * dim))
    for start in range(0, num_rows, rows_per_block):
        yield slice(start, min(start + rows_per_block, num_rows))


def first_non_finite_row(vectors_VD: Float32Array) -> int | None:
    """Return the first row that contains NaN or infinity, or None."""
    # A sum is not finite if one of its terms is not. Sums need less memory than a flag for every number.
    with np.errstate(invalid="ignore"):
        sums_V = vectors_VD.sum(axis=1, dtype=np.float64)
    bad_rows = np.flatnonzero(~np.isfinite(sums_V))
    if not bad_rows.size:
        return None
    return int(bad_rows[0])


def quote(word: str) -> str:
    """Return a word in quotes for use in a message. Special characters are escaped, and a long word is shortened."""
    return shorten(repr(word), 60)


def _to_float32(vectors_VD: Any) -> Float32Array:
    """Convert vectors to a contiguous float32 array. Numbers that are too large become infinite."""
    vectors_VD = np.asarray(vectors_VD)
    if not np.issubdtype(vectors_VD.dtype, np.floating):
        raise DataError(f"word vectors must be floating-point numbers, not {vectors_VD.dtype}")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(vectors_VD, dtype=np.float32)


def _check_words(words: tuple[str, ...]) -> None:
    """Check that the words are distinct strings that can be written as UTF-8."""
    if not all(type(word) is str for word in words):
        raise DataError("the words of word vectors must all be strings")
    try:
        "".join(words).encode()
    except UnicodeEncodeError:
        raise DataError("a word contains a lone surrogate, which cannot be encoded as UTF-8; remove the word") from None

    if len(set(words)) == len(words):  # fast for millions of words
        return
    earlier_words: set[str] = set()
    for word in words:
        if word in earlier_words:
            raise DataError(f"{quote(word)} occurs twice among the words; keep only one of its vectors")
        earlier_words.add(word)


def _check_vectors(words: tuple[str, ...], vectors_VD: Float32Array) -> None:
    """Check that there is one vector per word, and that all numbers are finite."""
    if vectors_VD.ndim != 2 or len(vectors_VD) != len(words) or vectors_VD.shape[1] == 0:
        raise DataError(
            f"{len(words):,} words need a matrix with {len(words):,} rows and at least one column, "
            f"not one of shape {vectors_VD.shape}"
        )
    bad_row = first_non_finite_row(vectors_VD)
    if bad_row is not None:
        raise DataError(
            f"the vector of {quote(words[bad_row])} contains NaN or infinity; correct it or remove the word"
        )


def _check_counts(words: tuple[str, ...], counts: NDArray[Any]) -> None:
    """Check that there is one count per word, and that no count is negative."""
    if counts.shape != (len(words),) or not np.issubdtype(counts.dtype, np.integer):
        raise DataError(
            f"{len(words):,} words need {len(words):,} integer counts, not {counts.dtype} of shape {counts.shape}"
        )
    if counts.size and counts.min() < 0:
        bad_word = words[int(counts.argmin())]
        raise DataError(f"the count of {quote(bad_word)} is {counts.min()}; it must be at least 0")


def to_keyed_vectors(vectors: WordVectors) -> KeyedVectors:
    """Return a copy as gensim's `KeyedVectors`. If counts are known, they become its attribute `count`."""
    gensim = import_extra("gensim.models", "the conversion to KeyedVectors")
    keyed: KeyedVectors = gensim.KeyedVectors(vectors.dim, dtype=np.float32)
    keyed.add_vectors(list(vectors.words), vectors.vectors_VD)
    if vectors.counts is not None:
        for word, count in zip(vectors.words, vectors.counts.tolist(), strict=True):
            keyed.set_vecattr(word, "count", count)
    return keyed


def from_keyed_vectors(keyed: Any) -> WordVectors:
    """Return a copy of gensim's `KeyedVectors`. A gensim model is accepted too; its `wv` is copied."""
    keyed = getattr(keyed, "wv", keyed)
    try:
        words = tuple(keyed.index_to_key)
        vectors_VD = keyed.vectors
        attributes = keyed.expandos  # gensim's attributes of each word, such as its count
    except AttributeError:
        raise DataError(
            f"expected gensim's KeyedVectors or a model that has them as wv, not {type(keyed).__name__}"
        ) from None
    counts = attributes.get("count")
    if counts is not None:
        counts = np.array(counts)
    return WordVectors(words, np.array(vectors_VD), counts)
