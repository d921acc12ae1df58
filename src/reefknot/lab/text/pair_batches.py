"""Batches of source lines with their translations, of similar length on both sides (Vaswani et al. 2017).

`PairBatches` returns training windows. A window is the batch of one update and consists of two tensors. `pairs_BU`
holds the source lines and, to their right, the inputs of the target side. `targets_BT` holds the targets:

    pairs_BU    a dog barks <eos> | <eos> ein Hund bellt
    targets_BT                        ein Hund bellt <eos>

To avoid padding, all pairs are sorted by width (the length of a line, rounded up to a multiple of 8), with pairs of
equal width in random order. The sorted pairs are cut into batches, and the batches are shuffled. Rounded widths give
few shapes and aligned matrix products.

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

WIDTH_MULTIPLE = 8
"""The widths of a window are multiples of this number."""


class PairBatches(Samples):
    """Pairs in training windows of at most `batch_size` x `steps` tokens on the wider side, padding included.

    Lines of both sides end with <eos>; `eos` is its id on the target side. Sources are padded with `IGNORE`, which is
    not the id of a word, and the inputs of the target side with 0. If the pairs of a window cannot be divided equally
    among the processes, rows without targets are added.
    """

    def __init__(self, source: Lines, target: Lines, batch_size: int, steps: int, *, eos: int, seed: int = 0) -> None:
        if len(source) != len(target):
            raise DataError(
                f"{len(source):,} source lines and {len(target):,} target lines do not form pairs; "
                "pass the same number of both"
            )
        if not len(target):
            raise DataError("there are no pairs to train on; use a larger corpus, or looser filters in corpus.pairs")
        self._source = source
        self._target = target
        self._eos = eos
        self._source_widths = _round_up(source.lengths)
        self._target_widths = _round_up(target.lengths)
        super().__init__(batch_size, steps, seed=seed)

    def _compute_bounds(self) -> Offsets:
        capacity = self._global_batch_size * self.steps
        max_width = max(int(self._source_widths.max()), int(self._target_widths.max()))
        if max_width > capacity:
            raise SettingsError(
                f"training.batch x training.steps = {capacity:,} tokens, but the longest pair takes {max_width:,} with "
                "padding; increase training.steps, or leave such pairs out with corpus.pairs.longest"
            )
        return self._target.bounds

    def _group_samples(self, generator: np.random.Generator) -> tuple[Offsets, Offsets]:
        random_order = generator.permutation(len(self._bounds) - 1)
        source_widths = self._source_widths[random_order]
        target_widths = self._target_widths[random_order]
        pair_widths = np.maximum(source_widths, target_widths)

        # Sort by the wider side, then by source, then by target; the widest pair comes first.
        by_width = np.lexsort((target_widths, source_widths, pair_widths))[::-1]
        capacity = self._global_batch_size * self.steps
        window_ranges = pack_windows(pair_widths[by_width], capacity)
        return random_order[by_width], generator.permutation(window_ranges)

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `pairs_BU`, the sources and the inputs of the target side, and `targets_BT`."""
        samples = self._window_samples(index)
        source_steps = int(self._source_widths[samples].max())
        target_steps = int(self._target_widths[samples].max())

        samples_B, target_lengths_B = self._local_rows(samples)
        source_lengths_B = self._source.bounds[samples_B + 1] - self._source.bounds[samples_B]
        source_BS = pad_lines(self._source, samples_B, source_lengths_B, source_steps)
        targets_BT = pad_lines(self._target, samples_B, target_lengths_B, target_steps)
        pairs_BU = join_sides(source_BS, targets_BT, self._eos)
        return torch.from_numpy(pairs_BU), torch.from_numpy(targets_BT)


def _round_up(lengths: Offsets) -> NDArray[np.integer]:
    """Round the lengths of lines up to a multiple of `WIDTH_MULTIPLE`.

    The result has a small integer type, because there may be tens of millions of lines.
    """
    widths = -(-lengths // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    return widths.astype(np.min_scalar_type(widths.max()))


def pad_lines(lines: Lines, indices_B: Offsets, lengths_B: Offsets, steps: int) -> NDArray[np.int64]:
    """Return the first `lengths_B` ids of the lines `indices_B`, padded with `IGNORE` to `steps` ids."""
    offsets_BT, valid_BT = row_offsets(lines.bounds[indices_B], lengths_B, steps, padding=0)
    return np.where(valid_BT, lines.ids[offsets_BT], IGNORE).astype(np.int64)


def join_sides(source_BS: NDArray[np.int64], targets_BT: NDArray[np.int64], eos: int) -> NDArray[np.int64]:
    """Return `pairs_BU`, the ids that a translator reads: the sources, and the input of each target to their right.

    The input of a target is the previous target, and `eos` for the first. Padding of the targets has the input 0.
    """
    previous_BT = np.pad(targets_BT[:, :-1], ((0, 0), (1, 0)), constant_values=eos)
    inputs_BT = np.where(targets_BT == IGNORE, 0, previous_BT)
    return np.concatenate([source_BS, inputs_BT], axis=1)
