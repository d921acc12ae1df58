"""Batches of shuffled blocks of equal length, cut from a text across lines and documents.

This is how Baevski & Auli (2019) train on WikiText-103. The base class in `samples.py` explains the two methods of
`Blocks`: where a block begins, and which blocks form a training window (the batch of one update).
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
        num_tokens = len(self._targets)
        starts = np.arange(self._first_target, num_tokens, self.steps)
        return np.append(starts, num_tokens)

    def _group_samples(self, generator: np.random.Generator) -> tuple[Offsets, Offsets]:
        num_blocks = len(self._bounds) - 1
        block_order = generator.permutation(num_blocks)
        starts = np.arange(0, num_blocks, self._global_batch_size)
        ends = np.minimum(starts + self._global_batch_size, num_blocks)
        window_ranges = np.stack([starts, ends], axis=1)
        return block_order, window_ranges
