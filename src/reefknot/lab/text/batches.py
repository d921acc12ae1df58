"""Batches: how a training text comes to updates, window by window, as a recipe says.

`streams` are for encoders that carry their state from one window to the next; `blocks` and `sentences` are computed
afresh, and so are `pairs` of a source and a target line. Whichever it is, a window follows from the settings and two
integers, its epoch and its number, so that resuming replays nothing.

Shapes: B rows, T steps of one window.
"""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Count, Settings
from reefknot.lab.text.blocks import Blocks
from reefknot.lab.text.sentence_batches import Sentences
from reefknot.lab.text.streams import RandomSteps, Streams

Batching = Literal["streams", "blocks", "sentences", "pairs"]


class BatchSettings(Settings):
    """How the training text is cut into windows."""

    batching: Annotated[
        Batching,
        Field(
            description="streams: parallel streams, for encoders that carry a state; blocks: blocks of `steps` tokens,"
            " shuffled; sentences: lines, batched by length; pairs: source and target lines, batched by length"
        ),
    ] = "streams"
    batch: Annotated[Count, Field(description="streams, or blocks per update, over all processes together")]
    steps: Annotated[
        Count,
        Field(
            description="tokens per stream and update, where backpropagation is cut, or tokens per block; a batch of"
            " sentences has at most batch x steps tokens, a batch of pairs at most as many on either side"
        ),
    ]
    random_steps: Annotated[RandomSteps | None, Field(description="windows of random length around `steps`")] = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, description="seed of every random number")] = 0

    @model_validator(mode="after")
    def _check_random_steps(self) -> Self:
        if self.random_steps is None:
            return self
        if self.batching != "streams":
            raise ValueError(
                f'random_steps has no meaning with batching = "{self.batching}"; remove it, or use "streams"'
            )
        if self.random_steps.least > self.steps:
            raise ValueError(
                f"random_steps.least = {self.random_steps.least} is more than steps = {self.steps}: every window would"
                " be longer than steps, and its rate larger"
            )
        return self


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
    settings: BatchSettings, ids: NDArray[np.int32], inputs: NDArray[np.int32] | None = None, eos: int | None = None
) -> Batches:
    """Return the windows of one text. (`PairBatches` cuts parallel text.)

    Args:
        settings: How the text is cut.
        ids: The text, which is also what is predicted.
        inputs: What the input end reads, if it is not `ids`.
        eos: Id of `<eos>`, which precedes the first token of the text.
    """
    batch, steps, seed = settings.batch, settings.steps, settings.seed
    if settings.batching == "streams":
        return Streams(ids, batch, steps, inputs, random_steps=settings.random_steps, seed=seed)
    if settings.batching == "pairs":
        raise SettingsError(
            'training.batching = "pairs" is for sources with their translations, and this is one text; '
            'use "streams", "blocks" or "sentences"'
        )
    kind = {"blocks": Blocks, "sentences": Sentences}[settings.batching]
    return kind(ids, batch, steps, inputs, eos=eos, seed=seed)
