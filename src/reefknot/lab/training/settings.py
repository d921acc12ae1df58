"""The `[training]` settings of a recipe, for language models and translators.

`TrainingSettings` has one field per setting, with its type, bounds, default and description. Pydantic checks the values
of a recipe, and `Trainer` (`loop.py`) uses them:

    [base.training]
    epochs = 40
    batch = 20
    steps = 35
    optimiser = { kind = "sgd", learning_rate = 1.0 }
    schedule = { kind = "decay", hold = 6, factor = 0.8 }

A stream is a contiguous part of the training text that is read in order. A row is one experiment of a recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from reefknot.lab.config.parts import OPTIMISERS, SCHEDULES
from reefknot.lab.config.settings import Count, Positive, Settings
from reefknot.lab.text.batches import BatchSettings
from reefknot.lab.training.averaging import AveragingSettings, StoppingSettings

# `entry_type` builds a union of the settings of all registered kinds, which mypy cannot follow.
if TYPE_CHECKING:
    OptimiserSettings = Settings
    ScheduleSettings = Settings
else:
    OptimiserSettings = OPTIMISERS.entry_type()
    ScheduleSettings = SCHEDULES.entry_type()


class StartSettings(Settings):
    """The row to start from: training starts with the weights of its finished run with the same seed."""

    row: Annotated[
        str,
        Field(min_length=1, max_length=100, description="Row to start from. Training starts with its best weights."),
    ]


class TrainingSettings(BatchSettings):
    """Settings of training: batches, length, optimiser, precision, logging and checkpoints."""

    epochs: Annotated[
        Count | None, Field(description="Number of passes over the training text. Set either `epochs` or `updates`.")
    ] = None
    updates: Annotated[
        Count | None,
        Field(description="Number of updates after which training ends, possibly in the middle of an epoch."),
    ] = None
    accumulate: Annotated[
        Count, Field(description="Number of micro-batches that each update is split into, to save memory.")
    ] = 1
    divisor: Annotated[
        Literal["tokens", "batch"],
        Field(
            description="What the summed loss of an update is divided by: the number of its targets (tokens), or the "
            "number of its streams or pairs (batch, as in the papers)."
        ),
    ] = "tokens"
    clip: Annotated[
        Positive | None,
        Field(description="Maximum norm of the whole gradient. Larger gradients are scaled down to it."),
    ] = None
    optimiser: Annotated[OptimiserSettings, Field(description="Optimiser that computes updates from gradients.")]
    schedule: Annotated[ScheduleSettings, Field(description="Learning-rate schedule.")]
    averaging: Annotated[
        AveragingSettings | None,
        Field(description="Average the weights over the iterates (NT-ASGD). The averages are validated and saved."),
    ] = None
    stop: Annotated[
        StoppingSettings | None, Field(description="Early stopping: when to stop before the last epoch or update.")
    ] = None
    start: Annotated[StartSettings | None, Field(description="Start from the weights of another row.")] = None
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Field(
            description="Precision of training. bfloat16 and float16 use autocast with float32 weights; float16 also "
            "scales the loss."
        ),
    ] = "float32"
    shard: Annotated[
        bool | Literal["vocabulary"],
        Field(
            description="Divide the weights and the optimiser state among the processes, in addition to the text. "
            "true: all weights (FSDP2), which are gathered when they are needed; vocabulary: only the tables and "
            "biases of the output end, whose words stay divided while the loss is computed."
        ),
    ] = False
    determinism: Annotated[
        Literal["exact", "seeded", "fast"],
        Field(
            description="How reproducible training is. exact: bitwise equal results on the same GPU; seeded: a fixed "
            "seed and no TF32; fast: TF32 and autotuning."
        ),
    ] = "seeded"
    capture: Annotated[bool, Field(description="On a GPU, replay updates with repeated shapes as CUDA graphs.")] = True
    compile: Annotated[
        bool | None,
        Field(
            description="Compile the blocks of a transformer with torch.compile. By default, they are compiled in "
            "bfloat16 on one GPU, unless determinism is exact."
        ),
    ] = None
    log_every: Annotated[Count, Field(description="Number of updates between two lines of metrics.")] = 100
    save_every: Annotated[
        Count, Field(description="Number of updates between two checkpoints. Every validation also saves a checkpoint.")
    ] = 1000
    validate_every: Annotated[
        Count | None,
        Field(
            description="Number of updates between two validations. By default, training validates at the end of "
            "every epoch."
        ),
    ] = None
    keep: Annotated[
        int,
        Field(ge=1, le=1000, description="Number of recent checkpoints to keep in addition to the best checkpoint."),
    ] = 2

    @model_validator(mode="after")
    def _check_length(self) -> TrainingSettings:
        if self.epochs is None and self.updates is None:
            raise ValueError("neither epochs nor updates is set; set one of them, so that training ends")
        if self.epochs is not None and self.updates is not None:
            raise ValueError(
                f"epochs = {self.epochs} and updates = {self.updates}: only one of them may be set; "
                "remove the other with training.updates=default or training.epochs=default"
            )
        return self

    @model_validator(mode="after")
    def _check_compile(self) -> TrainingSettings:
        if self.compile and self.determinism == "exact":
            raise ValueError(
                'compile = true: torch.compile may choose other kernels in a resumed run, but determinism = "exact" '
                'promises equal bits; use compile = false, or determinism = "seeded"'
            )
        return self

    @model_validator(mode="after")
    def _check_batching(self) -> TrainingSettings:
        if self.batching == "streams" and self.batch % self.accumulate:
            raise ValueError(
                f"accumulate = {self.accumulate} does not divide batch = {self.batch}; use a value that does"
            )
        if self.batching in ("blocks", "sentences") and self.divisor == "batch":
            raise ValueError(
                f'divisor = "batch" counts streams or pairs, but batching = "{self.batching}" has neither; use "tokens"'
            )
        return self
