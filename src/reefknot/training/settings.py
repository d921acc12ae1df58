"""What a recipe can say about training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from reefknot.parts import OPTIMISERS, SCHEDULES
from reefknot.settings import Count, Positive, Settings
from reefknot.text.streams import RandomSteps
from reefknot.training.averaging import AveragingSettings
from reefknot.training.stopping import StoppingSettings

if TYPE_CHECKING:
    OptimiserSettings = Settings
    ScheduleSettings = Settings
else:
    OptimiserSettings = OPTIMISERS.settings()
    ScheduleSettings = SCHEDULES.settings()


class StartSettings(Settings):
    """Another run of the same recipe and seed, finished before."""

    row: Annotated[str, Field(min_length=1, max_length=100, description="whose best weights training begins with")]


class TrainingSettings(Settings):
    """Truncated backpropagation over parallel streams."""

    epochs: Annotated[Count, Field(description="passes over the training text")]
    batch: Annotated[Count, Field(description="parallel streams, over all processes together")]
    steps: Annotated[Count, Field(description="tokens per stream and update: where backpropagation is cut")]
    random_steps: Annotated[RandomSteps | None, Field(description="windows of random length around `steps`")] = None
    accumulate: Annotated[
        Count, Field(description="pieces that the streams are cut into, one after the other, to save memory")
    ] = 1
    divisor: Annotated[
        Literal["tokens", "batch"],
        Field(description="the summed loss is divided by: all tokens of the step, or (the papers) its streams"),
    ] = "tokens"
    clip: Annotated[Positive | None, Field(description="largest norm of the whole gradient")] = None
    optimiser: Annotated[OptimiserSettings, Field(description="what turns gradients into updates")]
    schedule: Annotated[ScheduleSettings, Field(description="how the rate changes from epoch to epoch")]
    averaging: Annotated[AveragingSettings | None, Field(description="keep the mean of the iterates (NT-ASGD)")] = None
    stop: Annotated[StoppingSettings | None, Field(description="end before the last epoch")] = None
    start: Annotated[StartSettings | None, Field(description="begin with the weights of another row")] = None
    precision: Annotated[
        Literal["float32", "bfloat16"], Field(description="bfloat16: autocast; weights stay float32")
    ] = "float32"
    determinism: Annotated[
        Literal["exact", "seeded", "fast"],
        Field(description="exact: equal bits on the same GPU; seeded: same seed, no TF32; fast: TF32, autotuning"),
    ] = "seeded"
    capture: Annotated[bool, Field(description="on a GPU, replay steps whose shapes come up again as CUDA graphs")] = (
        True
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1, description="of every random number")] = 0
    log_every: Annotated[Count, Field(description="updates between two lines of metrics")] = 100
    save_every: Annotated[Count, Field(description="updates between two checkpoints; every epoch ends with one")] = 1000
    keep: Annotated[int, Field(ge=1, le=1000, description="checkpoints kept beside the best")] = 2

    @model_validator(mode="after")
    def _check_accumulate(self) -> TrainingSettings:
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate = {self.accumulate} does not divide batch = {self.batch}")
        return self
