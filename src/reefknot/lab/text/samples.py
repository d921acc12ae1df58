"""Base classes of batches whose rows are independent of each other and shuffled in every epoch.

A sample is one row of a batch: a contiguous range of the text's tokens. A training window is the batch of one update.
`Samples` does what all kinds of batches share, such as dividing a window among processes. Its subclasses define where a
sample begins (`_compute_bounds`) and which samples form a window (`_group_samples`):

    Samples
      TextSamples        one text
        Blocks           blocks of equal length (`blocks.py`, the shortest example)
        Sentences        lines of similar length (`sentence_batches.py`)
      PairBatches        pairs of source and target lines (`pair_batches.py`)

Only the bounds of samples are in memory; ids stay on disk until a window is read. Random choices depend only on the
seed and the epoch, not on the number of processes.

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
"""Positions of tokens in a text, or indices of samples."""


class Samples(ABC):
    """Training windows whose rows are samples, padded on the right. Each token is a target exactly once per epoch.

    The epoch is 1 until `set_epoch` is called.
    """

    def __init__(self, batch_size: int, steps: int, *, seed: int) -> None:
        """Subclasses set the attributes that `_compute_bounds` needs before they call this."""
        check_sizes(batch_size, steps)
        self.steps = steps
        self.seed = seed
        self._global_batch_size = batch_size
        self._rank = 0
        self._world_size = 1
        self._bounds = self._compute_bounds()
        self.epoch = 0
        self.set_epoch(epoch=1)

    @abstractmethod
    def _compute_bounds(self) -> Offsets:
        """Return S + 1 offsets into the targets: where each sample begins, and where the last sample ends."""

    @abstractmethod
    def _group_samples(self, generator: np.random.Generator) -> tuple[Offsets, Offsets]:
        """Shuffle the samples and group them into the windows of one epoch.

        Returns the samples in their new order, with shape (S,), and the range of each window in this order, with shape
        (W, 2). The order [2, 0, 1] with the ranges [[0, 2], [2, 3]] means the windows (2, 0) and (1,).
        """

    @abstractmethod
    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of this process's rows. Targets of short rows are padded with `IGNORE`."""

    def set_epoch(self, epoch: int) -> None:
        """Switch to the windows of this epoch, counted from 1."""
        if epoch != self.epoch:  # shuffling tens of millions of lines takes seconds
            self.epoch = epoch
            generator = np.random.default_rng((self.seed, epoch))
            self._sample_order, self._window_ranges = self._group_samples(generator)

    @property
    def batch_size(self) -> int:
        """Batch size of this process: its share of the number of rows in a window whose rows have `steps` tokens."""
        return -(-self._global_batch_size // self._world_size)

    @property
    def num_windows(self) -> int:
        """Number of windows in this epoch."""
        return len(self._window_ranges)

    @property
    def num_targets(self) -> int:
        """Number of targets in an epoch, over all processes."""
        return int(self._bounds[-1] - self._bounds[0])

    def count_targets(self, index: int) -> int:
        """Return the number of targets in one window, over all processes."""
        samples = self._window_samples(index)
        return int(self._sample_lengths(samples).sum())

    def _sample_lengths(self, samples: Offsets) -> Offsets:
        """Return the number of targets in each of these samples."""
        return self._bounds[samples + 1] - self._bounds[samples]

    def _window_samples(self, index: int) -> Offsets:
        """Return the indices of the samples of one window, for all processes."""
        if not 0 <= index < self.num_windows:
            raise IndexError(f"window {index} of {self.num_windows}")
        start, end = self._window_ranges[index]
        return self._sample_order[start:end]

    def _local_rows(self, samples: Offsets) -> tuple[Offsets, Offsets]:
        """Return the samples in this process's rows, and the number of targets in each of its rows.

        If the samples cannot be divided equally, the last processes repeat the first sample in a row without targets.
        """
        local_samples = samples[self._rank :: self._world_size]
        lengths = self._sample_lengths(local_samples)
        num_rows = -(-len(samples) // self._world_size)  # rounded up
        num_missing = num_rows - len(local_samples)
        padded_samples = np.append(local_samples, samples[:num_missing])
        padded_lengths = np.pad(lengths, (0, num_missing))
        return padded_samples, padded_lengths

    def learning_rate_factor(self, index: int) -> float:
        """Return 1: the learning rate does not depend on the window."""
        return 1.0

    def shard(self, rank: int, world_size: int) -> Self:
        """Return the samples of process `rank` of `world_size` processes: every `world_size`-th row of each window."""
        if self._global_batch_size < world_size:
            raise SettingsError(
                f"batch = {self._global_batch_size} is too small for {world_size} processes; some would have no row"
            )
        shard = copy(self)
        shard._rank = rank
        shard._world_size = world_size
        return shard


class TextSamples(Samples):
    """Samples that together form one text.

    The input of each target is the previous token of the text, even for the first target of a sample. <eos> precedes
    the text; without `eos`, the first token of the text is not a target.

    Args:
        ids: The text as target ids.
        batch_size: Number of rows of `steps` tokens in a window.
        steps: Maximum number of targets in a row.
        inputs: The same text as input ids, if they differ from `ids`. Words outside the vocabulary that an input end
            reads by their characters (`Vocabulary.spelled_words`) have their own input ids.
        eos: Id of `<eos>`, if the vocabulary has it.
        seed: Seed of the random order.
    """

    def __init__(
        self,
        ids: NDArray[np.int32],
        batch_size: int,
        steps: int,
        inputs: NDArray[np.int32] | None = None,
        *,
        eos: int | None = None,
        seed: int = 0,
    ) -> None:
        self._eos = eos
        self._first_target = 1 if eos is None else 0
        if len(ids) <= self._first_target:
            raise DataError(f"the text has {len(ids)} tokens, and none of them is a target; use a longer text")
        self._targets = ids
        self._inputs = inputs if inputs is not None else ids
        super().__init__(batch_size, steps, seed=seed)

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `inputs_BT` and `targets_BT`."""
        samples = self._window_samples(index)
        max_length = int(self._sample_lengths(samples).max())
        samples_B, lengths_B = self._local_rows(samples)

        # Padding has the offset of the first target; any token would do.
        starts_B = self._bounds[samples_B]
        offsets_BT, valid_BT = row_offsets(starts_B, lengths_B, max_length, padding=self._first_target)

        # The input of each target is the previous token. <eos> precedes the text.
        inputs_BT = np.where(offsets_BT > 0, self._inputs[offsets_BT - 1], self._eos or 0)
        targets_BT = np.where(valid_BT, self._targets[offsets_BT], IGNORE)
        return torch.from_numpy(inputs_BT.astype(np.int64)), torch.from_numpy(targets_BT.astype(np.int64))


def row_offsets(starts_B: Offsets, lengths_B: Offsets, steps: int, padding: int) -> tuple[Offsets, NDArray[np.bool_]]:
    """Return the offset in the text of each token of a batch of rows, and whether the token is not padding.

    A row that begins at offset 7 and has 2 tokens gives the offsets [7, 8, 0] and [True, True, False] if there are 3
    steps and the padding is 0.

    Args:
        starts_B: Offset in the text at which each row begins.
        lengths_B: Number of tokens in each row.
        steps: Number of columns of the results, T.
        padding: The offset of tokens after the end of a row.
    """
    steps_T = np.arange(steps)
    valid_BT = steps_T < lengths_B[:, None]
    offsets_BT = np.where(valid_BT, starts_B[:, None] + steps_T, padding)
    return offsets_BT, valid_BT


def pack_windows(lengths_S: NDArray[np.integer], capacity: int) -> Offsets:
    """Group samples, sorted by decreasing length, into windows of at most `capacity` tokens, padding included.

    Returns the range of samples in each window, with shape (W, 2). Lengths [5, 4, 2, 2] with the capacity 10 give the
    ranges [[0, 2], [2, 4]].
    """
    starts = []
    ends = []
    start = 0
    while start < len(lengths_S):
        rows_per_window = capacity // int(lengths_S[start])  # the first sample is the longest
        end = min(start + rows_per_window, len(lengths_S))
        starts.append(start)
        ends.append(end)
        start = end
    return np.stack([starts, ends], axis=1)
