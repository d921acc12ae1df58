"""Batches: how the training text is cut into windows, one per update.

`streams` are for encoders that carry their state from one window to the next. Windows of `blocks`, of `sentences` and
of `pairs`, a source and a target line each, do not depend on each other. A window depends only on the settings, the
epoch and its number, so a resumed run replays nothing.

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
from reefknot.lab.text.streams import RandomSteps, Streams

Batching = Literal["streams", "blocks", "sentences", "pairs"]


class BatchSettings(Settings):
    """How the training text is cut into windows."""

    batching: Annotated[
        Batching,
        Field(
            description="How the training text is batched. streams: parallel streams, for encoders that carry a "
            "state; blocks: shuffled blocks of `steps` tokens; sentences: lines, batched by length; "
            "pairs: pairs of source and target lines, batched by length."
        ),
    ] = "streams"
    batch: Annotated[Count, Field(description="Number of streams, or of blocks per update, over all processes.")]
    steps: Annotated[
        Count,
        Field(
            description="Number of tokens per stream and update, after which backpropagation is truncated, or number "
            "of tokens per block. A batch of sentences has at most batch x steps tokens, and a batch of "
            "pairs at most batch x steps tokens on each side."
        ),
    ]
    random_steps: Annotated[RandomSteps | None, Field(description="Draw window lengths at random around `steps`.")] = (
        None
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, description="Seed of all random numbers.")] = 0

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
    """The windows of one epoch, for one process. They are those of epoch 1 until `begin` is called."""

    @property
    def batch(self) -> int:
        """Number of rows of `steps` tokens that fit into a window of this process."""

    @property
    def windows(self) -> int:
        """Number of windows in this epoch, the same in all processes."""

    @property
    def tokens(self) -> int:
        """Number of targets per epoch, over all processes."""

    def begin(self, epoch: int) -> None:
        """Switch to the windows of this epoch, counted from 1."""

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this process's `inputs_BT` and `targets_BT`. Rows are padded on the right with targets `IGNORE`.

        All processes have the same number of rows and steps. Some rows may have no target at all.
        """

    def count(self, index: int) -> int:
        """Return the number of targets in one window, over all processes."""

    def rate_factor(self, index: int) -> float:
        """Return the factor of the learning rate for one window."""

    def slice(self, rank: int, world: int) -> Batches:
        """Return the share of one of `world` processes."""


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
    from reefknot.lab.text.blocks import Blocks
    from reefknot.lab.text.sentence_batches import Sentences

    kind = {"blocks": Blocks, "sentences": Sentences}[settings.batching]
    return kind(ids, batch, steps, inputs, eos=eos, seed=seed)
