"""One update: the gradients of a training window, clipping, the optimiser step, and the averages.

Nothing here waits for a GPU. Numbers for log lines and decisions accumulate on the device until they are read. If the
loss or the gradient of an update is not finite, neither this update nor any later update is applied. float16 is less
strict, because torch's GradScaler raises the scale of the loss until a gradient overflows: such an update is skipped,
the scale is halved, and only many overflows in a row end training.

In a single process, an update is captured as a CUDA graph when its shapes occur for the second time, and is replayed
from then on, because the kernels of small models take longer to launch than to run. Lines differ in length. So that
shapes still repeat, the number of targets is a tensor, and the positions with a target are padded with positions
without one. Nothing is captured if shapes do not repeat, or if a part of the model reads a value from the device.

Shapes: B rows of a training window (streams, blocks, sentences or pairs), T steps, M of the B x T positions: those
with a target, and padding.
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

MAX_GRAPHS = 128
"""Maximum number of different shapes of an update that are tracked. A recipe with random window lengths has about
forty. If the plan of an output end has a different shape every time, capturing is not worth it."""
TARGET_BUCKETS = 16
"""Number of different sizes M. In a window with padding, the number of positions that the output end reads is rounded
up to the next sixteenth of all positions, so that shapes repeat."""
MAX_OVERFLOWS = 50
"""Number of skipped updates in a row that end training in float16. Every skipped update halves the scale of the loss,
so after this many the scale is not the cause of the overflow."""
AUTOCAST_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Data type of matrix products for each `training.precision`. Weights and their gradients are always float32."""


def carries_state(model: LanguageModel, settings: TrainingSettings) -> bool:
    """Return whether each training window continues from the hidden state of the previous window."""
    return settings.batching == "streams" and model.encoder.carries_state


def check_precision(model: LanguageModel, settings: TrainingSettings) -> None:
    """Raise an error if the precision is float16 and torch cannot train this encoder with it.

    Few CPUs support an LSTM in float16. Some of them compute its outputs but not its gradients, so the check includes
    a backward pass.
    """
    device = next(model.parameters()).device
    if settings.precision != "float16" or device.type != "cpu":
        return
    was_training = model.training
    model.train()
    try:
        # The check must not change the dropout masks of the run.
        with torch.random.fork_rng(devices=()), torch.autocast("cpu", dtype=torch.float16):
            x_BU, y_BT = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
            # A translator reads a source of one word before its target.
            result = model.target_log_probs(x_BU, y_BT)[0] if model.encoder.reads_source else model(y_BT).output
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            torch.autograd.grad(result.float().sum(), parameters, allow_unused=True)
    except RuntimeError as error:
        raise SettingsError(
            f"training.precision = float16: torch cannot train this {type(model.encoder).__name__} in float16 "
            "on a CPU; use bfloat16, or a GPU"
        ) from error
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class MicroBatch:
    """Inputs, targets and plan for some of the rows of a training window."""

    x: Tensor
    y: Tensor
    positions: Tensor | None
    """Indices (M,) of the B x T positions that the output end reads: all positions with a target, and padding.
    None for all positions."""
    plan: Plan

    @classmethod
    def split(cls, x_BT: Tensor, y_BT: Tensor, number: int, output: OutputEnd) -> list[Self]:
        """Split the rows of a training window into `number` micro-batches, or fewer if there are fewer rows.

        The tensors are on the host, so that finding the positions with a target does not wait for the device.
        """
        number = min(number, len(x_BT))
        xs, ys = x_BT.tensor_split(number), y_BT.tensor_split(number)
        flat = [y.reshape(-1) for y in ys]
        positions = [_output_positions(y_N) for y_N in flat]
        plans = output.prepare_micro_batches(
            [y_N if positions_M is None else y_N[positions_M] for y_N, positions_M in zip(flat, positions, strict=True)]
        )
        return [cls(*fields) for fields in zip(xs, ys, positions, plans, strict=True)]

    def map(self, function: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a micro-batch with `function` applied to each of its `tensors`, in their order."""
        x, y = function(self.x), function(self.y)
        positions_M = None if self.positions is None else function(self.positions)
        return MicroBatch(x, y, positions_M, self.plan.map(function))

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device."""
        return self.map(lambda tensor: send(tensor, device))

    def tensors(self) -> list[Tensor]:
        """Return all tensors, including those of the plan."""
        return [self.x, self.y, *([] if self.positions is None else [self.positions]), *self.plan.tensors()]

    def shapes(self) -> Hashable:
        """Return a key that is equal for micro-batches whose tensors have equal shapes and types."""
        positions = None if self.positions is None else _shape(self.positions)
        return replace(self.plan.map(_shape), count=0), _shape(self.x), _shape(self.y), positions


@dataclass(frozen=True)
class Report:
    """Results of the updates since the last report."""

    sums: dict[str, float]
    """Sums of the parts of the loss over the applied updates, for the rows of this process."""
    tokens: int
    """Number of targets of the applied updates, over all processes."""
    penalties: dict[str, float]
    """Penalties of the last applied update."""
    nll: float
    """Summed loss of the last applied update, or of the failed update."""
    gradient_norm: float
    """Norm of the gradient of the same update, before clipping."""
    failed_step: int
    """The step whose loss or gradient is not finite, which ends training; 0 if there is none."""
    skipped: int
    """Number of updates that were not applied."""
    skipped_in_a_row: int
    """Number of skipped updates since the last applied update."""


class Tally:
    """Accumulates the results of updates on the device, with few kernel launches, until they are reported."""

    def __init__(self, world: World, step: int, *, patience: int = 1, skipped_in_a_row: int = 0) -> None:
        """Create a tally after `step` updates.

        Args:
            world: The processes that train together.
            step: Number of updates so far.
            patience: Number of failed updates in a row that end training. If fewer updates fail in a row, they are
                skipped.
            skipped_in_a_row: Number of skipped updates since the last applied update.
        """
        self._world, self._patience = world, patience
        self._step = torch.tensor(step, device=world.device)
        self._failed_step, self._skipped, self._tokens = (torch.zeros_like(self._step) for _ in range(3))
        self._in_a_row = torch.full_like(self._step, skipped_in_a_row)
        self.found_inf = torch.zeros((), device=world.device)
        """1 if the current update must not be applied, because it or an earlier update has failed; otherwise 0. torch's
        fused optimisers read this tensor before they change a weight."""
        self._parts: list[str] = []
        self._penalties: list[str] = []
        self._sums, self._last = torch.zeros(2, 0, device=world.device).unbind()

    def add(self, norm: Tensor, sums: dict[str, Tensor], penalties: dict[str, Tensor], count: Tensor) -> None:
        """Add the results of an update and decide whether it is applied (`found_inf`)."""
        parts, last = list(sums.values()), [*penalties.values(), sums["nll"], norm]
        numbers = torch.stack([number.detach().double() for number in (*parts, *last)])
        if not self._parts:
            self._parts, self._penalties = list(sums), list(penalties)
            self._sums, self._last = torch.zeros_like(numbers[: len(parts)]), torch.zeros_like(numbers[len(parts) :])
        self._step += 1
        # The loss differs between processes, but all processes must make the same decision.
        finite = self._world.all(numbers.isfinite().all())
        self._skipped += ~finite
        self._in_a_row.copy_((self._in_a_row + 1) * ~finite)
        self._tokens += count * finite
        self._sums += torch.where(finite, numbers[: len(parts)], 0.0)
        # The report keeps the numbers of a failed update.
        failed, fails = self._failed_step > 0, self._in_a_row >= self._patience
        self._last.copy_(torch.where(~failed & (finite | fails), numbers[len(parts) :], self._last))
        self._failed_step.copy_(torch.where(~failed & fails, self._step, self._failed_step))
        self.found_inf.copy_(~finite | (self._failed_step > 0))

    def report(self) -> Report:
        """Wait for the device, return the accumulated results, and reset them."""
        counts = torch.stack([self._tokens, self._failed_step, self._skipped, self._in_a_row]).double()
        *numbers, tokens, failed_step, skipped, in_a_row = torch.cat([self._sums, self._last, counts]).tolist()
        for total in (self._sums, self._tokens, self._skipped):
            total.zero_()
        nll, norm = numbers[-2:] or (math.nan, math.nan)
        sums, penalties = numbers[: len(self._parts)], numbers[len(self._parts) : -2]
        return Report(
            sums=dict(zip(self._parts, sums, strict=True)),
            tokens=int(tokens),
            penalties=dict(zip(self._penalties, penalties, strict=True)),
            nll=nll,
            gradient_norm=norm,
            failed_step=int(failed_step),
            skipped=int(skipped),
            skipped_in_a_row=int(in_a_row),
        )


class Update:
    """Computes and applies the updates of a model, on the device of the model."""

    def __init__(
        self,
        model: LanguageModel,
        state: TrainState,
        world: World,
        settings: TrainingSettings,
    ) -> None:
        self.model, self.state, self.world, self.settings = model, state, world, settings
        self.parallel = state.parallel
        self.carries_state = carries_state(model, settings)
        self.tally = Tally(
            world,
            state.progress.step,
            patience=MAX_OVERFLOWS if settings.precision == "float16" else 1,
            skipped_in_a_row=state.progress.skipped_in_a_row,
        )
        self.synchronous = world.device.type != "cuda"
        """Whether the results of an update are known when the call returns, so that reading them is cheap."""
        synchronizes = model.input.synchronizes or model.encoder.synchronizes
        self.captured = settings.capture and not self.synchronous and world.size == 1 and not synchronizes
        self.reset_capture()
        if not self.synchronous:
            state.optimiser.found_inf = self.tally.found_inf  # type: ignore[attr-defined]

    def reset_capture(self) -> None:
        """Discard captured graphs, because the work of an update has changed."""
        self._replays = CapturedUpdates(self._make, self.world.device) if self.captured else None

    def __call__(self, x_BT: Tensor, y_BT: Tensor, rate: float, count: int) -> None:
        """Make one update on a training window.

        Args:
            x_BT: Inputs of this process's rows.
            y_BT: Targets of this process's rows.
            rate: Learning rate.
            count: Number of targets of the window, over all processes.
        """
        batches = MicroBatch.split(x_BT, y_BT, self.settings.accumulate, self.model.output)
        for group in self.state.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):  # captured graphs read this tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        targets = torch.tensor(count)
        if self._replays is None:
            device = self.world.device
            batches = [batch.to(device) for batch in batches]
            self.state.hidden = self._make(batches, self.state.hidden, send(targets, device))
        else:
            self.state.hidden = self._replays(batches, self.state.hidden, targets)

    def _make(self, batches: Sequence[MicroBatch], hidden: State, count: Tensor) -> State:
        """Compute and apply an update, and return the next hidden state."""
        optimiser, scaler = self.state.optimiser, self.state.scaler
        optimiser.zero_grad(set_to_none=True)
        sums, penalties, hidden = self._backward(batches, hidden, count)
        scaler.unscale_(optimiser)
        norm = self.parallel.clip(self.settings.clip)
        self.tally.add(norm, sums, penalties, count)
        # On a GPU, the optimiser itself reads `found_inf`.
        if not self.synchronous or not self.tally.found_inf:
            optimiser.step()
        scaler.update()
        if self.state.averages is not None:
            self.state.averages.update(1.0 - self.tally.found_inf)
        return hidden

    def _backward(
        self, batches: Sequence[MicroBatch], hidden: State, count: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], State]:
        """Accumulate the gradients of micro-batches.

        Returns:
            The summed parts of the losses, the penalties, and the next hidden state.
        """
        rows = sum(len(batch.x) for batch in batches)
        divisor = torch.full_like(count, rows * self.world.size) if self.settings.divisor == "batch" else count
        sums: dict[str, Tensor] = {}
        penalties: dict[str, Tensor] = {}
        states: list[State] = []
        start = 0
        with self.model.output.cache_for_step() as join:
            for number, batch in enumerate(batches):
                streams = slice(start, start + len(batch.x))
                start = streams.stop
                last = number == len(batches) - 1
                if last:
                    join()
                # Replicas of a model exchange gradients only once per update, after the last micro-batch.
                with nullcontext() if last else self.parallel.no_sync():
                    with autocast(self.world.device, self.settings.precision):
                        before = select_streams(hidden, streams) if self.carries_state else None
                        loss_sum, parts, state, penalties = self.parallel.window(
                            batch.x, batch.y, before, batch.plan, batch.positions
                        )
                    # Gradients are averaged over the processes, so the loss is multiplied by their number. Penalties
                    # are the same in every process, so they are not.
                    objective = loss_sum * (self.world.size / divisor.double()).to(loss_sum.dtype)
                    if last and penalties:
                        objective = objective + torch.stack(list(penalties.values())).sum() / divisor
                    self.state.scaler.scale(objective).backward()
                sums = {name: sums[name] + part if sums else part for name, part in parts.items()}
                states.append(state)
        return sums, penalties, join_streams(states) if self.carries_state else {}


class CapturedUpdates:
    """Replays updates as CUDA graphs when their shapes occur again.

    All graphs read the hidden state from the same tensors and write the next state to them, so that a window of any
    length can follow a window of any other length.
    """

    def __init__(self, make: Callable[[Sequence[MicroBatch], State, Tensor], State], device: torch.device) -> None:
        """Create a cache of graphs.

        Args:
            make: Function that makes an update. It is called with the micro-batches, the hidden state and the number of
                targets, and returns the next hidden state.
            device: The device of the model.
        """
        self._make = make
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._steps: RepeatedSteps[None] = RepeatedSteps(device, MAX_GRAPHS)
        self._hidden: State = {}

    def __call__(self, batches: Sequence[MicroBatch], hidden: State, count: Tensor) -> State:
        with side_stream(self._device, self._stream):
            if hidden is not self._hidden:
                self._hidden = self._hidden or {name: torch.empty_like(tensor) for name, tensor in hidden.items()}
                overwrite(self._hidden, hidden)
            shapes = tuple(batch.shapes() for batch in batches)
            inputs = [count, *(tensor for batch in batches for tensor in batch.tensors())]
            self._steps(shapes, partial(self._step, batches), inputs)
        return self._hidden

    def _step(self, batches: Sequence[MicroBatch], count: Tensor, *tensors: Tensor) -> None:
        """Apply an update to the micro-batches, with `tensors` in place of their tensors."""
        replacements = iter(tensors)
        batches = [batch.map(lambda _: next(replacements)) for batch in batches]
        overwrite(self._hidden, self._make(batches, self._hidden, count))


def _output_positions(y_N: Tensor) -> Tensor | None:
    """Return the positions that the output end reads, or None if all positions have a target.

    The positions with a target come first, in their order. They are padded with positions without a target up to a
    multiple of the bucket size.
    """
    has_target_N = y_N != IGNORE
    if has_target_N.all():
        return None
    bucket = -(-len(y_N) // TARGET_BUCKETS)
    padded = -(-int(has_target_N.sum()) // bucket) * bucket
    return has_target_N.argsort(descending=True, stable=True)[:padded]


def _shape(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
