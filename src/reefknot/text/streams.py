"""Parallel streams for truncated backpropagation, read by an integer index so that resuming replays nothing.

Shapes: B streams (the batch), T steps of one window.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from reefknot.errors import DataError, SettingsError


class Streams:
    """A text cut into `batch` contiguous streams of equal length, read `steps` tokens at a time.

    The tokens left over at the end of the text, fewer than `batch`, are not used. Each token of a stream but
    its first is a target exactly once per epoch; the last window is shorter where `steps` does not divide.
    Window i + 1 goes on where window i stopped, so a state carried from one to the next fits. What a model reads may
    have ids of its own, `inputs`: the same text, with spellings that are no targets.
    """

    def __init__(self, ids: NDArray[np.int32], batch: int, steps: int, inputs: NDArray[np.int32] | None = None) -> None:
        if batch < 1 or steps < 1:
            raise SettingsError(f"batch = {batch}, steps = {steps}: both must be at least 1")
        length = len(ids) // batch
        if length < 2:
            raise DataError(
                f"the text has {len(ids):,} tokens but {batch:,} streams need at least {2 * batch:,}:"
                " use a smaller batch or a longer text"
            )
        self.batch = batch
        self.steps = steps
        # Views: the text stays on disk.
        self._targets = ids[: batch * length].reshape(batch, length)
        self._inputs = self._targets if inputs is None else inputs[: batch * length].reshape(batch, length)

    @property
    def windows(self) -> int:
        """Windows per epoch."""
        return -(-self._length // self.steps)

    @property
    def tokens(self) -> int:
        """Targets per epoch."""
        return self.batch * self._length

    @property
    def _length(self) -> int:
        """Targets of one stream."""
        return int(self._targets.shape[1]) - 1

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one window, `inputs_BT` and `targets_BT`: the same text, one token apart."""
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        start = index * self.steps
        stop = min(start + self.steps, self._length)
        inputs_BT, targets_BT = self._inputs[:, start:stop], self._targets[:, start + 1 : stop + 1]
        return torch.from_numpy(inputs_BT.astype(np.int64)), torch.from_numpy(targets_BT.astype(np.int64))

    def slice(self, rank: int, world: int) -> Streams:
        """The share of one of `world` processes: an equal, contiguous part of the streams."""
        if self.batch % world:
            raise SettingsError(f"batch = {self.batch} does not divide among {world} processes")
        share = self.batch // world
        own = slice(rank * share, (rank + 1) * share)
        return Streams(self._targets[own].reshape(-1), share, self.steps, self._inputs[own].reshape(-1))
