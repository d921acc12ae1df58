"""Samples: pieces of a text that are computed afresh, put together into batches anew in every epoch.

A sample is a range of targets. `Blocks`, `Sentences` and `PairBatches` say where samples end, which of them make a
window and what is read before a target; the rest is here. Their bounds are all that is held of a text: ids stay on disk
until a window is asked for.

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
from reefknot.lab.text.streams import check_sizes

Offsets = NDArray[np.int64]


class Samples(ABC):
    """Windows whose rows are samples, filled up at the right; each token is a target exactly once per epoch.

    Windows are those of one epoch, at first of epoch 1.
    """

    def __init__(self, batch: int, steps: int, *, seed: int) -> None:
        """What `_cut` needs must be there before."""
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
        """Where the samples begin among the targets, and where the last of them ends: S + 1 offsets."""

    @abstractmethod
    def _draw(self, random: np.random.Generator) -> tuple[Offsets, Offsets]:
        """The samples of an epoch in some order_S, and the range of that order that each window is: W x 2."""

    @abstractmethod
    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this process's rows; a row that is short ends with `IGNORE`."""

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

    def count(self, index: int) -> int:
        """Targets of one window, of all processes."""
        samples = self._samples(index)
        return int((self._bounds[samples + 1] - self._bounds[samples]).sum())

    def _samples(self, index: int) -> Offsets:
        """The samples of one window, those of all processes."""
        if not 0 <= index < self.windows:
            raise IndexError(f"window {index} of {self.windows}")
        first, stop = self._ranges[index]
        return self._order[first:stop]

    def _rows(self, samples: Offsets) -> tuple[Offsets, Offsets]:
        """Of a window's samples those in this process's rows, and how many targets each of its rows has.

        Where samples do not divide among the processes, the last ones have a row with the first sample again, of which
        nothing is a target.
        """
        own = samples[self._rank :: self._world]
        missing = -(-len(samples) // self._world) - len(own)
        lengths = self._bounds[own + 1] - self._bounds[own]
        return np.append(own, samples[:missing]), np.pad(lengths, (0, missing))

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


class TextSamples(Samples):
    """Samples of one text, which together are the text.

    Before each target, also the first of a sample, stands its true predecessor; before the text stands <eos>, without
    which its first token is no target. What a model reads may have ids of its own, `inputs`: the same text, with
    spellings that are no targets.
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
            raise DataError(f"tokens in the text: {len(ids)}, and none of them is a target; use a longer text")
        self._targets = ids
        self._inputs = ids if inputs is None else inputs
        super().__init__(batch, steps, seed=seed)

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`inputs_BT` and `targets_BT`."""
        samples = self._samples(index)
        longest = int((self._bounds[samples + 1] - self._bounds[samples]).max())
        own_B, lengths_B = self._rows(samples)
        # Beyond its end a row reads what stands before the text's first target: any token will do.
        places_BT, there_BT = laid_out(self._bounds[own_B], lengths_B, longest, beyond=self._first)
        inputs_BT = np.where(places_BT > 0, self._inputs[places_BT - 1], self._eos or 0)
        targets_BT = np.where(there_BT, self._targets[places_BT], IGNORE)
        return torch.from_numpy(inputs_BT.astype(np.int64)), torch.from_numpy(targets_BT.astype(np.int64))


def laid_out(starts_B: Offsets, lengths_B: Offsets, steps: int, beyond: int) -> tuple[Offsets, NDArray[np.bool_]]:
    """Where the tokens of rows stand that begin at `starts_B`, places_BT, and which of them belong to a row, there_BT;
    the others are at `beyond`."""
    steps_T = np.arange(steps)
    there_BT = steps_T < lengths_B[:, None]
    return np.where(there_BT, starts_B[:, None] + steps_T, beyond), there_BT


def filled(lengths_S: NDArray[np.integer], room: int) -> Offsets:
    """Samples of these lengths, the longest first, as windows of at most `room` tokens, padding included: W x 2."""
    firsts, first = [], 0
    while first < len(lengths_S):
        firsts.append(first)
        first += room // int(lengths_S[first])
    return np.stack([firsts, [*firsts[1:], len(lengths_S)]], axis=1)
