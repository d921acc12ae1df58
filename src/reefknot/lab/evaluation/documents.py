"""Find the documents (articles) of a text, to compare two models by resampling whole documents (`comparison.py`).

Start with `document_boundaries`. A document begins at a first-level heading or, if the text has no headings, after an
empty line.

Shapes: T tokens of the text, L lines, H lines that may be headings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary

HEADING_MARK = "="
"""WikiText has `= Title =` above an article and `= = Title = =` above a section, with empty lines around both."""


def document_boundaries(split: Split, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return 0, the starts of the later documents, and the number of tokens.

    An empty line belongs to the document before it.
    """
    if vocabulary.eos is None:
        raise DataError("the vocabulary has no <eos>, so document boundaries cannot be detected; use --by blocks")
    ids_T = np.asarray(split.ids)
    is_eos_T = ids_T == vocabulary.eos
    document_starts = _find_headings(ids_T, is_eos_T, vocabulary)
    if not len(document_starts):
        document_starts = _find_starts_after_empty_lines(is_eos_T)
    return np.unique(np.concatenate([[0], document_starts, [split.tokens]]))


def _find_headings(
    ids_T: NDArray[np.integer[Any]], is_eos_T: NDArray[np.bool_], vocabulary: Vocabulary
) -> NDArray[np.int64]:
    """Return the positions at which a line starts that begins and ends with exactly one `=`."""
    mark_ids: list[int] = []
    if HEADING_MARK in vocabulary:
        mark_ids = vocabulary.encode([HEADING_MARK])
    if len(mark_ids) != 1:
        return np.empty(0, dtype=np.int64)
    is_mark_T = ids_T == mark_ids[0]

    # A line ends with <eos>, and a heading has at least three tokens before it: `= Title =`.
    ends_L = np.flatnonzero(is_eos_T)
    starts_L = np.concatenate([[0], ends_L + 1])[: len(ends_L)]
    is_long_enough_L = ends_L - starts_L >= 3
    starts_H = starts_L[is_long_enough_L]
    ends_H = ends_L[is_long_enough_L]

    begins_with_one_mark_H = is_mark_T[starts_H] & ~is_mark_T[starts_H + 1]
    ends_with_one_mark_H = is_mark_T[ends_H - 1] & ~is_mark_T[ends_H - 2]
    return np.asarray(starts_H[begins_with_one_mark_H & ends_with_one_mark_H], dtype=np.int64)


def _find_starts_after_empty_lines(is_eos_T: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the positions at which the first line after one or more empty lines starts."""
    # An empty line is an <eos> at the start of the text or after another <eos>.
    is_empty_line_T = is_eos_T & np.concatenate([[True], is_eos_T[:-1]])
    return np.flatnonzero(~is_empty_line_T[1:] & is_empty_line_T[:-1]) + 1
