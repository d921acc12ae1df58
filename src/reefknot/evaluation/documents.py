"""Where documents begin in a text of ids: at the text's start and after every empty line."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import DataError
from reefknot.text.dataset import Split
from reefknot.text.vocabulary import Vocabulary


def document_boundaries(split: Split, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """0, the starts of the later documents, and the number of tokens. An empty line belongs to what it ends."""
    if vocabulary.eos is None:
        raise DataError("the vocabulary has no <eos>, so empty lines cannot be seen; compare by blocks")
    ends_line = np.asarray(split.ids) == vocabulary.eos
    empty_line = ends_line & np.concatenate([[True], ends_line[:-1]])
    starts = np.flatnonzero(~empty_line[1:] & empty_line[:-1]) + 1
    return np.unique(np.concatenate([[0], starts, [split.tokens]]))
