"""Word vectors in memory as gensim's `KeyedVectors`, and back. gensim is an extra: it is imported when asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from reefknot.errors import DataError, SettingsError
from reefknot.vectors.word_vectors import WordVectors

if TYPE_CHECKING:
    from gensim.models import KeyedVectors


def to_keyed_vectors(vectors: WordVectors) -> KeyedVectors:
    """A copy for gensim; counts, where they are known, are its attribute `count`."""
    try:
        from gensim.models import KeyedVectors
    except ImportError as error:
        raise SettingsError("gensim is not installed: pip install 'reefknot[gensim]'") from error
    keyed = KeyedVectors(vectors.dim, dtype=np.float32)
    keyed.add_vectors(list(vectors.words), vectors.vectors_VD)
    if vectors.counts is not None:
        for word, count in zip(vectors.words, vectors.counts.tolist(), strict=True):
            keyed.set_vecattr(word, "count", count)
    return keyed


def from_keyed_vectors(keyed: Any) -> WordVectors:
    """A copy of what gensim holds: a `KeyedVectors`, or the `wv` of its model."""
    keyed = getattr(keyed, "wv", keyed)
    try:
        words, vectors_VD, expandos = tuple(keyed.index_to_key), keyed.vectors, keyed.expandos
    except AttributeError:
        raise DataError(f"a {type(keyed).__name__} is no KeyedVectors of gensim; give a model's wv") from None
    counts = expandos.get("count")
    return WordVectors(words, np.array(vectors_VD), None if counts is None else np.array(counts))
