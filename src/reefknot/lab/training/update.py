"""One update: the gradients of a window, their clipping, the optimiser's step, the averages.

Nothing here waits for a GPU. What a log line or a decision needs is added up on the device until somebody asks, and an
update whose loss or gradient is not a number is not made, nor is any after it. In float16 that is too strict, since the
loss is scaled up until a gradient overflows (torch's GradScaler): there such an update is left out, the scale is
halved, and only many in a row end training.

In a process alone, an update is captured as a CUDA graph the second time that its shapes come up, and replayed from
then on: small models take longer to launch than to run. So that shapes come up again where lines have any length, the
number of targets is a tensor, and places that have none fill up those that have one. Where no shapes come up again, or
a part of the model asks the device for a number, nothing is captured.

Shapes: B rows of a window (streams, blocks, sentences or pairs), T steps, M of the B x T places: those that have a
target, and some more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.capture import RepeatedSteps, send, side_stream
from reefknot.kernels.scores import IGNORE
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.training.distributed import World
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.state import TrainState
from reefknot.nn.encoders.contract import State, join_streams, overwrite, select_streams
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.contract import OutputEnd, Plan

GRAPHS = 128
"""Sets of shapes that are looked out for. A recipe has about forty where windows have random lengths; where an output
end's plan has another shape every time, there is no end of them, and nothing worth capturing."""
PARTS = 16
"""Of a window with padding: places reach the output end in sixteenths of them all, so that there are few numbers of
them."""
OVERFLOWS = 50
"""Updates in a row that float16 may leave out. The scale is halved with each: what still overflows is no longer the
scale's doing."""
PRODUCTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What products are made in, by `training.precision`; weights and their gradients are float32 in all."""


def carries(model: LanguageModel, settings: TrainingSettings) -> bool:
    """Whether a window goes on from the state that the last one left; if not, each begins with the initial one."""
    return settings.batching == "streams" and model.encoder.carries


def check_precision(model: LanguageModel, settings: TrainingSettings) -> None:
    """Reject float16 if torch cannot train this encoder with it. Few CPUs have an LSTM in float16, and some of those
    compute its outputs but not its gradients, so the check includes a backward pass."""
    device = next(model.parameters()).device
    if settings.precision != "float16" or device.type != "cpu":
        return
    was_training = model.training
    model.train()
    try:
        # The dropout masks drawn here must not change those of the run.
        with torch.random.fork_rng(devices=()), torch.autocast("cpu", dtype=torch.float16):
            x_BU, y_BT = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
            # A translator finds a source of one word before its target.
            result = model.target_log_probs(x_BU, y_BT)[0] if model.encoder.reads_source else model(y_BT).output
            parameters = [each for each in model.parameters() if each.requires_grad]
            torch.autograd.grad(result.float().sum(), parameters, allow_unused=True)
    except RuntimeError as error:
        raise SettingsError(
            f"training.precision = float16: torch cannot compute this {type(model.encoder).__name__} with it on a CPU; "
            "use bfloat16, or a GPU"
        ) from error
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class Piece:
    """Inputs, targets and plan of some of the rows of a window."""

    x: Tensor
    y: Tensor
    places: Tensor | None
    """Which of the B x T reach the output end, (M,): all that have a target; None: all."""
    plan: Plan

    @classmethod
    def cut(cls, x_BT: Tensor, y_BT: Tensor, number: int, output: OutputEnd) -> list[Self]:
        """The rows of a window in so many pieces, fewer where there are fewer rows. Made on the host: nobody has to ask
        the device which places have a target."""
        number = min(number, len(x_BT))
        xs, ys = x_BT.tensor_split(number), y_BT.tensor_split(number)
        flat = [y.reshape(-1) for y in ys]
        places = [_places(y_N) for y_N in flat]
        plans = output.prepare_micro_batches(
            [y_N if at_M is None else y_N[at_M] for y_N, at_M in zip(flat, places, strict=True)]
        )
        return [cls(*piece) for piece in zip(xs, ys, places, plans, strict=True)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Piece:
        """The same piece with another tensor for each of `tensors`, in their order."""
        x, y = function(self.x), function(self.y)
        places_M = None if self.places is None else function(self.places)
        return Piece(x, y, places_M, self.plan.map(function))

    def to(self, device: torch.device) -> Piece:
        return self.map(lambda tensor: send(tensor, device))

    def tensors(self) -> list[Tensor]:
        return [self.x, self.y, *([] if self.places is None else [self.places]), *self.plan.tensors()]

    def shapes(self) -> Hashable:
        """Everything but the values of its tensors, and how many of them are targets."""
        places = None if self.places is None else _shape(self.places)
        return replace(self.plan.map(_shape), count=0), _shape(self.x), _shape(self.y), places


@dataclass(frozen=True)
class Report:
    """What the updates since the last report came to."""

    sums: dict[str, float]
    """Parts of the loss over the updates that were made, this process's rows."""
    tokens: int
    """Targets of those updates, of all processes."""
    penalties: dict[str, float]
    """Of the last update that was made."""
    nll: float
    """The summed loss of the last update that was made, or of the one that was refused."""
    gradient_norm: float
    """Likewise, before clipping."""
    refused: int
    """The first update whose loss or gradient is not a number, and with which training ends; 0: none."""
    skipped: int
    """Updates that were left out."""
    skipped_in_a_row: int
    """Of them, those since the last one that was made."""


class Tally:
    """What updates leave on the device until somebody asks: a few numbers, in as few kernels as can be."""

    def __init__(self, world: World, step: int, *, patience: int = 1, skipped_in_a_row: int = 0) -> None:
        """`patience`: how many updates in a row must fail for training to end; one that fails alone is left out."""
        self._world, self._patience = world, patience
        self._step = torch.tensor(step, device=world.device)
        self._refused, self._skipped, self._tokens = (torch.zeros_like(self._step) for _ in range(3))
        self._in_a_row = torch.full_like(self._step, skipped_in_a_row)
        self.found_inf = torch.zeros((), device=world.device)
        """1 where the update is not to be made, and once one was refused: what torch's fused optimisers read before
        they change a weight."""
        self._parts: list[str] = []
        self._penalties: list[str] = []
        self._sums, self._last = torch.zeros(2, 0, device=world.device).unbind()

    def add(self, norm: Tensor, sums: dict[str, Tensor], penalties: dict[str, Tensor], count: Tensor) -> None:
        parts, last = list(sums.values()), [*penalties.values(), sums["nll"], norm]
        numbers = torch.stack([each.detach().double() for each in (*parts, *last)])
        if not self._parts:
            self._parts, self._penalties = list(sums), list(penalties)
            self._sums, self._last = torch.zeros_like(numbers[: len(parts)]), torch.zeros_like(numbers[len(parts) :])
        self._step += 1
        # A loss is each process's own, but all make an update or none does.
        sound = self._world.agreed(numbers.isfinite().all())
        self._skipped += ~sound
        self._in_a_row.copy_((self._in_a_row + 1) * ~sound)
        self._tokens += count * sound
        self._sums += torch.where(sound, numbers[: len(parts)], 0.0)
        # Once an update was refused, what it came to is what is told.
        already, ends = self._refused > 0, self._in_a_row >= self._patience
        self._last.copy_(torch.where(~already & (sound | ends), numbers[len(parts) :], self._last))
        self._refused.copy_(torch.where(~already & ends, self._step, self._refused))
        self.found_inf.copy_(~sound | (self._refused > 0))

    def report(self) -> Report:
        """Wait for the device, tell, and begin anew."""
        counts = torch.stack([self._tokens, self._refused, self._skipped, self._in_a_row]).double()
        *numbers, tokens, refused, skipped, in_a_row = torch.cat([self._sums, self._last, counts]).tolist()
        for each in (self._sums, self._tokens, self._skipped):
            each.zero_()
        nll, norm = numbers[-2:] or (math.nan, math.nan)
        sums, penalties = numbers[: len(self._parts)], numbers[len(self._parts) : -2]
        return Report(
            sums=dict(zip(self._parts, sums, strict=True)),
            tokens=int(tokens),
            penalties=dict(zip(self._penalties, penalties, strict=True)),
            nll=nll,
            gradient_norm=norm,
            refused=int(refused),
            skipped=int(skipped),
            skipped_in_a_row=int(in_a_row),
        )


class Update:
    """Makes one update after the other, on whatever device the model is."""

    def __init__(
        self,
        model: LanguageModel,
        state: TrainState,
        world: World,
        settings: TrainingSettings,
    ) -> None:
        self.model, self.state, self.world, self.settings = model, state, world, settings
        self.parallel = state.parallel
        self.carries = carries(model, settings)
        self.tally = Tally(
            world,
            state.progress.step,
            patience=OVERFLOWS if settings.precision == "float16" else 1,
            skipped_in_a_row=state.progress.skipped_in_a_row,
        )
        self.at_once = world.device.type != "cuda"
        """Whether what an update found is known when it returns, and so worth looking at."""
        waits = model.input.waits or model.encoder.waits
        self.captured = settings.capture and not self.at_once and world.size == 1 and not waits
        self.forget()
        if not self.at_once:
            state.optimiser.found_inf = self.tally.found_inf  # type: ignore[attr-defined]

    def forget(self) -> None:
        """Capture anew: what an update does has changed."""
        self._replays = CapturedUpdates(self._make, self.world.device) if self.captured else None

    def __call__(self, x_BT: Tensor, y_BT: Tensor, rate: float, count: int) -> None:
        """Train on a window; `count` is how many targets it has in all processes together."""
        pieces = Piece.cut(x_BT, y_BT, self.settings.accumulate, self.model.output)
        for group in self.state.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):  # where a graph finds it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        targets = torch.tensor(count)
        if self._replays is None:
            device = self.world.device
            pieces = [piece.to(device) for piece in pieces]
            self.state.hidden = self._make(pieces, self.state.hidden, send(targets, device))
        else:
            self.state.hidden = self._replays(pieces, self.state.hidden, targets)

    def _make(self, pieces: Sequence[Piece], hidden: State, count: Tensor) -> State:
        """The update itself; returns the state that follows."""
        optimiser, scaler = self.state.optimiser, self.state.scaler
        optimiser.zero_grad(set_to_none=True)
        sums, penalties, hidden = self._backward(pieces, hidden, count)
        scaler.unscale_(optimiser)
        norm = self.parallel.clip(self.settings.clip)
        self.tally.add(norm, sums, penalties, count)
        # On a GPU the optimiser looks at `found_inf` itself.
        if not self.at_once or not self.tally.found_inf:
            optimiser.step()
        scaler.update()
        if self.state.averages is not None:
            self.state.averages.update(1.0 - self.tally.found_inf)
        return hidden

    def _backward(
        self, pieces: Sequence[Piece], hidden: State, count: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], State]:
        """The gradients of the pieces; the parts of their losses added up, the penalties, the state that follows."""
        rows = sum(len(piece.x) for piece in pieces)
        divisor = torch.full_like(count, rows * self.world.size) if self.settings.divisor == "batch" else count
        sums: dict[str, Tensor] = {}
        penalties: dict[str, Tensor] = {}
        states: list[State] = []
        start = 0
        with self.model.output.sharing() as join:
            for number, piece in enumerate(pieces):
                own = slice(start, start + len(piece.x))
                start = own.stop
                last = number == len(pieces) - 1
                if last:
                    join()
                # Copies of a model exchange gradients once per update, with the last piece.
                with nullcontext() if last else self.parallel.quiet():
                    with autocast(self.world.device, self.settings.precision):
                        before = select_streams(hidden, own) if self.carries else None
                        loss_sum, parts, state, penalties = self.parallel.window(
                            piece.x, piece.y, before, piece.plan, piece.places
                        )
                    # Processes average their gradients, so each share of the sum is weighted by their number;
                    # penalties are the same in every process and enter once.
                    objective = loss_sum * (self.world.size / divisor.double()).to(loss_sum.dtype)
                    if last and penalties:
                        objective = objective + torch.stack(list(penalties.values())).sum() / divisor
                    self.state.scaler.scale(objective).backward()
                sums = {name: sums[name] + part if sums else part for name, part in parts.items()}
                states.append(state)
        return sums, penalties, join_streams(states) if self.carries else {}


class CapturedUpdates:
    """Replays updates as CUDA graphs when their shapes come up again.

    All graphs read the hidden state from the same tensors and leave the next state there, so that a window of one
    length can follow a window of another.
    """

    def __init__(self, make: Callable[[Sequence[Piece], State, Tensor], State], device: torch.device) -> None:
        """`make` makes an update from pieces, hidden state and count, and returns the state that follows."""
        self._make = make
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._steps: RepeatedSteps[None] = RepeatedSteps(device, GRAPHS)
        self._hidden: State = {}

    def __call__(self, pieces: Sequence[Piece], hidden: State, count: Tensor) -> State:
        with side_stream(self._device, self._stream):
            if hidden is not self._hidden:
                self._hidden = self._hidden or {name: torch.empty_like(tensor) for name, tensor in hidden.items()}
                overwrite(self._hidden, hidden)
            shapes = tuple(piece.shapes() for piece in pieces)
            inputs = [count, *(tensor for piece in pieces for tensor in piece.tensors())]
            self._steps(shapes, partial(self._step, pieces), inputs)
        return self._hidden

    def _step(self, pieces: Sequence[Piece], count: Tensor, *tensors: Tensor) -> None:
        """Make an update on pieces that have these tensors in place of their own."""
        replacements = iter(tensors)
        pieces = [piece.map(lambda _: next(replacements)) for piece in pieces]
        overwrite(self._hidden, self._make(pieces, self._hidden, count))


def _places(y_N: Tensor) -> Tensor | None:
    """The places with a target, in their order, and then as many without as fill up the last of `PARTS` parts; None:
    all have one."""
    there_N = y_N != IGNORE
    if there_N.all():
        return None
    part = -(-len(y_N) // PARTS)
    return there_N.argsort(descending=True, stable=True)[: -(-int(there_N.sum()) // part) * part]


def _shape(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
