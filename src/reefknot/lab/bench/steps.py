"""Measure complete training steps of language models: `reefknot bench steps RECIPE`.

A recipe is a TOML file with experiments, which are called rows. Every row has a model. `measure_all` is the main
function: it measures every row in several modes, such as eager and captured (`LOOP`, `STORED`, `COMPILED`,
`EAGER`, `CAPTURED`).
`Workload` does the work that is timed.

A step trains on one window, a batch of sequences that are computed at once. It runs the input end (embeddings), the
encoder and the output end (classifier and loss), computes gradients, clips them and runs the optimiser. The learning
rate is 0, so that the work is the same but the weights do not change. A row that averages its weights from the first
step on does so here too.

Shapes: B sequences of a window, T steps, D dimensions, V words, M tokens that have a target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.kernels.choice import using
from reefknot.lab.bench.measure import (
    Step,
    Unavailable,
    describe_error,
    divide,
    free_gpu_memory,
    time_captured_step,
    time_steps,
    time_with_memory,
)
from reefknot.lab.bench.plain_ends import compile_plain_model, use_plain_ends
from reefknot.lab.config.parts import OPTIMISERS
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.text.batches import Batches, build_batches
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.training.averaging import WeightAverages
from reefknot.lab.training.distributed import World
from reefknot.lab.training.generators import seed_everything, set_determinism
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.state import Progress, TrainState
from reefknot.lab.training.update import MicroBatch, Updater, carries_state
from reefknot.nn.encoders.contract import Encoded, Encoder, State
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.contract import add_scalars

LOOP = "plain loop"
"""The mode that is the baseline of recurrent models. The encoder loops over the steps in Python, without cuDNN and
without reefknot's kernels."""
STORED = "stored logits"
"""The mode that is the baseline of self-attention models. The ends are in plain torch (`plain_ends.py`): they store all
scores, and find the words of a band (a group of words of similar frequency) by masks on the device."""
COMPILED = "compiled torch"
"""The mode of a competitor of self-attention models: the model of `STORED`, compiled by `torch.compile`."""
EAGER = "eager"
"""The mode in which reefknot's code runs without CUDA graphs and without compiled blocks."""
CAPTURED = "captured"
"""The mode in which reefknot trains on a GPU: captured as a CUDA graph, with compiled blocks if the settings of the row
ask for them (`training.compile`)."""
MAX_WINDOWS = {"cuda": 16, "cpu": 2}
"""The largest number of windows that are trained on repeatedly. Several are used because lengths may be random."""
ENOUGH_TOKENS = 2**17
"""No further windows are used when they have this many tokens together."""
MAX_RANDOM_TOKENS = 2_000_000
"""The largest length of a random text. No benchmark reads more."""
NOT_CAPTURABLE = "a part of the model reads a number back from the device, so a step cannot be captured"
"""The note of a model that cannot be measured in the mode `CAPTURED`."""


@dataclass(frozen=True)
class Text:
    """The training text."""

    ids: NDArray[np.int32]
    """The ids of the words, which may be fewer than `tokens`."""
    tokens: int
    """The number of tokens of the corpus, which is the length of an epoch."""
    description: str
    """Human-readable description of the text, in one line."""
    corpus: str
    """The name of the corpus. Epochs of different corpora are not compared."""
    inputs: NDArray[np.int32] | None = None
    """The ids that the input end reads, if they differ from the targets' ids."""
    eos: int | None = None
    """The id of the word that ends a line, if there is one."""

    @classmethod
    def from_dataset(cls, dataset: Dataset, max_tokens: int | None = None) -> Text:
        """Return the training text of a dataset, or its first `max_tokens` tokens."""
        train_split = dataset.splits["train"]
        return cls(
            train_split.ids[:max_tokens],
            train_split.tokens,
            dataset.summary,
            dataset.name,
            train_split.inputs[:max_tokens],
            dataset.vocabulary.eos,
        )

    @classmethod
    def random(cls, vocab_size: int, tokens: int, corpus: str) -> Text:
        """Sample words by Zipf's law, p(word v) proportional to 1 / (v + 1), in place of a corpus that was not found.

        The most frequent word ends a line.
        """
        unigram_V = 1.0 / np.arange(1, vocab_size + 1)
        cumulative_V = np.cumsum(unigram_V / unigram_V.sum())
        num_sampled = min(tokens, MAX_RANDOM_TOKENS)
        uniform = np.random.default_rng(0).random(num_sampled)
        sampled_words = np.searchsorted(cumulative_V, uniform)
        ids = np.minimum(sampled_words, vocab_size - 1).astype(np.int32)
        description = (
            f"{corpus} not found: random text with its {vocab_size:,} words; an epoch has its {tokens:,} tokens"
        )
        return cls(ids, tokens, description, corpus, eos=0)


@dataclass(frozen=True)
class Job:
    """A row of a recipe: its name, its training settings, a function that builds its model, and the text."""

    name: str
    settings: TrainingSettings
    build_model: Callable[[], LanguageModel]
    text: Text
    carries_state: bool = True
    """Whether the encoder carries a state from window to window, as recurrent encoders do."""

    def modes(self, device: str) -> list[str]:
        """Return the modes in which the row is measured. The first mode is the baseline of the others."""
        baseline = LOOP if self.carries_state else STORED
        if device != "cuda":
            return [baseline, EAGER]
        competitors = [baseline] if self.carries_state else [baseline, COMPILED]
        return [*competitors, EAGER, CAPTURED]


@dataclass(frozen=True)
class ModeMeasurement:
    """The measurements of a row in one mode, or the reason why there are none.

    Both ends and the encoder are also measured alone, forward and backward, on one micro-batch. They are captured if
    the step is. Their times are shares of the step. The remaining time is spent on penalties, clipping, the optimiser
    and the host.
    """

    row: str
    """The name of the row."""
    mode: str
    batching: str
    batch: int
    steps: int
    accumulate: int
    """The number of micro-batches of a step."""
    text: str
    """Description of the text."""
    ms: float | None = None
    """Milliseconds per step: the median over passes through all windows."""
    repeats: int = 0
    """The number of passes."""
    tokens_per_second: float | None = None
    epoch_seconds: float | None = None
    memory_bytes: int | None = None
    """The peak of the memory allocated on the GPU, with weights and optimiser. It is not measured on a CPU."""
    flops: float | None = None
    """Operations per second. Only the operations that a step needs at least are counted (`nn/part.py`), even if a mode
    performs more."""
    matrix_share: float | None = None
    """`flops` as a share of the rate at which the device multiplies large matrices in the row's precision."""
    input_share: float | None = None
    encoder_share: float | None = None
    output_share: float | None = None
    over_baseline: float | None = None
    """Seconds per epoch, divided by the seconds per epoch of the same row in plain torch."""
    over_compiled: float | None = None
    """Seconds per epoch, divided by the seconds per epoch of the same row in the mode `COMPILED`."""
    over_first: float | None = None
    """Seconds per epoch, divided by the seconds per epoch of the first row with the same corpus and mode."""
    note: str = ""
    """The reason why something was not measured."""

    @property
    def ends_share(self) -> float | None:
        """The share of both ends together."""
        if self.input_share is None or self.output_share is None:
            return None
        return self.input_share + self.output_share

    def record(self) -> dict[str, Any]:
        """Return the measurements as plain JSON values."""
        return asdict(self) | {"ends_share": self.ends_share}


def measure_all(
    jobs: Sequence[Job], device: str, rates: Mapping[str, float], seconds: float, notify: Callable[[str], None]
) -> Iterator[list[ModeMeasurement]]:
    """Yield the measurements of every job, one for each mode.

    Args:
        jobs: The rows to measure.
        device: `cuda` or `cpu`.
        rates: Operations per second that the device reaches in large matrix products, by precision, if known.
        seconds: Duration of the timing, per mode.
        notify: Called with lines about progress.
    """
    # Seconds per epoch of the first row, by corpus and mode.
    first_epoch_seconds: dict[tuple[str, str], float | None] = {}
    for job in jobs:
        notify(job.name)
        rate = rates.get(job.settings.precision)
        measurements = [_measure_mode(job, mode, device, rate, seconds, notify) for mode in job.modes(device)]

        baseline_seconds = measurements[0].epoch_seconds
        seconds_by_mode = {measurement.mode: measurement.epoch_seconds for measurement in measurements}
        compiled_seconds = seconds_by_mode.get(COMPILED)
        compared = []
        for measurement in measurements:
            epoch_seconds = measurement.epoch_seconds
            first_seconds = first_epoch_seconds.setdefault((job.text.corpus, measurement.mode), epoch_seconds)
            over_baseline = divide(epoch_seconds, baseline_seconds)
            over_first = divide(epoch_seconds, first_seconds)
            over_compiled = divide(epoch_seconds, compiled_seconds)
            compared.append(
                replace(measurement, over_baseline=over_baseline, over_compiled=over_compiled, over_first=over_first)
            )
        yield compared


def _measure_mode(
    job: Job, mode: str, device: str, rate: float | None, seconds: float, notify: Callable[[str], None]
) -> ModeMeasurement:
    """Measure a row in one mode. An exception becomes the note of the measurement."""
    notify(f"  {mode}")
    settings = job.settings
    measurement = ModeMeasurement(
        job.name,
        mode,
        settings.batching,
        settings.batch,
        settings.steps,
        settings.accumulate,
        job.text.description,
    )
    try:
        if device == "cuda":
            free_gpu_memory()
        workload = Workload(job, mode, device)
        if mode == CAPTURED and not workload.update.uses_graphs:
            raise Unavailable(NOT_CAPTURABLE)
        if workload.update.compiled_blocks.message:
            notify(f"    {workload.update.compiled_blocks.message}")

        # Measure complete steps.
        milliseconds, memory_bytes = time_with_memory(workload.run, device, seconds)
        pass_ms = median(milliseconds)
        tokens_per_second = 1e3 * workload.tokens / pass_ms
        flops = 1e3 * workload.operations / pass_ms
        measurement = replace(
            measurement,
            ms=pass_ms / len(workload.windows),
            repeats=len(milliseconds),
            tokens_per_second=tokens_per_second,
            epoch_seconds=job.text.tokens / tokens_per_second,
            memory_bytes=memory_bytes,
            flops=flops,
            matrix_share=divide(flops, rate),
        )

        # Measure both ends and the encoder alone.
        micro_batch_ms = 1e3 * workload.micro_batch.plan.count / tokens_per_second
        part_steps = workload.build_part_steps()
        input_ms = _time_part(part_steps.input, mode, device, seconds)
        encoder_ms = _time_part(part_steps.encoder, mode, device, seconds)
        output_ms = _time_part(part_steps.output, mode, device, seconds)
        return replace(
            measurement,
            input_share=input_ms / micro_batch_ms,
            encoder_share=encoder_ms / micro_batch_ms,
            output_share=output_ms / micro_batch_ms,
        )
    except Exception as error:  # the other modes are still measured
        return replace(measurement, note=describe_error(error))


def _time_part(step: Step, mode: str, device: str, seconds: float) -> float:
    """Return the median milliseconds of a part of the model."""
    if mode == CAPTURED:
        return median(time_captured_step(step, seconds))
    (milliseconds,) = time_steps([step], device, seconds)
    return median(milliseconds)


class Window(NamedTuple):
    """A batch of sequences that are computed at once."""

    inputs: Tensor
    """The ids that the model reads: inputs_BT, or pairs_BU in translation."""
    targets: Tensor
    """The next words, targets_BT."""
    num_targets: int
    """The number of targets, without padding."""


def first_windows(batches: Batches, num_windows: int) -> list[Window]:
    """Return the first windows of a text, which are trained on repeatedly."""
    return [Window(*batches.window(index), batches.count_targets(index)) for index in range(num_windows)]


class PartSteps(NamedTuple):
    """Forward and backward passes of the parts of a model, each alone."""

    input: Step
    encoder: Step
    output: Step


class Workload:
    """A model, the windows of a text that it is trained on, and the update that training uses."""

    def __init__(self, job: Job, mode: str, device: str) -> None:
        changes = {"capture": True} if mode == CAPTURED else {"capture": False, "compile": False}
        self.settings = job.settings.model_copy(update=changes)
        self.world = World(device=torch.device(device))
        set_determinism(self.settings.determinism)
        seed_everything(self.settings.seed)
        self.model = job.build_model().to(self.world.device).train()

        # Choose the windows.
        batches = build_batches(self.settings, job.text.ids, job.text.inputs, job.text.eos)
        enough_windows = math.ceil(ENOUGH_TOKENS / (self.settings.batch * self.settings.steps))
        num_windows = min(MAX_WINDOWS[device], enough_windows, batches.num_windows)
        self.windows = first_windows(batches, num_windows)

        # Operations are counted before the model is changed: the minimum does not depend on the mode.
        self.operations = sum(self.model.flops(window.inputs, window.targets) for window in self.windows)
        if mode == LOOP:
            self.model.encoder = LoopedEncoder(self.model.encoder)
        elif mode in (STORED, COMPILED):
            use_plain_ends(self.model)
        if mode == COMPILED:
            compile_plain_model(self.model)
        self.update = prepare_update(self.model, self.settings, self.world, batches.batch_size)

    @property
    def tokens(self) -> int:
        """The number of targets in all windows."""
        return sum(window.num_targets for window in self.windows)

    @cached_property
    def micro_batch(self) -> MicroBatch:
        """The first micro-batch of the first window."""
        window = self.windows[0]
        micro_batches = MicroBatch.split(window.inputs, window.targets, self.settings.accumulate, self.model.output)
        return micro_batches[0]

    def run(self) -> None:
        """Train on each window once."""
        for window in self.windows:
            self.update(window.inputs, window.targets, 0.0, window.num_targets)

    def build_part_steps(self) -> PartSteps:
        """Return the steps of the input end, the encoder and the output end alone, on the first micro-batch."""
        model = self.model
        batch = self.micro_batch.to(self.world.device)
        state = model.initial_state(len(batch.inputs))
        plan = batch.plan  # how target positions are grouped by band
        use_autocast = partial(autocast, self.world.device, self.settings.precision)

        # The inputs of the encoder and of the output end, and random gradients of the outputs of the other two parts.
        with torch.no_grad(), use_autocast():
            inputs_BTD = model.input(batch.inputs)
            hidden_BTD = model.encoder(inputs_BTD, state).output
        positions_M = slice(None) if batch.positions is None else batch.positions
        targets_M = batch.targets.reshape(-1)[positions_M]
        hidden_MD = hidden_BTD.flatten(0, 1)[positions_M].clone().requires_grad_()
        inputs_BTD = inputs_BTD.clone().requires_grad_()
        input_gradient_BTD = torch.randn_like(inputs_BTD)
        hidden_gradient_BTD = torch.randn_like(hidden_BTD)

        def run_input() -> Tensor:
            with use_autocast():
                return torch.sum(model.input(batch.inputs) * input_gradient_BTD)

        def run_encoder() -> Tensor:
            with use_autocast(), self.update.compiled_blocks.use(batch.inputs.shape):
                return torch.sum(model.encoder(inputs_BTD, state).output * hidden_gradient_BTD)

        def run_output() -> Tensor:
            with use_autocast():
                losses = model.output.loss(hidden_MD, targets_M, plan).values()
                return add_scalars([loss.weighted_sum() for loss in losses]) / plan.count

        return PartSteps(
            input=Step(run_input, list(model.input.parameters()), dict),
            encoder=Step(run_encoder, [inputs_BTD, *model.encoder.parameters()], dict),
            output=Step(run_output, [hidden_MD, *model.output.parameters()], dict),
        )


class LoopedEncoder(Encoder):
    """Runs another encoder without cuDNN and reefknot kernels, as a plain loop over the steps."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.input_dim = encoder.input_dim
        self.dim = encoder.dim
        self.carries_state = encoder.carries_state

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        return self.encoder.initial_state(streams, device)

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        with using("reference"), torch.backends.cudnn.flags(enabled=False):
            encoded: Encoded = self.encoder(inputs_BTD, state)
        return encoded


def prepare_update(model: LanguageModel, settings: TrainingSettings, world: World, streams: int) -> Updater:
    """Return an `Updater` at the start of training. `streams` is the number of sequences that are read in parallel."""
    parallel_model = world.wrap_model(model)
    optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": parallel_model.trainable_parameters})
    encoder_state = model.initial_state(streams) if carries_state(model, settings) else {}
    averages = WeightAverages.create_at_start(parallel_model.parameters, settings.averaging)
    scaler = parallel_model.build_scaler(settings.precision == "float16")
    train_state = TrainState(parallel_model, optimiser, encoder_state, Progress(), averages, scaler)
    return Updater(model, train_state, world, settings)
