"""Batches of independent sentences of similar length (Baevski & Auli 2019, Billion Word).

A line of the text is a sentence. To avoid padding, all lines are sorted by length, with lines of equal length in random
order. The sorted lines are cut into batches, and the batches are shuffled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import SettingsError
from reefknot.lab.text.samples import Offsets, TextSamples, pack_windows

CHUNK = 1 << 24
"""Number of ids that are searched for line ends at a time."""


class Sentences(TextSamples):
    """Lines in training windows of at most `batch` x `steps` tokens, padding included.

    A line longer than `steps` is cut into samples of `steps` targets and a shorter last one. If the lines of a window
    cannot be divided equally among the processes, rows of padding are added.
    """

    def _cut(self) -> Offsets:
        if self._eos is None:
            raise SettingsError(
                'training.batching = "sentences": a sentence ends with <eos>, which the vocabulary does not have; '
                'use vocabulary.end_of_line = true, or batching = "blocks"'
            )
        end = len(self._targets)
        # A text that ends with <eos> has an empty last line, which gives no sample.
        edges = np.concatenate([[self._first], line_ends(self._targets, self._eos), [end]])
        samples = -(-np.diff(edges) // self.steps)  # number of samples of each line
        nth = np.arange(samples.sum()) - np.repeat(np.cumsum(samples) - samples, samples)
        return np.append(np.repeat(edges[:-1], samples) + nth * self.steps, end)

    def _draw(self, random: np.random.Generator) -> tuple[Offsets, Offsets]:
        # Sort by the number of missing tokens, so that the longest lines come first. Small integers are sorted fast.
        missing = (self.steps - np.diff(self._bounds)).astype(np.min_scalar_type(self.steps))
        order = random.permutation(len(missing))
        order = order[np.argsort(missing[order], kind="stable")]
        ranges = pack_windows(self.steps - missing[order], self._total * self.steps)
        return order, random.permutation(ranges)


def line_ends(ids: NDArray[np.int32], eos: int) -> Offsets:
    """Return the offset after each <eos>. The text is searched in chunks, because it may be larger than memory."""
    chunks = [start + np.flatnonzero(ids[start : start + CHUNK] == eos) for start in range(0, len(ids), CHUNK)]
    return np.concatenate(chunks) + 1
