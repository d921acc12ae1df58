"""Samples: pieces of a text that are computed afresh, put together into batches anew in every epoch.

`Blocks` and `Sentences` say where the pieces end and which of them make a batch; the rest is here. A sample is a range
of targets. Before each of them, also the first of a sample, stands its true predecessor in the text; before the text
stands <eos>, without which its first token is no target. Together the samples are the text, so their bounds are all
that is held of it: ids stay on disk until a window is asked for.

What is drawn for an epoch follows from the seed and its number alone, whatever the number of processes.

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
from reefknot.text.streams import check_sizes

Offsets = NDArray[np.int64]


class Samples(ABC):
    """Windows whose rows are samples, filled up at the right; each token is a target exactly once per epoch.

    What a model reads may have ids of its own, `inputs`: the same text, with spellings that are no targets.
    Windows are those of one epoch, at first of epoch 1.
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
        check_sizes(batch, steps)
        first, self._before = (1, 0) if eos is None else (0, eos)
        if len(ids) <= first:
            raise DataError(f"tokens in the text: {len(ids)}, and none of them is a target; use a longer text")
        self.steps = steps
        self.seed = seed
        self._total = batch
        self._rank, self._world = 0, 1
        self._targets = ids
        self._inputs = ids if inputs is None else inputs
        self._bounds = self._cut(first, eos)
        self.epoch = 0
        self.begin(epoch=1)

    @abstractmethod
    def _cut(self, first: int, eos: int | None) -> Offsets:
        """Where the samples begin in the text, `first` and onwards, and where the last of them ends: S + 1 offsets."""

    @abstractmethod
    def _draw(self, random: np.random.Generator) -> tuple[Offsets, Offsets]:
        """The samples of an epoch in some order_S, and the range of that order that each window is: W x 2."""

    def begin(self, epoch: int) -> None:
        """From now on, windows are those of this epoch; epochs count from 1."""
        if epoch != self.epoch:  # tens of millions of lines take seconds
            self.epoch = epoch
            self._order, self._ranges = self._draw(np.random.default_rng((self.seed, epoch)))

    @property
    def batch(self) -> int:
        """Rows of `steps` tokens that a window of this process has room for."""
        return -(-self._total // self._world)

    @property
    def windows(self) -> int:
        """Windows of this epoch."""
        return len(self._ranges)

    @property
    def tokens(self) -> int:
        """Targets per epoch, of all processes."""
        return int(self._bounds[-1] - self._bounds[0])

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this process's rows, `inputs_BT` and `targets_BT`; a row that is short ends with
        `IGNORE`."""
        starts, lengths = self._samples(index)
        longest, rows = lengths.max(), -(-len(lengths) // self._world)
        starts, lengths = (each[self._rank :: self._world] for each in (starts, lengths))
        # Where samples do not divide among the processes, the last ones have a row without any.
        starts, lengths = (np.pad(each, (0, rows - len(each))) for each in (starts, lengths))
        steps_T = np.arange(longest)
        there_BT = steps_T < lengths[:, None]
        # Beyond its end a row reads what stands before the text's first target: any token will do.
        places_BT = np.where(there_BT, starts[:, None] + steps_T, self._bounds[0])
        inputs_BT = np.where(places_BT > 0, self._inputs[places_BT - 1], self._before)
        targets_BT = np.where(there_BT, self._targets[places_BT], IGNORE)
        return torch.from_numpy(inputs_BT.astype(np.int64)), torch.from_numpy(targets_BT.astype(np.int64))

    def count(self, index: int) -> int:
        """Targets of one window, of all processes."""
        _, lengths = self._samples(index)
        return int(lengths.sum())

    def _samples(self, index: int) -> tuple[Offsets, Offsets]:
        """Where the samples of one window begin, and how many targets they have; those of all processes."""
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        first, stop = self._ranges[index]
        samples = self._order[first:stop]
        starts = self._bounds[samples]
        return starts, self._bounds[samples + 1] - starts

    def rate_factor(self, index: int) -> float:
        """What the rate of a window's step is multiplied with: nothing, whatever its lengths are."""
        return 1.0

    def slice(self, rank: int, world: int) -> Self:
        """The share of one of `world` processes: every `world`-th row of each window."""
        if self._total < world:
            raise SettingsError(f"batch = {self._total} is too small for {world} processes; some would have no row")
        part = copy(self)
        part._rank, part._world = rank, world
        return part
