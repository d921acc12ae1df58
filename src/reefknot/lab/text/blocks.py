"""Batches of shuffled blocks of equal length, cut from a text across lines and documents.

This is how Baevski & Auli (2019) train on WikiText-103. `samples.py` explains the two methods of `Blocks`.
"""

from __future__ import annotations

import numpy as np

from reefknot.lab.text.samples import Offsets, TextSamples


class Blocks(TextSamples):
    """Shuffled blocks of `steps` targets. A training window has `batch_size` blocks.

    No token is dropped: the last block of the text may be shorter, and the last window of an epoch may have fewer
    blocks.
    """

    def _compute_bounds(self) -> Offsets:
        end = len(self._targets)
        return np.append(np.arange(self._first_target, end, self.steps), end)

    def _group_samples(self, generator: np.random.Generator) -> tuple[Offsets, Offsets]:
        num_blocks = len(self._bounds) - 1
        starts = np.arange(0, num_blocks, self._global_batch_size)
        ends = np.minimum(starts + self._global_batch_size, num_blocks)
        return generator.permutation(num_blocks), np.stack([starts, ends], axis=1)
