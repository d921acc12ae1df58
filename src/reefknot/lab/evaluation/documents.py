"""Boundaries of documents in a text. Documents begin at first-level headings or, without any, after empty lines."""

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
    ends_line = ids == vocabulary.eos
    starts = _headings(ids, ends_line, vocabulary)
    if not len(starts):
        empty_line = ends_line & np.concatenate([[True], ends_line[:-1]])
        starts = np.flatnonzero(~empty_line[1:] & empty_line[:-1]) + 1
    return np.unique(np.concatenate([[0], starts, [split.tokens]]))


def _headings(ids: NDArray[np.integer[Any]], ends_line: NDArray[np.bool_], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return the starts of lines that begin and end with exactly one `=`."""
    if HEADING not in vocabulary or len(heading_ids := vocabulary.encode([HEADING])) > 1:
        return np.empty(0, dtype=np.int64)
    mark = ids == heading_ids[0]
    ends = np.flatnonzero(ends_line)
    starts = np.concatenate([[0], ends + 1])[: len(ends)]
    starts, ends = starts[ends - starts >= 3], ends[ends - starts >= 3]
    alone = mark[starts] & ~mark[starts + 1] & mark[ends - 1] & ~mark[ends - 2]
    return np.asarray(starts[alone], dtype=np.int64)
