"""Samples: independent parts of a text, which are grouped into different training windows in every epoch.

A sample is a range of targets. `Blocks`, `Sentences` and `PairBatches` define where samples end, which samples form a
window and which input precedes a target; this module does everything else. Only the bounds of samples are in memory;
ids stay on disk until a window is read.

Random choices depend only on the seed and the epoch, not on the number of processes.

Shapes: S samples, W windows of an epoch, B rows of one window, T targets of its longest row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from reefknot.errors import DataError, SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.text.streams import check_sizes

Offsets = NDArray[np.int64]


class Samples(ABC):
    """Training windows whose rows are samples, padded on the right. Each token is a target exactly once per epoch.

    The epoch is 1 until `begin` is called.
    """

    def __init__(self, batch: int, steps: int, *, seed: int) -> None:
        """Subclasses set the attributes that `_cut` needs before they call this."""
        check_sizes(batch, steps)
        self.steps = steps
        self.seed = seed
        self._total = batch
        self._rank, self._world = 0, 1
        self._bounds = self._cut()
        self.epoch = 0
        self.begin(epoch=1)

    @abstractmethod
    def _cut(self) -> Offsets:
        """Return S + 1 offsets into the targets: where each sample begins, and where the last sample ends."""

    @abstractmethod
    def _draw(self, random: np.random.Generator) -> tuple[Offsets, Offsets]:
        """Return the order of the samples in an epoch, order_S, and the range in this order of each window, (W, 2)."""

    @abstractmethod
    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of this process's rows. Targets of short rows are padded with `IGNORE`."""

    def begin(self, epoch: int) -> None:
        """Switch to the windows of this epoch, counted from 1."""
        if epoch != self.epoch:  # shuffling tens of millions of lines takes seconds
            self.epoch = epoch
            self._order, self._ranges = self._draw(np.random.default_rng((self.seed, epoch)))

    @property
    def batch(self) -> int:
        """Number of rows of `steps` tokens that fit into a window of this process."""
        return -(-self._total // self._world)

    @property
    def windows(self) -> int:
        """Number of windows in this epoch."""
        return len(self._ranges)

    @property
    def tokens(self) -> int:
        """Number of targets in an epoch, over all processes."""
        return int(self._bounds[-1] - self._bounds[0])

    def count(self, index: int) -> int:
        """Return the number of targets in one window, over all processes."""
        samples = self._samples(index)
        return int((self._bounds[samples + 1] - self._bounds[samples]).sum())

    def _samples(self, index: int) -> Offsets:
        """Return the samples of one window, for all processes."""
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        first, stop = self._ranges[index]
        return self._order[first:stop]

    def _rows(self, samples: Offsets) -> tuple[Offsets, Offsets]:
        """Return the samples in this process's rows, and the number of targets in each of its rows.

        If the samples cannot be divided equally, the last processes repeat the first sample in a row without targets.
        """
        local = samples[self._rank :: self._world]
        missing = -(-len(samples) // self._world) - len(local)
        lengths = self._bounds[local + 1] - self._bounds[local]
        return np.append(local, samples[:missing]), np.pad(lengths, (0, missing))

    def rate_factor(self, index: int) -> float:
        """Return 1: the learning rate does not depend on the window."""
        return 1.0

    def slice(self, rank: int, world: int) -> Self:
        """Return the samples of process `rank` of `world` processes: every `world`-th row of each window."""
        if self._total < world:
            raise SettingsError(f"batch = {self._total} is too small for {world} processes; some would have no row")
        part = copy(self)
        part._rank, part._world = rank, world
        return part


class TextSamples(Samples):
    """Samples that together form one text.

    The input before each target is its predecessor in the text, also for the first target of a sample. <eos> precedes
    the text; without `eos`, the first token of the text is not a target. `inputs` is the same text as input ids, if
    they differ from the target ids: spelled words have their own input ids.
    """

    def __init__(
        self,
        ids: NDArray[np.int32],
        batch: int,
        steps: int,
        inputs: NDArray[np.int32] | None = None,
        *,
        eos: int | None = None,
        seed: int = 0,
    ) -> None:
        self._eos = eos
        self._first = 1 if eos is None else 0
        if len(ids) <= self._first:
            raise DataError(f"the text has {len(ids)} tokens, and none of them is a target; use a longer text")
        self._targets = ids
        self._inputs = ids if inputs is None else inputs
        super().__init__(batch, steps, seed=seed)

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `inputs_BT` and `targets_BT`."""
        samples = self._samples(index)
        longest = int((self._bounds[samples + 1] - self._bounds[samples]).max())
        rows_B, lengths_B = self._rows(samples)
        # Padding reads the token before the first target; any token would do.
        offsets_BT, valid_BT = row_offsets(self._bounds[rows_B], lengths_B, longest, padding=self._first)
        inputs_BT = np.where(offsets_BT > 0, self._inputs[offsets_BT - 1], self._eos or 0)
        targets_BT = np.where(valid_BT, self._targets[offsets_BT], IGNORE)
        return torch.from_numpy(inputs_BT.astype(np.int64)), torch.from_numpy(targets_BT.astype(np.int64))


def row_offsets(starts_B: Offsets, lengths_B: Offsets, steps: int, padding: int) -> tuple[Offsets, NDArray[np.bool_]]:
    """Return the offset in the text of each token of a batch of rows, and whether the token is not padding.

    Args:
        starts_B: Offset in the text at which each row begins.
        lengths_B: Number of tokens in each row.
        steps: Width of the result, T.
        padding: The offset of tokens after the end of a row.
    """
    steps_T = np.arange(steps)
    valid_BT = steps_T < lengths_B[:, None]
    return np.where(valid_BT, starts_B[:, None] + steps_T, padding), valid_BT


def pack_windows(lengths_S: NDArray[np.integer], capacity: int) -> Offsets:
    """Group samples, sorted by decreasing length, into windows of at most `capacity` tokens, padding included.

    Returns the first sample and the end of each window, (W, 2).
    """
    firsts, first = [], 0
    while first < len(lengths_S):
        firsts.append(first)
        first += capacity // int(lengths_S[first])
    return np.stack([firsts, [*firsts[1:], len(lengths_S)]], axis=1)
