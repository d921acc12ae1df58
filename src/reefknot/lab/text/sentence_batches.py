"""Batches of sentences of like length, each computed by itself (Baevski & Auli 2019, Billion Word).

A line of the text is a sentence. Padding is what sentences of unlike lengths cost, so batches are cut from all lines in
the order of their lengths, with those of one length in random order, and then shuffled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import SettingsError
from reefknot.lab.text.samples import Offsets, TextSamples, filled

CHUNK = 1 << 24
"""Ids that are looked at together, to find the ends of lines."""


class Sentences(TextSamples):
    """Lines, in windows of at most `batch` x `steps` tokens, padding included.

    A line longer than `steps` is cut into pieces of so many targets and the rest, which are samples like the others.
    Where the lines of a window do not divide among processes, rows of padding alone come on top.
    """

    def _cut(self) -> Offsets:
        if self._eos is None:
            raise SettingsError(
                'training.batching = "sentences": a sentence ends with <eos>, which the vocabulary does not have; '
                'use vocabulary.end_of_line = true, or batching = "blocks"'
            )
        end = len(self._targets)
        # A text that ends with <eos> has an empty line behind it, of no pieces.
        edges = np.concatenate([[self._first], line_ends(self._targets, self._eos), [end]])
        pieces = -(-np.diff(edges) // self.steps)
        nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        return np.append(np.repeat(edges[:-1], pieces) + nth * self.steps, end)

    def _draw(self, random: np.random.Generator) -> tuple[Offsets, Offsets]:
        # How many fewer than `steps`: the longest come first, and small numbers are sorted without comparing them.
        fewer = (self.steps - np.diff(self._bounds)).astype(np.min_scalar_type(self.steps))
        order = random.permutation(len(fewer))
        order = order[np.argsort(fewer[order], kind="stable")]
        ranges = filled(self.steps - fewer[order], self._total * self.steps)
        return order, random.permutation(ranges)


def line_ends(ids: NDArray[np.int32], eos: int) -> Offsets:
    """Where the lines of a text end: the offsets behind each <eos>. Reads a part at a time, as a text may be large."""
    parts = [start + np.flatnonzero(ids[start : start + CHUNK] == eos) for start in range(0, len(ids), CHUNK)]
    return np.concatenate(parts) + 1
