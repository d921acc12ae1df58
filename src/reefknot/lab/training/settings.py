"""What a recipe can say about training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from reefknot.lab.config.parts import OPTIMISERS, SCHEDULES
from reefknot.lab.config.settings import Count, Positive, Settings
from reefknot.lab.text.batches import BatchSettings
from reefknot.lab.training.averaging import AveragingSettings
from reefknot.lab.training.stopping import StoppingSettings

if TYPE_CHECKING:
    OptimiserSettings = Settings
    ScheduleSettings = Settings
else:
    OptimiserSettings = OPTIMISERS.settings()
    ScheduleSettings = SCHEDULES.settings()


class StartSettings(Settings):
    """Another run of the same recipe and seed, finished before."""

    row: Annotated[str, Field(min_length=1, max_length=100, description="whose best weights training begins with")]


class TrainingSettings(BatchSettings):
    """Stochastic gradient descent over a text: how it is read, for how long, and what is made of the gradients."""

    epochs: Annotated[Count | None, Field(description="passes over the training text; or say `updates`")] = None
    updates: Annotated[
        Count | None, Field(description="updates until training ends, in the middle of an epoch if need be")
    ] = None
    accumulate: Annotated[
        Count, Field(description="pieces that an update's rows are cut into, one after the other, to save memory")
    ] = 1
    divisor: Annotated[
        Literal["tokens", "batch"],
        Field(
            description="the summed loss is divided by: all targets of the update, or (the papers) its streams or pairs"
        ),
    ] = "tokens"
    clip: Annotated[Positive | None, Field(description="largest norm of the whole gradient")] = None
    optimiser: Annotated[OptimiserSettings, Field(description="what turns gradients into updates")]
    schedule: Annotated[ScheduleSettings, Field(description="how the rate changes as training goes on")]
    averaging: Annotated[AveragingSettings | None, Field(description="keep the mean of the iterates (NT-ASGD)")] = None
    stop: Annotated[StoppingSettings | None, Field(description="end before the last epoch or update")] = None
    start: Annotated[StartSettings | None, Field(description="begin with the weights of another row")] = None
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"],
        Field(description="bfloat16, float16: autocast, and weights stay float32; float16 scales the loss"),
    ] = "float32"
    shard: Annotated[
        bool, Field(description="several processes share out weights and optimiser (FSDP2), not the text alone")
    ] = False
    determinism: Annotated[
        Literal["exact", "seeded", "fast"],
        Field(description="exact: equal bits on the same GPU; seeded: same seed, no TF32; fast: TF32, autotuning"),
    ] = "seeded"
    capture: Annotated[bool, Field(description="on a GPU, replay steps whose shapes come up again as CUDA graphs")] = (
        True
    )
    log_every: Annotated[Count, Field(description="updates between two lines of metrics")] = 100
    save_every: Annotated[Count, Field(description="updates between two checkpoints; every validation has one")] = 1000
    validate_every: Annotated[
        Count | None, Field(description="updates between two validations; left out, every epoch ends with one")
    ] = None
    keep: Annotated[int, Field(ge=1, le=1000, description="checkpoints kept beside the best")] = 2

    @model_validator(mode="after")
    def _check_length(self) -> TrainingSettings:
        if self.epochs is None and self.updates is None:
            raise ValueError("set epochs or updates: training ends with one of them")
        if self.epochs is not None and self.updates is not None:
            raise ValueError(
                f"epochs = {self.epochs} and updates = {self.updates}: training ends with one of them; "
                "take the other away with training.updates=default, or with training.epochs=default"
            )
        return self

    @model_validator(mode="after")
    def _check_batching(self) -> TrainingSettings:
        if self.batching == "streams" and self.batch % self.accumulate:
            raise ValueError(f"accumulate = {self.accumulate} does not divide batch = {self.batch}")
        if self.batching in ("blocks", "sentences") and self.divisor == "batch":
            raise ValueError(
                f'divisor = "batch" counts streams, or pairs; batching = "{self.batching}" has none, use "tokens"'
            )
        return self
