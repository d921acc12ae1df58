"""Batches of pairs of lines, a source and its translation, of like length on both sides (Vaswani et al. 2017).

A window is read as one text is: `x_BU` holds a source and what stands before each target side by side, `y_BT` the
targets, so that S = U - T columns are the source's. A target line begins after <eos>, which also ends it. Widths are
rounded up to a multiple of 8, for few shapes and aligned products; batches are cut from all pairs in the order of their
widths, with those of one width in random order, and then shuffled.

Shapes: B rows of one window, S steps of its sources, T of its targets, U = S + T.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from reefknot.errors import DataError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.text.pair_dataset import Lines
from reefknot.lab.text.samples import Offsets, Samples, filled, laid_out

MULTIPLE = 8
"""Of which the widths of a window are multiples."""


class PairBatches(Samples):
    """Pairs, in windows of at most `batch` x `steps` tokens on the wider side, padding included.

    Both sides of a line end with <eos>; `eos` is the target's. Sources are filled up with `IGNORE`, which is no word,
    what stands before targets with 0. Where the pairs of a window do not divide among processes, rows without a target
    come on top.
    """

    def __init__(self, source: Lines, target: Lines, batch: int, steps: int, *, eos: int, seed: int = 0) -> None:
        if len(source) != len(target):
            raise DataError(
                f"{len(source):,} source lines and {len(target):,} target lines are no pairs; "
                "give as many of one as of the other"
            )
        if not len(target):
            raise DataError("there is no pair to train on; use a larger corpus, or leave out fewer with corpus.pairs")
        self._source, self._target = source, target
        self._eos = eos
        self._widths = _widths(source.lengths), _widths(target.lengths)
        super().__init__(batch, steps, seed=seed)

    def _cut(self) -> Offsets:
        room, widest = self._total * self.steps, max(int(side.max()) for side in self._widths)
        if widest > room:
            raise SettingsError(
                f"training.batch x training.steps = {room:,} tokens, but the longest pair takes {widest:,}, padding "
                "included; make training.steps larger, or leave such pairs out with corpus.pairs.longest"
            )
        return self._target.bounds

    def _draw(self, random: np.random.Generator) -> tuple[Offsets, Offsets]:
        order = random.permutation(len(self._bounds) - 1)
        source, target = (side[order] for side in self._widths)
        wider = np.maximum(source, target)
        by_width = np.lexsort((target, source, wider))[::-1]
        ranges = filled(wider[by_width], self._total * self.steps)
        return order[by_width], random.permutation(ranges)

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`x_BU`, sources and what stands before each target, and `targets_BT`."""
        pairs = self._samples(index)
        source_steps, target_steps = (int(side[pairs].max()) for side in self._widths)
        own_B, lengths_B = self._rows(pairs)
        source_lengths_B = self._source.bounds[own_B + 1] - self._source.bounds[own_B]
        source_BS = _ids(self._source, own_B, source_lengths_B, source_steps)
        targets_BT = _ids(self._target, own_B, lengths_B, target_steps)
        before_BT = np.pad(targets_BT[:, :-1], ((0, 0), (1, 0)), constant_values=self._eos)
        inputs_BT = np.where(targets_BT == IGNORE, 0, before_BT)
        x_BU = np.concatenate([source_BS, inputs_BT], axis=1)
        return torch.from_numpy(x_BU), torch.from_numpy(targets_BT)


def _widths(lengths: Offsets) -> NDArray[np.integer]:
    """What lines take, filled up to a multiple; small numbers, since there may be tens of millions of them."""
    widths = -(-lengths // MULTIPLE) * MULTIPLE
    return widths.astype(np.min_scalar_type(widths.max()))


def _ids(lines: Lines, numbers_B: Offsets, lengths_B: Offsets, steps: int) -> NDArray[np.int64]:
    """The first `lengths_B` ids of these lines, filled up with `IGNORE`."""
    places_BT, there_BT = laid_out(lines.bounds[numbers_B], lengths_B, steps, beyond=0)
    return np.where(there_BT, lines.ids[places_BT], IGNORE).astype(np.int64)
