"""Cut the training text into batches of inputs and targets.

`build_batches` turns an array of token ids into a `Batches` object. The training loop calls `set_epoch` and reads one
training window after the other. A training window is the batch of one update:

    batches = build_batches(settings, split.ids)
    batches.set_epoch(1)
    inputs_BT, targets_BT = batches.window(0)

There are four kinds of batches:

    streams      contiguous parts of the text, read in parallel; for encoders that carry their state to the next window
    blocks       shuffled blocks of equal length
    sentences    shuffled lines of similar length
    pairs        shuffled pairs of source and target lines, for translation, built by `PairBatches`

A window depends only on the settings, the epoch and its index, so a resumed run can continue at any window.

Shapes: B rows, T steps (tokens of a row) of one training window.
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
    """Settings that define how the training text is cut into training windows."""

    batching: Annotated[
        Batching,
        Field(
            description="How the training text is batched. streams: parallel streams, for encoders that carry a "
            "state; blocks: shuffled blocks of `steps` tokens; sentences: lines, batched by length; "
            "pairs: pairs of source and target lines, batched by length."
        ),
    ] = "streams"
    batch: Annotated[
        Count,
        Field(description="Number of streams, or number of blocks in each update, summed over all processes."),
    ]
    steps: Annotated[
        Count,
        Field(
            description="With streams: number of tokens that each stream contributes to an update; backpropagation is "
            "truncated there. With blocks: number of tokens in a block. A batch of sentences has at most batch x "
            "steps tokens, and a batch of pairs at most batch x steps tokens on each side."
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
                " be longer than `steps`, and its learning rate larger than the configured one; use a smaller"
                " random_steps.least"
            )
        return self


class Batches(Protocol):
    """The training windows of one epoch, for one process. The epoch is 1 until `set_epoch` is called."""

    @property
    def batch_size(self) -> int:
        """Batch size of this process: its share of the streams, or of the blocks of a window.

        Windows of sentences and pairs have at most `batch_size` x `steps` tokens instead: more rows than `batch_size`
        if lines are shorter than `steps`, and fewer rows if lines are longer.
        """

    @property
    def num_windows(self) -> int:
        """Number of windows in this epoch, the same in all processes."""

    @property
    def num_targets(self) -> int:
        """Number of targets in an epoch, over all processes."""

    def set_epoch(self, epoch: int) -> None:
        """Switch to the windows of this epoch, counted from 1."""

    def window(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `inputs_BT` and `targets_BT` of this process.

        Targets are padded on the right with -100 (`IGNORE`), which the loss ignores. All processes have the same number
        of rows and steps. Some rows may have no target at all.
        """

    def count_targets(self, index: int) -> int:
        """Return the number of targets in one window, over all processes."""

    def learning_rate_factor(self, index: int) -> float:
        """Return the factor by which the learning rate is multiplied for one window."""

    def shard(self, rank: int, world_size: int) -> Batches:
        """Return the batches of process `rank` of `world_size` processes."""


def build_batches(
    settings: BatchSettings, ids: NDArray[np.int32], inputs: NDArray[np.int32] | None = None, eos: int | None = None
) -> Batches:
    """Return the training windows of a monolingual text. `PairBatches` does the same for parallel text.

    Args:
        settings: How the text is cut.
        ids: The ids of the text. Targets are read from them, and inputs too unless `inputs` is given.
        inputs: The ids that the model reads, if they differ from `ids`.
        eos: Id of `<eos>`, which precedes the first token of the text.
    """
    if settings.batching == "pairs":
        raise SettingsError(
            'training.batching = "pairs" is for parallel text, but this corpus is monolingual; '
            'use "streams", "blocks" or "sentences"'
        )
    batch_size = settings.batch
    steps = settings.steps
    seed = settings.seed
    if settings.batching == "streams":
        return Streams(ids, batch_size, steps, inputs, random_steps=settings.random_steps, seed=seed)
    if settings.batching == "blocks":
        from reefknot.lab.text.blocks import Blocks  # training imports only the batching that it uses

        return Blocks(ids, batch_size, steps, inputs, eos=eos, seed=seed)
    from reefknot.lab.text.sentence_batches import Sentences

    return Sentences(ids, batch_size, steps, inputs, eos=eos, seed=seed)
