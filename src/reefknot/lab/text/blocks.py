"""Blocks of equal length, cut from a text across lines and documents (Baevski & Auli 2019, WikiText-103)."""

from __future__ import annotations

import numpy as np

from reefknot.lab.text.samples import Offsets, TextSamples


class Blocks(TextSamples):
    """Shuffled blocks of `steps` targets. A training window has `batch` blocks.

    No token is dropped: the last block of the text may be shorter, and the last window of an epoch may have fewer
    blocks.
    """

    def _cut(self) -> Offsets:
        return np.append(np.arange(self._first, len(self._targets), self.steps), len(self._targets))

    def _draw(self, random: np.random.Generator) -> tuple[Offsets, Offsets]:
        blocks = len(self._bounds) - 1
        firsts = np.arange(0, blocks, self._total)
        return random.permutation(blocks), np.stack([firsts, np.minimum(firsts + self._total, blocks)], axis=1)
