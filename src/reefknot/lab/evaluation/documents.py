"""Find the documents of a text. They begin at first-level headings or, if there are no headings, after empty lines.

`document_boundaries` is used to compare two models by resampling whole documents (`comparison.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary

HEADING = "="
"""WikiText has `= Title =` above an article and `= = Title = =` above a section, with empty lines around both."""


def document_boundaries(split: Split, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return 0, the starts of the later documents, and the number of tokens.

    An empty line belongs to the document before it.
    """
    if vocabulary.eos is None:
        raise DataError("the vocabulary has no <eos>, so document boundaries cannot be detected; use --by blocks")
    ids = np.asarray(split.ids)
    is_eos = ids == vocabulary.eos
    starts = _find_headings(ids, is_eos, vocabulary)
    if not len(starts):
        is_empty_line = is_eos & np.concatenate([[True], is_eos[:-1]])
        starts = np.flatnonzero(~is_empty_line[1:] & is_empty_line[:-1]) + 1  # the first line after empty lines
    return np.unique(np.concatenate([[0], starts, [split.tokens]]))


def _find_headings(
    ids: NDArray[np.integer[Any]], is_eos: NDArray[np.bool_], vocabulary: Vocabulary
) -> NDArray[np.int64]:
    """Return the starts of lines that begin and end with exactly one `=`."""
    heading_ids = vocabulary.encode([HEADING]) if HEADING in vocabulary else []
    if len(heading_ids) != 1:
        return np.empty(0, dtype=np.int64)
    is_mark = ids == heading_ids[0]
    ends = np.flatnonzero(is_eos)
    starts = np.concatenate([[0], ends + 1])[: len(ends)]
    is_long_enough = ends - starts >= 3
    starts, ends = starts[is_long_enough], ends[is_long_enough]
    is_heading = is_mark[starts] & ~is_mark[starts + 1] & is_mark[ends - 1] & ~is_mark[ends - 2]
    return np.asarray(starts[is_heading], dtype=np.int64)
