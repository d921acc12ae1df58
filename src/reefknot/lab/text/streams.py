"""Parallel streams for truncated backpropagation. Windows are read by index, so a resumed run replays nothing.

Windows have one length, or random lengths that differ between epochs (Merity et al. 2018, AWD-LSTM), so that the
gradient is not cut at the same words in every epoch. Random lengths depend on the seed and the epoch only: there is
nothing to save, and several processes agree without communicating.

Shapes: B streams (the batch), T steps of one window.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.settings import Count, NonNegative, Settings


class RandomSteps(Settings):
    """Window lengths are drawn around `steps`, or sometimes around half of it; the rate scales with them."""

    probability: Annotated[
        float,
        Field(
            ge=0.0, le=1.0, description="Probability of a window length around `steps` instead of around half of it."
        ),
    ] = 0.95
    deviation: Annotated[NonNegative, Field(description="Standard deviation of the window length, in tokens.")] = 5.0
    least: Annotated[Count, Field(description="Minimum window length. Shorter lengths are raised to it.")] = 5
    most: Annotated[
        Count | None,
        Field(description="Maximum window length. Longer lengths are reduced to it. By default there is no maximum."),
    ] = None

    @model_validator(mode="after")
    def _check_bounds(self) -> RandomSteps:
        if self.most is not None and self.most < self.least:
            raise ValueError(f"most = {self.most} is less than least = {self.least}")
        return self

    def draw(self, steps: int, random: np.random.Generator) -> int:
        """Draw the length of one window."""
        centre = steps if random.random() < self.probability else steps / 2
        length = max(self.least, int(random.normal(centre, self.deviation)))
        return length if self.most is None else min(length, self.most)


def check_sizes(batch: int, steps: int) -> None:
    """Reject windows without tokens."""
    if batch < 1 or steps < 1:
        raise SettingsError(f"batch = {batch}, steps = {steps}: both must be at least 1")


class Streams:
    """A text cut into `batch` contiguous streams of equal length, read `steps` tokens at a time.

    The last tokens of the text, fewer than `batch`, are not used. Each token of a stream except the first is a target
    exactly once per epoch. The last window of an epoch may be shorter. Window i + 1 continues where window i ends, so
    that the state can be carried over. `inputs` is the same text with the ids that the input end reads, if they
    differ: spelled words have ids that are not targets.

    Windows are those of epoch 1 until `begin` is called; with `random_steps` they differ between epochs.
    """

    def __init__(
        self,
        ids: NDArray[np.int32],
        batch: int,
        steps: int,
        inputs: NDArray[np.int32] | None = None,
        *,
        random_steps: RandomSteps | None = None,
        seed: int = 0,
    ) -> None:
        check_sizes(batch, steps)
        length = len(ids) // batch
        if length < 2:
            raise DataError(
                f"the text has {len(ids):,} tokens but {batch:,} streams need at least {2 * batch:,}:"
                " use a smaller batch or a longer text"
            )
        self.batch = batch
        self.steps = steps
        self.random_steps = random_steps
        self.seed = seed
        self._world = 1
        # These are views: the text stays on disk.
        self._targets = ids[: batch * length].reshape(batch, length)
        self._inputs = self._targets if inputs is None else inputs[: batch * length].reshape(batch, length)
        self.begin(epoch=1)

    def begin(self, epoch: int) -> None:
        """Switch to the windows of this epoch, counted from 1."""
        self.epoch = epoch
        self._lengths = self._draw_lengths()
        self._starts = np.cumsum(self._lengths) - self._lengths

    def _draw_lengths(self) -> NDArray[np.int64]:
        """Return the length of each window; the text may end before the last one does."""
        if self.random_steps is None:
            return np.full(-(-self._length // self.steps), self.steps)
        random = np.random.default_rng((self.seed, self.epoch))
        lengths = []
        remaining = self._length
        while remaining > 0:
            lengths.append(self.random_steps.draw(self.steps, random))
            remaining -= lengths[-1]
        return np.array(lengths)

    @property
    def windows(self) -> int:
        """Number of windows in this epoch."""
        return len(self._lengths)

    @property
    def tokens(self) -> int:
        """Number of targets per epoch, over all processes."""
        return self._world * self.batch * self._length

    @property
    def _length(self) -> int:
        """Number of targets in one stream."""
        return int(self._targets.shape[1]) - 1

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `inputs_BT` and `targets_BT` of one window: the same text, one token apart."""
        start, stop = self._bounds(index)
        inputs_BT, targets_BT = self._inputs[:, start:stop], self._targets[:, start + 1 : stop + 1]
        return torch.from_numpy(inputs_BT.astype(np.int64)), torch.from_numpy(targets_BT.astype(np.int64))

    def count(self, index: int) -> int:
        """Return the number of targets in one window, over all processes."""
        start, stop = self._bounds(index)
        return self._world * self.batch * (stop - start)

    def _bounds(self, index: int) -> tuple[int, int]:
        """Return where a window begins and ends in each stream."""
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        start = int(self._starts[index])
        return start, min(start + int(self._lengths[index]), self._length)

    def rate_factor(self, index: int) -> float:
        """Return the factor of the learning rate for one window: its random length divided by `steps`.

        The random length counts even if the text ends before it. The factor is 1 if all windows have one length.
        """
        return float(self._lengths[index] / self.steps)

    def slice(self, rank: int, world: int) -> Streams:
        """Return the share of one of `world` processes: an equal, contiguous part of the streams."""
        if self.batch % world:
            raise SettingsError(f"batch = {self.batch} does not divide among {world} processes")
        share = self.batch // world
        rows = slice(rank * share, (rank + 1) * share)
        part = Streams(
            self._targets[rows].reshape(-1),
            share,
            self.steps,
            self._inputs[rows].reshape(-1),
            random_steps=self.random_steps,
            seed=self.seed,
        )
        part._world = world
        part.begin(self.epoch)
        return part
