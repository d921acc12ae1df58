"""Measure whole training steps of a recipe's rows: `reefknot bench steps RECIPE`.

A step is the work of training on one window: input end, encoder, output end, gradients, clipping, optimiser. Every row
is measured in several modes, all in one run: in plain torch, as our code runs it (`eager`), and captured as a CUDA
graph (`captured`). In plain torch, a recurrent encoder is a loop over the steps, without cuDNN and our kernels (`plain
loop`). The ends of a self-attention model find bands by masks on the device and store all scores (`stored logits`). The
learning rate is 0, so that the work is the same but the weights do not change. A row that averages its weights from the
first step on does so here too.

Both ends and the encoder are also measured alone, forward and backward, on one micro-batch. They are captured if the
step is. Their times are given as shares of the step. The remaining time is spent on penalties, clipping, the optimiser
and the host.

Operations are the operations that a step needs at least (`nn/part.py`), even if a mode performs more. Memory is the
peak of the memory allocated on the GPU while steps run, including weights and optimiser. It is not measured on a CPU.

Shapes: B rows of a window, T steps, D dimensions, N = B x T rows, M rows that have a target.
"""

from __future__ import annotations

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
from reefknot.lab.bench.measure import Absent, Step, free_gpu_memory, graph_times, ratio, reason, times, work_times
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
WINDOWS = {"cuda": 16, "cpu": 2}
"""The largest number of windows that are trained on repeatedly. Several are used because lengths may be random."""
ENOUGH = 2**17
"""Windows are taken until they have this many tokens together."""
LONGEST = 2_000_000
"""A random text has at most this many words. No benchmark reads more."""
NOT_CAPTURED = "a part of the model reads a number back from the device, so a step cannot be captured"


@dataclass(frozen=True)
class Text:
    """The training text."""

    ids: NDArray[np.int32]
    tokens: int
    """The number of tokens of the corpus, which is the length of an epoch."""
    description: str
    """A description of the text in one line, for people."""
    corpus: str
    """The name of the corpus. Epochs of different corpora are not compared."""
    inputs: NDArray[np.int32] | None = None
    """The ids that the input end reads, if they differ from the targets' ids."""
    eos: int | None = None
    """The id of the word that ends a line, if there is one."""

    @classmethod
    def random(cls, words: int, tokens: int, corpus: str) -> Text:
        """Draw words by Zipf's law, p(word v) proportional to 1 / (v + 1), in place of a corpus that was not found.

        The most frequent word ends a line.
        """
        unigram_V = 1.0 / np.arange(1, words + 1)
        draws = np.random.default_rng(0).random(min(tokens, LONGEST))
        ids = np.searchsorted(np.cumsum(unigram_V / unigram_V.sum()), draws)
        description = f"{corpus} not found: random text with its {words:,} words; an epoch has its {tokens:,} tokens"
        return cls(np.minimum(ids, words - 1).astype(np.int32), tokens, description, corpus, eos=0)


@dataclass(frozen=True)
class Job:
    """A row of a recipe: its name, its training settings, a function that builds its model, and the text."""

    name: str
    settings: TrainingSettings
    build: Callable[[], LanguageModel]
    text: Text
    carries_state: bool = True
    """Whether the encoder carries a state from window to window, as recurrent encoders do."""

    def modes(self, device: str) -> list[str]:
        """Return the modes in which the row is measured. The first mode is the baseline of the others."""
        baseline = LOOP if self.carries_state else STORED
        return [baseline, EAGER, *([CAPTURED] if device == "cuda" else [])]


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


class Looped(Encoder):
    """An encoder without cuDNN and our kernels: a plain loop over the steps."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.input_dim, self.dim, self.carries_state = encoder.input_dim, encoder.dim, encoder.carries_state

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        return self.encoder.initial_state(streams, device)

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        with using("reference"), torch.backends.cudnn.flags(enabled=False):
            encoded: Encoded = self.encoder(x_BTD, state)
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
        self.model = job.build().to(self.world.device).train()
        batches = build_batches(self.settings, job.text.ids, job.text.inputs, job.text.eos)
        enough = -(-ENOUGH // (self.settings.batch * self.settings.steps))
        first = range(min(WINDOWS[device], enough, batches.num_windows))
        self.windows = [(*batches.window(index), batches.count_targets(index)) for index in first]
        self.operations = sum(self.model.flops(x_BT, y_BT) for x_BT, y_BT, _ in self.windows)
        if mode == LOOP:
            self.model.encoder = Looped(self.model.encoder)
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
        x_BT, y_BT, _ = self.windows[0]
        return MicroBatch.split(x_BT, y_BT, self.settings.accumulate, self.model.output)[0]

    def run(self) -> None:
        """Train on each window once."""
        for x_BT, y_BT, count in self.windows:
            self.update(x_BT, y_BT, 0.0, count)

    def parts(self) -> tuple[Step, Step, Step]:
        """Return the steps of the input end, the encoder and the output end alone, on the first micro-batch."""
        model, batch = self.model, self.micro_batch.to(self.world.device)
        state, plan = model.initial_state(len(batch.inputs)), batch.plan
        precision = partial(autocast, self.world.device, self.settings.precision)
        with torch.no_grad(), precision():
            x_BTD = model.input(batch.inputs)
            h_BTD = model.encoder(x_BTD, state).output
        positions_M = slice(None) if batch.positions is None else batch.positions
        y_M, h_MD = batch.targets.reshape(-1)[positions_M], h_BTD.flatten(0, 1)[positions_M].clone().requires_grad_()
        x_BTD = x_BTD.clone().requires_grad_()
        grad_x_BTD, grad_h_BTD = torch.randn_like(x_BTD), torch.randn_like(h_BTD)

        def look_up() -> Tensor:
            with precision():
                return torch.sum(model.input(batch.inputs) * grad_x_BTD)

        def encode() -> Tensor:
            with precision():
                return torch.sum(model.encoder(x_BTD, state).output * grad_h_BTD)

        def score() -> Tensor:
            with precision():
                losses = model.output.loss(h_MD, y_M, plan).values()
                return torch.stack([loss.weight * loss.sum for loss in losses]).sum() / plan.count

        return (
            Step(look_up, list(model.input.parameters()), dict),
            Step(encode, [x_BTD, *model.encoder.parameters()], dict),
            Step(score, [h_MD, *model.output.parameters()], dict),
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
    first: dict[tuple[str, str], float | None] = {}
    for job in jobs:
        notify(job.name)
        rate = rates.get(job.settings.precision)
        rows = [_measure(job, mode, device, rate, seconds, notify) for mode in job.modes(device)]
        for row in rows:
            first.setdefault((job.text.corpus, row.mode), row.epoch_seconds)
        yield [
            replace(
                row,
                over_baseline=ratio(row.epoch_seconds, rows[0].epoch_seconds),
                over_first=ratio(row.epoch_seconds, first[job.text.corpus, row.mode]),
            )
            for row in rows
        ]


def _measure(
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
            raise Absent(NOT_CAPTURED)
        if device == "cuda":
            # The warm-up counts too: a graph that is replayed allocates nothing that could be counted.
            torch.cuda.reset_peak_memory_stats()
        (milliseconds,) = work_times(device, [(workload.run, lambda: None)], seconds)
        ms = median(milliseconds)
        speed, flops = 1e3 * workload.tokens / ms, 1e3 * workload.operations / ms
        row = replace(
            row,
            ms=ms / len(workload.windows),
            repeats=len(milliseconds),
            tokens_per_second=speed,
            epoch_seconds=job.text.tokens / speed,
            memory_bytes=peak_memory_bytes(device) if device == "cuda" else None,
            flops=flops,
            matrix_share=ratio(flops, rate),
        )
        batch_ms = 1e3 * workload.micro_batch.plan.count / speed
        source, encoder, output = (_part_ms(part, mode, device, seconds) / batch_ms for part in workload.parts())
        return replace(row, input_share=source, encoder_share=encoder, output_share=output)
    except Exception as error:  # the other rows are still measured
        return replace(row, note=reason(error))


def _part_ms(part: Step, mode: str, device: str, seconds: float) -> float:
    if mode == CAPTURED:
        return median(graph_times(part, seconds))
    (milliseconds,) = times([part], device, seconds)
    return median(milliseconds)
