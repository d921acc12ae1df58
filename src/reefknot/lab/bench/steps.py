"""Whole training steps of a recipe's rows: `reefknot bench steps RECIPE`.

A step is what training makes of a window: input end, encoder, output end, gradients, clipping, optimiser. Every row is
measured as people write it in plain torch, then as it is, then captured as a CUDA graph, all in one run. People write a
recurrent encoder as a loop over the steps, where cuDNN and our recurrences are left out (`plain loop`), and the ends of
a self-attention model with masks on the device and all scores in memory (`stored logits`). The rate is 0: the same
work, and weights that stay as they are. Averages are kept where a row keeps them from its first step on.

Both ends and the encoder are also measured alone, forward and backward on what goes through the model at once, captured
where the step is. Their shares are of the step's time; what is left is penalties, clipping and optimiser, and the host.

Operations are those that the step needs at least (`nn/models/operations.py`), whatever a mode makes of them. Memory
is the most that is allocated on the GPU while steps run, weights and optimiser included; it is not measured on a CPU.

Shapes: B rows of a window, T steps, D width, N = B x T rows, M rows that have a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.kernels.choice import using
from reefknot.lab.bench.measure import Absent, Step, give_back, graph_times, reason, times, work_times
from reefknot.lab.bench.stored import store
from reefknot.lab.config.parts import OPTIMISERS
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.text.batches import batches_of
from reefknot.lab.training.averaging import Averages
from reefknot.lab.training.distributed import World
from reefknot.lab.training.generators import seed_everything, set_determinism
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.state import Progress, TrainState
from reefknot.lab.training.update import PRODUCTS, Piece, Update, carries
from reefknot.nn.encoders.contract import Encoded, Encoder, State
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.operations import operations

LOOP, STORED, EAGER, CAPTURED = "plain loop", "stored logits", "eager", "captured"
WINDOWS = {"cuda": 16, "cpu": 2}
"""Windows that are trained on again and again: several, since their lengths may be random."""
ENOUGH = 2**17
"""Tokens, of which no more windows are taken than it takes."""
LONGEST = 2_000_000
"""Words of a text that is made up; no bench reads further."""


@dataclass(frozen=True)
class Text:
    """What is trained on."""

    ids: NDArray[np.int32]
    tokens: int
    """Of the corpus: what an epoch is."""
    told: str
    """What this is, for people."""
    corpus: str
    """Its name: an epoch of another one is other work."""
    inputs: NDArray[np.int32] | None = None
    """What the input end reads, where it has ids of its own."""
    eos: int | None = None
    """The word that ends a line, where one does."""

    @classmethod
    def random(cls, words: int, tokens: int, corpus: str) -> Text:
        """Words by Zipf's law, p(word v) proportional to 1 / (v + 1), in the place of a corpus that is not here.

        Lines end with the first of them.
        """
        unigram_V = 1.0 / np.arange(1, words + 1)
        draw = np.random.default_rng(0).random(min(tokens, LONGEST))
        ids = np.searchsorted(np.cumsum(unigram_V / unigram_V.sum()), draw)
        told = f"{corpus} is not here: random text of its {words:,} words; an epoch is its {tokens:,} tokens"
        return cls(np.minimum(ids, words - 1).astype(np.int32), tokens, told, corpus, eos=0)


@dataclass(frozen=True)
class Job:
    """A row of a recipe: its name, how it is trained, how its model is built, and on what text."""

    name: str
    settings: TrainingSettings
    build: Callable[[], LanguageModel]
    text: Text
    carries: bool = True
    """Whether its encoder carries a state from window to window, as recurrent ones do."""

    def modes(self, device: str) -> list[str]:
        """The ways to run it; the first is what the others are compared with."""
        baseline = LOOP if self.carries else STORED
        return [baseline, EAGER, *([CAPTURED] if device == "cuda" else [])]


@dataclass(frozen=True)
class Row:
    """What was measured of one row in one way, or why nothing was."""

    row: str
    mode: str
    batching: str
    batch: int
    steps: int
    accumulate: int
    text: str
    ms: float | None = None
    """Per step, the median over passes."""
    repeats: int = 0
    tokens_per_second: float | None = None
    epoch_seconds: float | None = None
    memory_bytes: int | None = None
    flops: float | None = None
    """Operations a second, of those that a step needs at least."""
    matrix_share: float | None = None
    """Of the rate at which the device multiplies large matrices in the row's precision."""
    input_share: float | None = None
    encoder_share: float | None = None
    output_share: float | None = None
    over_baseline: float | None = None
    """Seconds of an epoch over those of the same row in plain torch."""
    over_first: float | None = None
    """Seconds of an epoch over those of the first row on the same corpus, measured the same way."""
    note: str = ""
    """Why something was not measured."""

    @property
    def ends_share(self) -> float | None:
        """Of both ends together."""
        if self.input_share is None or self.output_share is None:
            return None
        return self.input_share + self.output_share

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self) | {"ends_share": self.ends_share}


class Looped(Encoder):
    """An encoder without cuDNN and without our kernels: a loop over the steps, as everyone writes it."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.input_dim, self.dim, self.carries = encoder.input_dim, encoder.dim, encoder.carries

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        return self.encoder.initial_state(streams, device)

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        with using("reference"), torch.backends.cudnn.flags(enabled=False):
            encoded: Encoded = self.encoder(x_BTD, state)
        return encoded


def prepare_update(model: LanguageModel, settings: TrainingSettings, world: World, streams: int) -> Update:
    """What updates a model as training does, from the beginning."""
    parallel = world.parallel(model)
    optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": parallel.trained})
    hidden = model.initial_state(streams) if carries(model, settings) else {}
    averages = Averages.at_once(parallel.parameters, settings.averaging)
    scaler = parallel.scaler(settings.precision == "float16")
    state = TrainState(parallel, optimiser, hidden, Progress(), averages, scaler)
    return Update(model, state, world, settings)


class Course:
    """Some windows of a text, and a model that is trained on them as training does it."""

    def __init__(self, job: Job, mode: str, device: str) -> None:
        self.settings = job.settings.model_copy(update={"capture": mode == CAPTURED})
        self.world = World(device=torch.device(device))
        set_determinism(self.settings.determinism)
        seed_everything(self.settings.seed)
        self.model = job.build().to(self.world.device).train()
        batches = batches_of(self.settings, job.text.ids, job.text.inputs, job.text.eos)
        enough = -(-ENOUGH // (self.settings.batch * self.settings.steps))
        first = range(min(WINDOWS[device], enough, batches.windows))
        self.windows = [(*batches.window(index), batches.count(index)) for index in first]
        self.operations = sum(operations(self.model, x_BT, y_BT) for x_BT, y_BT, _ in self.windows)
        if mode == LOOP:
            self.model.encoder = Looped(self.model.encoder)
        elif mode == STORED:
            store(self.model)
        self.update = prepare_update(self.model, self.settings, self.world, batches.batch)

    @property
    def tokens(self) -> int:
        """Targets of all windows."""
        return sum(count for *_, count in self.windows)

    @cached_property
    def piece(self) -> Piece:
        """What goes through the model at once: the rows of the first window that are not accumulated."""
        x_BT, y_BT, _ = self.windows[0]
        return Piece.cut(x_BT, y_BT, self.settings.accumulate, self.model.output)[0]

    def run(self) -> None:
        """One pass over the windows."""
        for x_BT, y_BT, count in self.windows:
            self.update(x_BT, y_BT, 0.0, count)

    def parts(self) -> tuple[Step, Step, Step]:
        """Input end, encoder and output end, each alone, on the first piece."""
        model, piece = self.model, self.piece.to(self.world.device)
        state, plan = model.initial_state(len(piece.x)), piece.plan
        with torch.no_grad(), self._autocast():
            x_BTD = model.input(piece.x)
            h_BTD = model.encoder(x_BTD, state).output
        places_M = slice(None) if piece.places is None else piece.places
        y_M, h_MD = piece.y.reshape(-1)[places_M], h_BTD.flatten(0, 1)[places_M].clone().requires_grad_()
        x_BTD = x_BTD.clone().requires_grad_()
        grad_x_BTD, grad_h_BTD = torch.randn_like(x_BTD), torch.randn_like(h_BTD)

        def look_up() -> Tensor:
            with self._autocast():
                return torch.sum(model.input(piece.x) * grad_x_BTD)

        def encode() -> Tensor:
            with self._autocast():
                return torch.sum(model.encoder(x_BTD, state).output * grad_h_BTD)

        def score() -> Tensor:
            with self._autocast():
                losses = model.output.loss(h_MD, y_M, plan).values()
                return torch.stack([each.weight * each.sum for each in losses]).sum() / plan.count

        return (
            Step(look_up, list(model.input.parameters()), dict),
            Step(encode, [x_BTD, *model.encoder.parameters()], dict),
            Step(score, [h_MD, *model.output.parameters()], dict),
        )

    def _autocast(self) -> torch.autocast:
        dtype = PRODUCTS[self.settings.precision]
        return torch.autocast(self.world.device.type, dtype=dtype, enabled=dtype != torch.float32)


def measure_all(
    jobs: Sequence[Job], device: str, rates: Mapping[str, float], seconds: float, say: Callable[[str], None]
) -> Iterator[list[Row]]:
    """The rows of every job, one for each way to run it, as soon as they are measured.

    `rates`: by precision, how many operations a second the device makes in large products, where that is known.
    """
    first: dict[tuple[str, str], float | None] = {}
    for job in jobs:
        say(job.name)
        rate = rates.get(job.settings.precision)
        found = [_measure(job, mode, device, rate, seconds, say) for mode in job.modes(device)]
        for row in found:
            first.setdefault((job.text.corpus, row.mode), row.epoch_seconds)
        yield [
            replace(
                row,
                over_baseline=_over(row.epoch_seconds, found[0].epoch_seconds),
                over_first=_over(row.epoch_seconds, first[job.text.corpus, row.mode]),
            )
            for row in found
        ]


def _over(number: float | None, other: float | None) -> float | None:
    return None if number is None or other is None else number / other


def _measure(job: Job, mode: str, device: str, rate: float | None, seconds: float, say: Callable[[str], None]) -> Row:
    say(f"  {mode}")
    how = job.settings
    row = Row(job.name, mode, how.batching, how.batch, how.steps, how.accumulate, job.text.told)
    try:
        if device == "cuda":
            give_back()
        course = Course(job, mode, device)
        if mode == CAPTURED and not course.update.captured:
            raise Absent("a part of the model asks the device for a number, so there is nothing to capture")
        if device == "cuda":
            # Warming up counts too: while a graph is replayed, nothing is allocated that could be counted.
            torch.cuda.reset_peak_memory_stats()
        (spent,) = work_times(device, [(course.run, lambda: None)], seconds)
        speed, flops = (1e3 * each / median(spent) for each in (course.tokens, course.operations))
        row = replace(
            row,
            ms=median(spent) / len(course.windows),
            repeats=len(spent),
            tokens_per_second=speed,
            epoch_seconds=job.text.tokens / speed,
            memory_bytes=peak_memory_bytes(device) if device == "cuda" else None,
            flops=flops,
            matrix_share=_over(flops, rate),
        )
        whole = 1e3 * course.piece.plan.count / speed
        source, encoder, output = (_part_ms(part, mode, device, seconds) / whole for part in course.parts())
        return replace(row, input_share=source, encoder_share=encoder, output_share=output)
    except Exception as error:  # the run goes on
        return replace(row, note=reason(error))


def _part_ms(part: Step, mode: str, device: str, seconds: float) -> float:
    if mode == CAPTURED:
        return median(graph_times(part, seconds))
    (spent,) = times([part], device, seconds)
    return median(spent)
