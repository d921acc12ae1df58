"""One update: the gradients of a window, their clipping, the optimiser's step, the averages.

Nothing here waits for a GPU. What a log line or a decision needs is added up on the device until somebody asks, and an
update whose loss or gradient is not a number is not made, nor is any after it. In a process alone, an update is
captured as a CUDA graph the second time that its shapes come up, and replayed from then on: small models take longer to
launch than to run. Where no shapes come up again, or a part of the model asks the device for a number, nothing is.

Shapes: B streams, T steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from reefknot.encoders.contract import State, join_streams, select_streams
from reefknot.models.language_model import LanguageModel
from reefknot.outputs.contract import Plan, send
from reefknot.training.distributed import Window, World, quiet
from reefknot.training.settings import TrainingSettings
from reefknot.training.state import TrainState

GRAPHS = 128
"""Sets of shapes that are looked out for. A recipe has about forty where windows have random lengths; where an output
end's plan has another shape every time, there is no end of them, and nothing worth capturing."""


@dataclass(frozen=True)
class Piece:
    """Inputs, targets and plan of some of the streams."""

    x: Tensor
    y: Tensor
    plan: Plan

    def to(self, device: torch.device) -> Piece:
        return Piece(send(self.x, device), send(self.y, device), self.plan.to(device))

    def tensors(self) -> list[Tensor]:
        return [self.x, self.y, *self.plan.tensors()]

    def shapes(self) -> Hashable:
        """Everything but the values of its tensors."""
        return self.plan.map(_shape), _shape(self.x), _shape(self.y)


@dataclass(frozen=True)
class Report:
    """What the updates since the last report came to."""

    sums: dict[str, float]
    """Parts of the loss, this process's streams."""
    penalties: dict[str, float]
    """Of the last update."""
    nll: float
    """The summed loss of the last update, or of the first one that was refused."""
    gradient_norm: float
    """Likewise, before clipping."""
    refused: int
    """The first update that was not made because its loss or gradient is not a number; 0: none."""


class Tally:
    """What updates leave on the device until somebody asks: a few numbers, in as few kernels as can be."""

    def __init__(self, device: torch.device, step: int) -> None:
        self._step = torch.tensor(step, device=device)
        self._refused = torch.zeros_like(self._step)
        self.found_inf = torch.zeros((), device=device)
        """1 once an update was refused: what torch's fused optimisers read before they change a weight."""
        self._parts: list[str] = []
        self._penalties: list[str] = []
        self._sums, self._last = torch.zeros(2, 0, device=device).unbind()

    def add(self, norm: Tensor, sums: dict[str, Tensor], penalties: dict[str, Tensor]) -> None:
        parts, last = list(sums.values()), [*penalties.values(), sums["nll"], norm]
        numbers = torch.stack([each.detach().double() for each in (*parts, *last)])
        if not self._parts:
            self._parts, self._penalties = list(sums), list(penalties)
            self._sums, self._last = torch.zeros_like(numbers[: len(parts)]), torch.zeros_like(numbers[len(parts) :])
        self._sums += numbers[: len(parts)]
        # Once an update was refused, what it came to is what is told.
        already = self._refused > 0
        self._last.copy_(torch.where(already, self._last, numbers[len(parts) :]))
        self._step += 1
        self._refused.copy_(torch.where(already | numbers.isfinite().all(), self._refused, self._step))
        self.found_inf.copy_(self._refused > 0)

    def report(self) -> Report:
        """Wait for the device, tell, and begin anew."""
        *numbers, refused = torch.cat([self._sums, self._last, self._refused[None].double()]).tolist()
        self._sums.zero_()
        nll, norm = numbers[-2:] or (math.nan, math.nan)
        sums, penalties = numbers[: len(self._parts)], numbers[len(self._parts) : -2]
        named = dict(zip(self._parts, sums, strict=True)), dict(zip(self._penalties, penalties, strict=True))
        return Report(*named, nll, norm, int(refused))


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
        self.window = world.parallel(Window(model))
        self.tally = Tally(world.device, state.progress.step)
        self.at_once = world.device.type != "cuda"
        """Whether what an update found is known when it returns, and so worth looking at."""
        self.captured = settings.capture and not self.at_once and world.size == 1 and not model.input.waits
        self.forget()
        if not self.at_once:
            state.optimiser.found_inf = self.tally.found_inf  # type: ignore[attr-defined]

    def forget(self) -> None:
        """Capture anew: what an update does has changed."""
        self._graphs = Graphs(self._make, self.world.device) if self.captured else None

    def __call__(self, x_BT: Tensor, y_BT: Tensor, rate: float) -> int:
        """Train on a window. Returns how many targets it has."""
        size = len(x_BT) // self.settings.accumulate
        parts = [slice(start, start + size) for start in range(0, len(x_BT), size)]
        pieces = [Piece(x_BT[part], y_BT[part], self.model.output.prepare(y_BT[part])) for part in parts]
        for group in self.state.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):  # where a graph finds it
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self._graphs is None:
            self.state.hidden = self._make([piece.to(self.world.device) for piece in pieces], self.state.hidden)
        else:
            self.state.hidden = self._graphs(pieces, self.state.hidden)
        return sum(piece.plan.count for piece in pieces)

    def _make(self, pieces: Sequence[Piece], hidden: State) -> State:
        """The update itself; returns the state that follows."""
        optimiser = self.state.optimiser
        optimiser.zero_grad(set_to_none=True)
        sums, penalties, hidden = self._backward(pieces, hidden)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip or math.inf)
        self.tally.add(norm, sums, penalties)
        # On a GPU the optimiser looks at `found_inf` itself.
        if not self.at_once or not self.tally.found_inf:
            optimiser.step()
            if self.state.averages is not None:
                self.state.averages.update()
        return hidden

    def _backward(self, pieces: Sequence[Piece], hidden: State) -> tuple[dict[str, Tensor], dict[str, Tensor], State]:
        """The gradients of the pieces; the parts of their losses added up, the penalties, the state that follows."""
        count = sum(piece.plan.count for piece in pieces)
        streams = sum(len(piece.x) for piece in pieces)
        divisor = (streams if self.settings.divisor == "batch" else count) * self.world.size
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
                # Processes exchange gradients once per update, with the last piece.
                with nullcontext() if last else quiet(self.window):
                    with self._autocast():
                        loss_sum, parts, state, penalties = self.window(
                            piece.x, piece.y, select_streams(hidden, own), piece.plan
                        )
                    # Processes average their gradients, so each share of the sum is weighted by their number;
                    # penalties are the same in every process and enter once.
                    objective = loss_sum * (self.world.size / divisor)
                    if last and penalties:
                        objective = objective + torch.stack(list(penalties.values())).sum() / divisor
                    objective.backward()
                sums = {name: sums[name] + part if sums else part for name, part in parts.items()}
                states.append(state)
        return sums, penalties, join_streams(states)

    def _autocast(self) -> torch.autocast:
        enabled = self.settings.precision == "bfloat16"
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=enabled)


class Graphs:
    """Calls of a function captured as CUDA graphs, one for each set of shapes.

    Shapes that come up for the first time run as they are, which also warms up what must not be captured. What the
    function returns stands in the same tensors for all graphs: the state that one leaves, the next one finds.
    """

    def __init__(self, function: Callable[[Sequence[Piece], State], State], device: torch.device) -> None:
        self._function = function
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor]]] = {}
        self._hidden: State = {}

    def __call__(self, pieces: Sequence[Piece], hidden: State) -> State:
        around = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(around)
        with torch.cuda.stream(self._stream):
            if hidden is not self._hidden:
                self._hidden = self._hidden or {name: torch.empty_like(each) for name, each in hidden.items()}
                _copy(self._hidden, hidden)
            self._run(pieces)
        around.wait_stream(self._stream)
        return self._hidden

    def _run(self, pieces: Sequence[Piece]) -> None:
        shapes = tuple(piece.shapes() for piece in pieces)
        if shapes not in self._graphs and (shapes not in self._seen or len(self._seen) > GRAPHS):
            if len(self._seen) <= GRAPHS:
                self._seen.add(shapes)
            _copy(self._hidden, self._function([piece.to(self._device) for piece in pieces], self._hidden))
            return
        if shapes not in self._graphs:
            self._graphs[shapes] = self._captured(pieces)
        graph, places = self._graphs[shapes]
        given = [tensor for piece in pieces for tensor in piece.tensors()]
        for place, tensor in zip(places, given, strict=True):
            place.copy_(tensor.pin_memory(), non_blocking=True)
        graph.replay()

    def _captured(self, pieces: Sequence[Piece]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
        static = [piece.to(self._device) for piece in pieces]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            _copy(self._hidden, self._function(static, self._hidden))
        return graph, [tensor for piece in static for tensor in piece.tensors()]


def _copy(into: State, state: State) -> None:
    for name, tensor in state.items():
        into[name].copy_(tensor)


def _shape(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
