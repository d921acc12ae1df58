"""Whole training steps of a recipe's rows: `reefknot bench steps RECIPE`.

A step is what training makes of a window: lookup, encoder, output end, gradients, clipping, optimiser. Every row is
measured with the plain loop in place of cuDNN and of our recurrences, then as it is, then captured as a CUDA graph, all
in one run. The rate is 0: the same work, and weights that stay as they are. Averages are kept where a row keeps them
from its first step on.

Encoder and output end are also measured alone, forward and backward on the row's first window, captured where the step
is. Their shares are of the step's time; what is left is lookup, penalties, clipping and optimiser, and the host.

Shapes: B streams, T steps, D width, N = B x T rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.benchmarks.measure import Step, give_back, graph_times, reason, times, work_times
from reefknot.encoders.contract import Encoded, Encoder, State
from reefknot.kernels.choice import using
from reefknot.models.language_model import LanguageModel
from reefknot.parts import OPTIMISERS
from reefknot.text.streams import Streams
from reefknot.training.averaging import Averages
from reefknot.training.distributed import World
from reefknot.training.generators import seed_everything, set_determinism
from reefknot.training.settings import TrainingSettings
from reefknot.training.state import Progress, TrainState
from reefknot.training.update import Update

LOOP, EAGER, CAPTURED = "plain loop", "eager", "captured"
MODES = {"cuda": (LOOP, EAGER, CAPTURED), "cpu": (LOOP, EAGER)}
WINDOWS = {"cuda": 16, "cpu": 2}
"""Windows that are trained on again and again: several, since their lengths may be random."""
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
    inputs: NDArray[np.int32] | None = None
    """What the input end reads, where it has ids of its own."""

    @classmethod
    def random(cls, words: int, tokens: int, corpus: str) -> Text:
        """Words by Zipf's law, p(word v) proportional to 1 / (v + 1), in the place of a corpus that is not here."""
        unigram_V = 1.0 / np.arange(1, words + 1)
        draw = np.random.default_rng(0).random(min(tokens, LONGEST))
        ids = np.searchsorted(np.cumsum(unigram_V / unigram_V.sum()), draw)
        told = f"{corpus} is not here: random text of its {words:,} words; an epoch is its {tokens:,} tokens"
        return cls(np.minimum(ids, words - 1).astype(np.int32), tokens, told)


@dataclass(frozen=True)
class Job:
    """A row of a recipe: its name, how it is trained, how its model is built, and on what text."""

    name: str
    settings: TrainingSettings
    build: Callable[[], LanguageModel]
    text: Text


@dataclass(frozen=True)
class Row:
    """What was measured of one row in one way, or why nothing was."""

    row: str
    mode: str
    batch: int
    steps: int
    text: str
    ms: float | None = None
    """Per step, the median over passes."""
    repeats: int = 0
    tokens_per_second: float | None = None
    epoch_seconds: float | None = None
    encoder_share: float | None = None
    end_share: float | None = None
    over_loop: float | None = None
    """Seconds of an epoch over those of the same row with the plain loop."""
    over_first: float | None = None
    """Seconds of an epoch over those of the first row, measured the same way."""
    note: str = ""
    """Why something was not measured."""

    def record(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)


class Looped(Encoder):
    """An encoder without cuDNN and without our kernels: a loop over the steps, as everyone writes it."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.input_dim, self.dim = encoder.input_dim, encoder.dim

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        return self.encoder.initial_state(streams, device)

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        with using("reference"), torch.backends.cudnn.flags(enabled=False):
            encoded: Encoded = self.encoder(x_BTD, state)
        return encoded


class Course:
    """Some windows of a text, and a model that is trained on them as training does it."""

    def __init__(self, job: Job, mode: str, device: str) -> None:
        self.settings = job.settings.model_copy(update={"capture": mode == CAPTURED})
        self.world = World(device=torch.device(device))
        set_determinism(self.settings.determinism)
        seed_everything(self.settings.seed)
        self.model = job.build().to(self.world.device).train()
        if mode == LOOP:
            self.model.encoder = Looped(self.model.encoder)
        streams = Streams.of(self.settings, job.text.ids, job.text.inputs)
        self.windows = [streams.window(index) for index in range(min(WINDOWS[device], streams.windows))]
        optimiser = OPTIMISERS.build(self.settings.optimiser, {"parameters": list(self.model.parameters())})
        averages = Averages.at_once(self.model, self.settings.averaging)
        state = TrainState(self.model, optimiser, self.model.initial_state(self.settings.batch), Progress(), averages)
        self.update = Update(self.model, state, self.world, self.settings)

    @property
    def tokens(self) -> int:
        """Targets of all windows."""
        return sum(y_BT.numel() for _, y_BT in self.windows)

    @property
    def piece(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets that go through the model at once: the streams of a window that are not accumulated."""
        x_BT, y_BT = self.windows[0]
        streams = self.settings.batch // self.settings.accumulate
        return x_BT[:streams], y_BT[:streams]

    def run(self) -> None:
        """One pass over the windows."""
        for x_BT, y_BT in self.windows:
            self.update(x_BT, y_BT, 0.0)

    def parts(self) -> tuple[Step, Step]:
        """The encoder alone and the output end alone, on the first piece."""
        model, device = self.model, self.world.device
        x_BT, y_BT = self.piece
        state = model.initial_state(len(x_BT))
        plan, y_N = model.output.prepare(y_BT).to(device), y_BT.reshape(-1).to(device)
        with torch.no_grad(), self._autocast():
            x_BTD = model.input(x_BT.to(device))
            h_BTD = model.encoder(x_BTD, state).output
        x_BTD, h_ND = x_BTD.clone().requires_grad_(), h_BTD.flatten(0, 1).clone().requires_grad_()
        grad_BTD = torch.randn_like(h_BTD)

        def encode() -> Tensor:
            with self._autocast():
                return torch.sum(model.encoder(x_BTD, state).output * grad_BTD)

        def end() -> Tensor:
            with self._autocast():
                losses = model.output.loss(h_ND, y_N, plan).values()
                return torch.stack([each.weight * each.sum for each in losses]).sum() / plan.count

        encoder = Step(encode, [x_BTD, *model.encoder.parameters()], dict)
        return encoder, Step(end, [h_ND, *model.output.parameters()], dict)

    def _autocast(self) -> torch.autocast:
        enabled = self.settings.precision == "bfloat16"
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=enabled)


def measure_all(jobs: Sequence[Job], device: str, seconds: float, say: Callable[[str], None]) -> Iterator[list[Row]]:
    """The rows of every job, one for each way to run it, as soon as they are measured."""
    first: dict[str, float | None] = {}
    for job in jobs:
        say(job.name)
        found = [_measure(job, mode, device, seconds, say) for mode in MODES[device]]
        for row in found:
            first.setdefault(row.mode, row.epoch_seconds)
        loop = found[0].epoch_seconds
        yield [
            replace(row, over_loop=_over(row.epoch_seconds, loop), over_first=_over(row.epoch_seconds, first[row.mode]))
            for row in found
        ]


def _over(seconds: float | None, others: float | None) -> float | None:
    return None if seconds is None or others is None else seconds / others


def _measure(job: Job, mode: str, device: str, seconds: float, say: Callable[[str], None]) -> Row:
    say(f"  {mode}")
    row = Row(job.name, mode, job.settings.batch, job.settings.steps, job.text.told)
    try:
        if device == "cuda":
            give_back()
        course = Course(job, mode, device)
        (spent,) = work_times(device, [(course.run, lambda: None)], seconds)
        speed = 1e3 * course.tokens / median(spent)
        row = replace(
            row,
            ms=median(spent) / len(course.windows),
            repeats=len(spent),
            tokens_per_second=speed,
            epoch_seconds=job.text.tokens / speed,
        )
        whole = 1e3 * course.piece[1].numel() / speed
        encoder, end = (_part_ms(part, mode, device, seconds) / whole for part in course.parts())
        return replace(row, encoder_share=encoder, end_share=end)
    except Exception as error:  # the run goes on
        return replace(row, note=reason(error))


def _part_ms(part: Step, mode: str, device: str, seconds: float) -> float:
    if mode == CAPTURED:
        return median(graph_times(part, seconds))
    (spent,) = times([part], device, seconds)
    return median(spent)
