"""Measure complete training steps of language models: `reefknot bench steps RECIPE`.

Every model is a row (one experiment) of a recipe. `measure_all` is the main function. It measures every row in several
modes, and `Workload` does the work that is timed. A step trains on one window of the text: input end (embeddings),
encoder, output end (classifier and loss), gradients, clipping and optimiser.

The modes:

    plain loop      baseline of recurrent models: the encoder loops over the steps, without cuDNN and reefknot kernels
    stored logits   baseline of self-attention models: plain torch ends, which find bands (clusters of words of similar
                    frequency) by masks on the device and store all scores
    eager           the code as reefknot runs it
    captured        the same as eager, captured as a CUDA graph

The learning rate is 0, so that the work is the same but the weights do not change. A row that averages its weights from
the first step on does so here too.

Both ends and the encoder are also measured alone, forward and backward, on one micro-batch. They are captured if the
step is. Their times are given as shares of the step. The remaining time is spent on penalties, clipping, the optimiser
and the host.

Operations are the operations that a step needs at least (`nn/part.py`), even if a mode performs more. Memory is the
peak of the memory allocated on the GPU while steps run, including weights and optimiser. It is not measured on a CPU.

Shapes: B sequences of a window, T steps, D dimensions, V words, M tokens that have a target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any

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
    time_function,
    time_steps,
)
from reefknot.lab.bench.plain_ends import use_plain_ends
from reefknot.lab.config.parts import OPTIMISERS
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.text.batches import build_batches
from reefknot.lab.training.averaging import WeightAverages
from reefknot.lab.training.distributed import World
from reefknot.lab.training.generators import seed_everything, set_determinism
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.state import Progress, TrainState
from reefknot.lab.training.update import MicroBatch, Updater, carries_state
from reefknot.nn.encoders.contract import Encoded, Encoder, State
from reefknot.nn.models.language_model import LanguageModel

LOOP, STORED, EAGER, CAPTURED = "plain loop", "stored logits", "eager", "captured"
"""The modes."""
MAX_WINDOWS = {"cuda": 16, "cpu": 2}
"""The largest number of windows that are trained on repeatedly. Several are used because lengths may be random."""
ENOUGH_TOKENS = 2**17
"""No further windows are used when they have this many tokens together."""
MAX_RANDOM_TOKENS = 2_000_000
"""The largest length of a random text. No benchmark reads more."""
NOT_CAPTURABLE = "a part of the model reads a number back from the device, so a step cannot be captured"


@dataclass(frozen=True)
class Text:
    """The training text."""

    ids: NDArray[np.int32]
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
    def random(cls, vocab_size: int, tokens: int, corpus: str) -> Text:
        """Sample words by Zipf's law, p(word v) proportional to 1 / (v + 1), in place of a corpus that was not found.

        The most frequent word ends a line.
        """
        unigram_V = 1.0 / np.arange(1, vocab_size + 1)
        uniform = np.random.default_rng(0).random(min(tokens, MAX_RANDOM_TOKENS))
        ids = np.searchsorted(np.cumsum(unigram_V / unigram_V.sum()), uniform)
        description = (
            f"{corpus} not found: random text with its {vocab_size:,} words; an epoch has its {tokens:,} tokens"
        )
        return cls(np.minimum(ids, vocab_size - 1).astype(np.int32), tokens, description, corpus, eos=0)


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
        modes = [baseline, EAGER]
        if device == "cuda":
            modes.append(CAPTURED)
        return modes


@dataclass(frozen=True)
class Row:
    """The measurements of a row in one mode, or the reason why there are none."""

    row: str
    mode: str
    batching: str
    batch: int
    steps: int
    accumulate: int
    text: str
    ms: float | None = None
    """Milliseconds per step: the median over passes."""
    repeats: int = 0
    tokens_per_second: float | None = None
    epoch_seconds: float | None = None
    memory_bytes: int | None = None
    flops: float | None = None
    """Operations per second, counting those that a step needs at least."""
    matrix_share: float | None = None
    """`flops` as a share of the rate at which the device multiplies large matrices in the row's precision."""
    input_share: float | None = None
    encoder_share: float | None = None
    output_share: float | None = None
    over_baseline: float | None = None
    """Seconds per epoch, divided by the seconds per epoch of the same row in plain torch."""
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
        """Return the row as plain JSON values."""
        return asdict(self) | {"ends_share": self.ends_share}


class LoopedEncoder(Encoder):
    """Runs another encoder without cuDNN and reefknot kernels, as a plain loop over the steps."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.input_dim, self.dim, self.carries_state = encoder.input_dim, encoder.dim, encoder.carries_state

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        return self.encoder.initial_state(streams, device)

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        with using("reference"), torch.backends.cudnn.flags(enabled=False):
            encoded: Encoded = self.encoder(inputs_BTD, state)
        return encoded


def prepare_update(model: LanguageModel, settings: TrainingSettings, world: World, streams: int) -> Updater:
    """Return an `Updater` at the start of training."""
    parallel = world.wrap_model(model)
    optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": parallel.trainable_parameters})
    hidden = model.initial_state(streams) if carries_state(model, settings) else {}
    averages = WeightAverages.create_at_start(parallel.parameters, settings.averaging)
    scaler = parallel.build_scaler(settings.precision == "float16")
    state = TrainState(parallel, optimiser, hidden, Progress(), averages, scaler)
    return Updater(model, state, world, settings)


class Workload:
    """A model, the windows of a text that it is trained on, and the update that training uses."""

    def __init__(self, job: Job, mode: str, device: str) -> None:
        self.settings = job.settings.model_copy(update={"capture": mode == CAPTURED})
        self.world = World(device=torch.device(device))
        set_determinism(self.settings.determinism)
        seed_everything(self.settings.seed)
        self.model = job.build_model().to(self.world.device).train()
        batches = build_batches(self.settings, job.text.ids, job.text.inputs, job.text.eos)
        enough_windows = math.ceil(ENOUGH_TOKENS / (self.settings.batch * self.settings.steps))
        num_windows = min(MAX_WINDOWS[device], enough_windows, batches.num_windows)
        self.windows = [(*batches.window(index), batches.count_targets(index)) for index in range(num_windows)]
        # Counted before the model is changed: the minimum does not depend on the mode.
        self.operations = sum(self.model.flops(inputs_BT, targets_BT) for inputs_BT, targets_BT, _ in self.windows)
        if mode == LOOP:
            self.model.encoder = LoopedEncoder(self.model.encoder)
        elif mode == STORED:
            use_plain_ends(self.model)
        self.update = prepare_update(self.model, self.settings, self.world, batches.batch_size)

    @property
    def tokens(self) -> int:
        """The number of targets in all windows."""
        return sum(count for *_, count in self.windows)

    @cached_property
    def micro_batch(self) -> MicroBatch:
        """The first micro-batch of the first window."""
        inputs_BT, targets_BT, _ = self.windows[0]
        return MicroBatch.split(inputs_BT, targets_BT, self.settings.accumulate, self.model.output)[0]

    def run(self) -> None:
        """Train on each window once."""
        for inputs_BT, targets_BT, count in self.windows:
            self.update(inputs_BT, targets_BT, 0.0, count)

    def build_part_steps(self) -> tuple[Step, Step, Step]:
        """Return the steps of the input end, the encoder and the output end alone, on the first micro-batch."""
        model, batch = self.model, self.micro_batch.to(self.world.device)
        state = model.initial_state(len(batch.inputs))
        plan = batch.plan  # how target positions are grouped by band
        use_autocast = partial(autocast, self.world.device, self.settings.precision)
        with torch.no_grad(), use_autocast():
            inputs_BTD = model.input(batch.inputs)
            hidden_BTD = model.encoder(inputs_BTD, state).output
        positions_M = slice(None) if batch.positions is None else batch.positions
        targets_M = batch.targets.reshape(-1)[positions_M]
        hidden_MD = hidden_BTD.flatten(0, 1)[positions_M].clone().requires_grad_()
        inputs_BTD = inputs_BTD.clone().requires_grad_()
        grad_x_BTD, grad_h_BTD = torch.randn_like(inputs_BTD), torch.randn_like(hidden_BTD)

        def run_input() -> Tensor:
            with use_autocast():
                return torch.sum(model.input(batch.inputs) * grad_x_BTD)

        def run_encoder() -> Tensor:
            with use_autocast():
                return torch.sum(model.encoder(inputs_BTD, state).output * grad_h_BTD)

        def run_output() -> Tensor:
            with use_autocast():
                losses = model.output.loss(hidden_MD, targets_M, plan).values()
                return torch.stack([loss.weight * loss.sum for loss in losses]).sum() / plan.count

        return (
            Step(run_input, list(model.input.parameters()), dict),
            Step(run_encoder, [inputs_BTD, *model.encoder.parameters()], dict),
            Step(run_output, [hidden_MD, *model.output.parameters()], dict),
        )


def measure_all(
    jobs: Sequence[Job], device: str, rates: Mapping[str, float], seconds: float, notify: Callable[[str], None]
) -> Iterator[list[Row]]:
    """Yield the rows of every job, one for each mode.

    Args:
        jobs: What to measure.
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
        rows = [_measure_mode(job, mode, device, rate, seconds, notify) for mode in job.modes(device)]
        baseline_seconds = rows[0].epoch_seconds
        compared_rows = []
        for row in rows:
            first_seconds = first_epoch_seconds.setdefault((job.text.corpus, row.mode), row.epoch_seconds)
            over_baseline = divide(row.epoch_seconds, baseline_seconds)
            over_first = divide(row.epoch_seconds, first_seconds)
            compared_rows.append(replace(row, over_baseline=over_baseline, over_first=over_first))
        yield compared_rows


def _measure_mode(
    job: Job, mode: str, device: str, rate: float | None, seconds: float, notify: Callable[[str], None]
) -> Row:
    notify(f"  {mode}")
    settings = job.settings
    row = Row(
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
        if device == "cuda":
            # The warm-up counts too: a graph that is replayed allocates nothing that could be counted.
            torch.cuda.reset_peak_memory_stats()
        milliseconds = time_function(workload.run, device, seconds)
        ms = median(milliseconds)
        tokens_per_second, flops = 1e3 * workload.tokens / ms, 1e3 * workload.operations / ms
        row = replace(
            row,
            ms=ms / len(workload.windows),
            repeats=len(milliseconds),
            tokens_per_second=tokens_per_second,
            epoch_seconds=job.text.tokens / tokens_per_second,
            memory_bytes=peak_memory_bytes(device) if device == "cuda" else None,
            flops=flops,
            matrix_share=divide(flops, rate),
        )
        micro_batch_ms = 1e3 * workload.micro_batch.plan.count / tokens_per_second
        input_ms, encoder_ms, output_ms = (
            _time_part(step, mode, device, seconds) for step in workload.build_part_steps()
        )
        return replace(
            row,
            input_share=input_ms / micro_batch_ms,
            encoder_share=encoder_ms / micro_batch_ms,
            output_share=output_ms / micro_batch_ms,
        )
    except Exception as error:  # the other rows are still measured
        return replace(row, note=describe_error(error))


def _time_part(step: Step, mode: str, device: str, seconds: float) -> float:
    """Return the median milliseconds of a part of the model."""
    if mode == CAPTURED:
        return median(time_captured_step(step, seconds))
    (milliseconds,) = time_steps([step], device, seconds)
    return median(milliseconds)
