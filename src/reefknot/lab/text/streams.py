"""Parallel streams for truncated backpropagation, read by an integer index so that resuming replays nothing.

Windows have one length, or lengths drawn anew for every epoch (Merity et al. 2018, AWD-LSTM), so that not every epoch
cuts the gradient at the same words. What is drawn follows from the seed and the epoch alone: there is nothing to save,
and several processes agree without talking to each other.

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
    """A length is normal around `steps`, or, now and then, around half of it; the rate is scaled with it."""

    probability: Annotated[float, Field(ge=0.0, le=1.0, description="of a window around `steps`, not half of it")] = (
        0.95
    )
    deviation: Annotated[NonNegative, Field(description="standard deviation of a length, in tokens")] = 5.0
    least: Annotated[Count, Field(description="a shorter window becomes this long")] = 5
    most: Annotated[Count | None, Field(description="a longer window becomes this long")] = None

    @model_validator(mode="after")
    def _check_bounds(self) -> RandomSteps:
        if self.most is not None and self.most < self.least:
            raise ValueError(f"most = {self.most} is less than least = {self.least}")
        return self

    def draw(self, steps: int, random: np.random.Generator) -> int:
        """The length of one window."""
        centre = steps if random.random() < self.probability else steps / 2
        length = max(self.least, int(random.normal(centre, self.deviation)))
        return length if self.most is None else min(length, self.most)


def check_sizes(batch: int, steps: int) -> None:
    """Refuse windows without a token."""
    if batch < 1 or steps < 1:
        raise SettingsError(f"batch = {batch}, steps = {steps}: both must be at least 1")


class Streams:
    """A text cut into `batch` contiguous streams of equal length, read `steps` tokens at a time.

    The tokens left over at the end of the text, fewer than `batch`, are not used. Each token of a stream but
    its first is a target exactly once per epoch; the last window of an epoch may be cut short.
    Window i + 1 goes on where window i stopped, so a state carried from one to the next fits. What a model reads may
    have ids of its own, `inputs`: the same text, with spellings that are no targets.

    Windows are those of one epoch, at first of epoch 1; with `random_steps` every epoch has others.
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
        # Views: the text stays on disk.
        self._targets = ids[: batch * length].reshape(batch, length)
        self._inputs = self._targets if inputs is None else inputs[: batch * length].reshape(batch, length)
        self.begin(epoch=1)

    def begin(self, epoch: int) -> None:
        """From now on, windows are those of this epoch; epochs count from 1."""
        self.epoch = epoch
        self._lengths = self._draw_lengths()
        self._starts = np.cumsum(self._lengths) - self._lengths

    def _draw_lengths(self) -> NDArray[np.int64]:
        """How many tokens each window asks for; the text may end before the last one has them."""
        if self.random_steps is None:
            return np.full(-(-self._length // self.steps), self.steps)
        random = np.random.default_rng((self.seed, self.epoch))
        lengths = []
        left = self._length
        while left > 0:
            lengths.append(self.random_steps.draw(self.steps, random))
            left -= lengths[-1]
        return np.array(lengths)

    @property
    def windows(self) -> int:
        """Windows of this epoch."""
        return len(self._lengths)

    @property
    def tokens(self) -> int:
        """Targets per epoch, of all processes."""
        return self._world * self.batch * self._length

    @property
    def _length(self) -> int:
        """Targets of one stream."""
        return int(self._targets.shape[1]) - 1

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one window, `inputs_BT` and `targets_BT`: the same text, one token apart."""
        start, stop = self._bounds(index)
        inputs_BT, targets_BT = self._inputs[:, start:stop], self._targets[:, start + 1 : stop + 1]
        return torch.from_numpy(inputs_BT.astype(np.int64)), torch.from_numpy(targets_BT.astype(np.int64))

    def count(self, index: int) -> int:
        """Targets of one window, of all processes."""
        start, stop = self._bounds(index)
        return self._world * self.batch * (stop - start)

    def _bounds(self, index: int) -> tuple[int, int]:
        """Where one window begins in each stream, and where it ends."""
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        start = int(self._starts[index])
        return start, min(start + int(self._lengths[index]), self._length)

    def rate_factor(self, index: int) -> float:
        """What the rate of a window's step is multiplied with: the length drawn for it, in `steps`, even where the
        text ends before. 1 where all windows have one length."""
        return float(self._lengths[index] / self.steps)

    def slice(self, rank: int, world: int) -> Streams:
        """The share of one of `world` processes: an equal, contiguous part of the streams."""
        if self.batch % world:
            raise SettingsError(f"batch = {self.batch} does not divide among {world} processes")
        share = self.batch // world
        own = slice(rank * share, (rank + 1) * share)
        part = Streams(
            self._targets[own].reshape(-1),
            share,
            self.steps,
            self._inputs[own].reshape(-1),
            random_steps=self.random_steps,
            seed=self.seed,
        )
        part._world = world
        part.begin(self.epoch)
        return part
