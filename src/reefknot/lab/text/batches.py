"""Batches: how a training text comes to updates, window by window, as a recipe says.

`streams` are for encoders that carry their state from one window to the next; `blocks` and `sentences` are computed
afresh, and so are `pairs` of a source and a target line. Whichever it is, a window follows from the settings and two
integers, its epoch and its number, so that resuming replays nothing.

Shapes: B rows, T steps of one window.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from reefknot.errors import SettingsError
from reefknot.lab.text.blocks import Blocks
from reefknot.lab.text.sentence_batches import Sentences
from reefknot.lab.text.streams import RandomSteps, Streams

Batching = Literal["streams", "blocks", "sentences", "pairs"]


class Reading(Protocol):
    """What a recipe says about how a text is read."""

    @property
    def batching(self) -> Batching: ...
    @property
    def batch(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def random_steps(self) -> RandomSteps | None: ...
    @property
    def seed(self) -> int: ...


class Batches(Protocol):
    """The windows of one epoch, at first of epoch 1: one process's rows of what all processes train on."""

    @property
    def batch(self) -> int:
        """Rows of `steps` tokens that a window of this process has room for."""

    @property
    def windows(self) -> int:
        """Windows of this epoch, the same number in all processes."""

    @property
    def tokens(self) -> int:
        """Targets per epoch, of all processes."""

    def begin(self, epoch: int) -> None:
        """From now on, windows are those of this epoch; epochs count from 1."""

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This process's `inputs_BT` and `targets_BT`; a target is `IGNORE` where a row has none, at its right end.

        All processes have as many rows and steps, of which some may have no target at all.
        """

    def count(self, index: int) -> int:
        """Targets of one window, of all processes."""

    def rate_factor(self, index: int) -> float:
        """What the rate of a window's step is multiplied with."""

    def slice(self, rank: int, world: int) -> Batches:
        """The share of one of `world` processes."""


def batches_of(
    reading: Reading, ids: NDArray[np.int32], inputs: NDArray[np.int32] | None = None, eos: int | None = None
) -> Batches:
    """A text as a recipe says that it is read; `eos` is the id of <eos>, which stands before the text. `PairBatches` is
    what reads pairs of texts."""
    batch, steps, seed = reading.batch, reading.steps, reading.seed
    if reading.batching == "streams":
        return Streams(ids, batch, steps, inputs, random_steps=reading.random_steps, seed=seed)
    if reading.random_steps is not None:
        raise SettingsError(
            f'training.random_steps has no meaning with batching = "{reading.batching}"; remove it, or use "streams"'
        )
    if reading.batching == "pairs":
        raise SettingsError(
            'training.batching = "pairs" is for sources with their translations, and this is one text; '
            'use "streams", "blocks" or "sentences"'
        )
    kind = {"blocks": Blocks, "sentences": Sentences}[reading.batching]
    return kind(ids, batch, steps, inputs, eos=eos, seed=seed)
