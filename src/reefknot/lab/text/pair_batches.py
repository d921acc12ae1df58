"""Batches of source lines with their translations, of similar length on both sides (Vaswani et al. 2017).

A training window has the same form as a window of one text: `x_BU` holds the source and, to its right, the input before
each target; `y_BT` holds the targets. So the first S = U - T columns are the source. <eos> precedes the first token of
a target line and ends the line. Widths are rounded up to a multiple of 8, which gives few shapes and aligned matrix
products. All pairs are sorted by width, with pairs of equal width in random order. The sorted pairs are cut into
batches, and the batches are shuffled.

Shapes: B rows of one window, S steps of its sources, T steps of its targets, U = S + T.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from reefknot.errors import DataError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.text.pair_dataset import Lines
from reefknot.lab.text.samples import Offsets, Samples, pack_windows, row_offsets

MULTIPLE = 8
"""The widths of a window are multiples of this number."""


class PairBatches(Samples):
    """Pairs in training windows of at most `batch` x `steps` tokens on the wider side, padding included.

    Lines of both sides end with <eos>; `eos` is its id on the target side. Sources are padded with `IGNORE`, which is
    not the id of a word, and the inputs of the target side with 0. If the pairs of a window cannot be divided equally
    among the processes, rows without targets are added.
    """

    def __init__(self, source: Lines, target: Lines, batch: int, steps: int, *, eos: int, seed: int = 0) -> None:
        if len(source) != len(target):
            raise DataError(
                f"{len(source):,} source lines and {len(target):,} target lines do not form pairs; "
                "pass the same number of both"
            )
        if not len(target):
            raise DataError("there are no pairs to train on; use a larger corpus, or looser filters in corpus.pairs")
        self._source, self._target = source, target
        self._eos = eos
        self._widths = _widths(source.lengths), _widths(target.lengths)
        super().__init__(batch, steps, seed=seed)

    def _cut(self) -> Offsets:
        capacity, widest = self._total * self.steps, max(int(side.max()) for side in self._widths)
        if widest > capacity:
            raise SettingsError(
                f"training.batch x training.steps = {capacity:,} tokens, but the longest pair takes {widest:,} with "
                "padding; increase training.steps, or leave such pairs out with corpus.pairs.longest"
            )
        return self._target.bounds

    def _draw(self, random: np.random.Generator) -> tuple[Offsets, Offsets]:
        order = random.permutation(len(self._bounds) - 1)
        source, target = (side[order] for side in self._widths)
        wider = np.maximum(source, target)
        by_width = np.lexsort((target, source, wider))[::-1]
        ranges = pack_windows(wider[by_width], self._total * self.steps)
        return order[by_width], random.permutation(ranges)

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `x_BU`, the sources and the input before each target, and `targets_BT`."""
        pairs = self._samples(index)
        source_steps, target_steps = (int(side[pairs].max()) for side in self._widths)
        rows_B, lengths_B = self._rows(pairs)
        source_lengths_B = self._source.bounds[rows_B + 1] - self._source.bounds[rows_B]
        source_BS = _ids(self._source, rows_B, source_lengths_B, source_steps)
        targets_BT = _ids(self._target, rows_B, lengths_B, target_steps)
        before_BT = np.pad(targets_BT[:, :-1], ((0, 0), (1, 0)), constant_values=self._eos)
        inputs_BT = np.where(targets_BT == IGNORE, 0, before_BT)
        x_BU = np.concatenate([source_BS, inputs_BT], axis=1)
        return torch.from_numpy(x_BU), torch.from_numpy(targets_BT)


def _widths(lengths: Offsets) -> NDArray[np.integer]:
    """Return the widths of lines, rounded up, in a small integer type: there may be tens of millions of lines."""
    widths = -(-lengths // MULTIPLE) * MULTIPLE
    return widths.astype(np.min_scalar_type(widths.max()))


def _ids(lines: Lines, numbers_B: Offsets, lengths_B: Offsets, steps: int) -> NDArray[np.int64]:
    """Return the first `lengths_B` ids of these lines, padded with `IGNORE`."""
    offsets_BT, valid_BT = row_offsets(lines.bounds[numbers_B], lengths_B, steps, padding=0)
    return np.where(valid_BT, lines.ids[offsets_BT], IGNORE).astype(np.int64)
