"""Batches for truncated backpropagation through time.

`Streams` cuts a text into `batch_size` contiguous parts, the streams. A training window (the batch of one update) holds
the next `steps` tokens of every stream, so the hidden state of a recurrent network can be carried from one window to
the next. With 2 streams and 4 steps, a text of the tokens 0 to 22 has these windows of inputs:

    window 0      window 1      window 2
    0  1  2  3    4  5  6  7    8  9
    11 12 13 14   15 16 17 18   19 20

Windows may have random lengths that differ between epochs (Merity et al. 2018, AWD-LSTM), so that the gradient is not
cut at the same words in every epoch. Random lengths depend only on the seed and the epoch: there is nothing to save,
and several processes agree without communicating.

Shapes: B streams (the batch), T steps of one window.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.settings import Count, NonNegative, Settings


class RandomSteps(Settings):
    """Settings of random window lengths, around `steps` or sometimes half of it.

    So that the targets of a short window do not count more than others, the learning rate of a window is multiplied by
    its length divided by `steps` (`Streams.learning_rate_factor`).
    """

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

    def sample_length(self, steps: int, generator: np.random.Generator) -> int:
        """Return a random length for one training window."""
        mean_length = steps / 2
        if generator.random() < self.probability:
            mean_length = steps
        length = int(generator.normal(mean_length, self.deviation))
        length = max(self.least, length)
        if self.most is not None:
            length = min(length, self.most)
        return length


def check_sizes(batch_size: int, steps: int) -> None:
    """Raise an error if windows would have no tokens."""
    if batch_size < 1 or steps < 1:
        raise SettingsError(f"batch = {batch_size}, steps = {steps}: both must be at least 1")


class Streams:
    """A text cut into `batch_size` contiguous streams of equal length, read `steps` tokens at a time.

    The last tokens of the text, fewer than `batch_size`, are not used. Each token of a stream except the first is a
    target exactly once per epoch. The last window of an epoch may be shorter. Window i + 1 continues where window i
    ends, so that the state can be carried over.

    Args:
        targets: The text as target ids.
        batch_size: Number of streams.
        steps: Window length: the number of tokens of each stream in a window.
        inputs: The same text as input ids, if they differ from `targets`. Words outside the vocabulary have their own
            input ids if the input end reads words by their characters (`Vocabulary.spelled_words`).
        random_steps: Settings of random window lengths. Windows then differ between epochs.
        seed: Seed of the random window lengths.
        world_size: Number of processes, each of which has `batch_size` streams of its own.
    """

    def __init__(
        self,
        targets: NDArray[np.int32],
        batch_size: int,
        steps: int,
        inputs: NDArray[np.int32] | None = None,
        *,
        random_steps: RandomSteps | None = None,
        seed: int = 0,
        world_size: int = 1,
    ) -> None:
        check_sizes(batch_size, steps)
        stream_length = len(targets) // batch_size
        if stream_length < 2:
            raise DataError(
                f"the text has {len(targets):,} tokens but {batch_size:,} streams need at least {2 * batch_size:,}:"
                " use a smaller batch or a longer text"
            )
        self.batch_size = batch_size
        self.steps = steps
        self.random_steps = random_steps
        self.seed = seed
        self._world_size = world_size

        # One stream per row. These arrays are views: the text stays on disk.
        num_used = batch_size * stream_length
        self._targets = targets[:num_used].reshape(batch_size, stream_length)
        self._inputs = self._targets
        if inputs is not None:
            self._inputs = inputs[:num_used].reshape(batch_size, stream_length)
        self.set_epoch(epoch=1)

    def set_epoch(self, epoch: int) -> None:
        """Switch to the windows of this epoch, counted from 1."""
        self.epoch = epoch
        self._window_lengths = self._compute_window_lengths()
        self._window_starts = np.cumsum(self._window_lengths) - self._window_lengths

    def _compute_window_lengths(self) -> NDArray[np.int64]:
        """Return the length of each window. The last length may extend beyond the end of the text."""
        if self.random_steps is None:
            num_windows = math.ceil(self._targets_per_stream / self.steps)
            return np.full(num_windows, self.steps)

        generator = np.random.default_rng((self.seed, self.epoch))
        lengths = []
        remaining_targets = self._targets_per_stream
        while remaining_targets > 0:
            length = self.random_steps.sample_length(self.steps, generator)
            lengths.append(length)
            remaining_targets -= length
        return np.array(lengths)

    @property
    def num_windows(self) -> int:
        """Number of windows in this epoch."""
        return len(self._window_lengths)

    @property
    def num_targets(self) -> int:
        """Number of targets in an epoch, over all processes."""
        return self._world_size * self.batch_size * self._targets_per_stream

    @property
    def _targets_per_stream(self) -> int:
        """Number of targets in one stream."""
        return int(self._targets.shape[1]) - 1

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `inputs_BT` and `targets_BT` of one window. The targets are the text one token later."""
        start, end = self._window_range(index)
        inputs_BT = self._inputs[:, start:end].astype(np.int64)
        targets_BT = self._targets[:, start + 1 : end + 1].astype(np.int64)
        return torch.from_numpy(inputs_BT), torch.from_numpy(targets_BT)

    def count_targets(self, index: int) -> int:
        """Return the number of targets in one window, over all processes."""
        start, end = self._window_range(index)
        return self._world_size * self.batch_size * (end - start)

    def _window_range(self, index: int) -> tuple[int, int]:
        """Return where a window begins in each stream, and where it ends (exclusive)."""
        if not 0 <= index < self.num_windows:
            raise IndexError(f"window {index} of {self.num_windows}")
        start = int(self._window_starts[index])
        end = start + int(self._window_lengths[index])
        return start, min(end, self._targets_per_stream)

    def learning_rate_factor(self, index: int) -> float:
        """Return the factor of the learning rate for one window: its random length divided by `steps`.

        The last window counts with its random length, even if the text ends earlier. Without random lengths, the
        factor is 1.
        """
        return float(self._window_lengths[index] / self.steps)

    def shard(self, rank: int, world_size: int) -> Streams:
        """Return the streams of process `rank` of `world_size` processes. All processes have the same number."""
        if self.batch_size % world_size:
            raise SettingsError(f"batch = {self.batch_size} is not a multiple of {world_size}, the number of processes")
        local_batch_size = self.batch_size // world_size
        local_streams = slice(rank * local_batch_size, (rank + 1) * local_batch_size)
        shard = Streams(
            targets=self._targets[local_streams].reshape(-1),
            batch_size=local_batch_size,
            steps=self.steps,
            inputs=self._inputs[local_streams].reshape(-1),
            random_steps=self.random_steps,
            seed=self.seed,
            world_size=world_size,
        )
        shard.set_epoch(self.epoch)
        return shard
