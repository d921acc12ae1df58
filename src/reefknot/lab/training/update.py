"""Make one training update: compute the gradients of a window, clip them and step the optimiser.

    updater = Updater(model, state, world, settings)
    updater(inputs_BT, targets_BT, learning_rate, num_targets)    # once for every training window
    report = updater.stats.report()                               # losses and gradient norms, for the log

Start reading at `Updater.__call__`. A training window is the part of the text that one update reads. It is split into
micro-batches. Their gradients are added up and clipped before the optimiser makes its step.

Terms: a row is one sequence of a window (a stream, a block, a sentence or a pair). The output end is the classifier
with its loss. A plan is what the output end computes from the targets on the host, before they go to the device.

Shapes: B rows, T steps, N = B x T positions, M of the N positions: those with a target, and padding. For a translator,
U = S + T steps of a source and its target.
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
from reefknot.kernels.small import general_kernels
from reefknot.lab.evaluation.perplexity import autocast
from reefknot.lab.training.compilation import CompiledBlocks
from reefknot.lab.training.distributed import WindowResult, World
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.state import TrainState
from reefknot.nn.encoders.contract import State, join_streams, overwrite, select_streams
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.contract import OutputEnd, Plan

MAX_GRAPHS = 128
"""Maximum number of different shapes of an update for which CUDA graphs are kept. A recipe with random window lengths
has about forty. If the plan of an output end has a different shape every time, capturing is not worth it."""
TARGET_BUCKETS = 16
"""Number of different sizes M. In a window with padding, the number of positions that the output end reads is rounded
up to the next sixteenth of all positions, so that shapes repeat."""
MAX_OVERFLOWS = 50
"""Number of skipped updates in a row that end training in float16. Every skipped update halves the scale of the loss,
so after this many the scale is not the cause of the overflow."""
AUTOCAST_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Data type of matrix products for each `training.precision`. Weights and their gradients are always float32."""


class Updater:
    """Computes and applies the updates of a model, on the device of the model.

    Four things differ from a textbook training loop:

    - Nothing here waits for a GPU. Results accumulate on the device until the training loop reads them.
    - An update whose loss or gradient is not finite is not applied (`UpdateStats`).
    - On a GPU, updates whose shapes repeat are replayed as CUDA graphs (`CapturedUpdates`).
    - The blocks of a transformer may be compiled (`CompiledBlocks`).
    """

    def __init__(
        self,
        model: LanguageModel,
        state: TrainState,
        world: World,
        settings: TrainingSettings,
    ) -> None:
        self.model = model
        self.state = state
        self.world = world
        self.settings = settings
        self.parallel = state.parallel
        self.carries_state = carries_state(model, settings)

        patience = MAX_OVERFLOWS if settings.precision == "float16" else 1
        self.stats = UpdateStats(
            world, state.progress.step, patience=patience, skipped_in_a_row=state.progress.skipped_in_a_row
        )
        self.synchronous = world.device.type != "cuda"
        """Whether the results of an update are known when the call returns, so that reading them is cheap."""
        if not self.synchronous:
            # torch's fused optimisers read this tensor.
            state.optimiser.found_inf = self.stats.found_inf  # type: ignore[attr-defined]

        self.compiled_blocks = CompiledBlocks(model, settings, world)
        # A graph cannot be captured while a part of the model reads a value from the device.
        reads_device = model.input.synchronizes or model.encoder.synchronizes
        self.uses_graphs = settings.capture and not self.synchronous and world.size == 1 and not reads_device
        self.reset_capture()

    def reset_capture(self) -> None:
        """Discard captured graphs, because the work of an update has changed."""
        self._captured: CapturedUpdates | None = None
        if self.uses_graphs:
            self._captured = CapturedUpdates(self._apply_update, self.world.device)

    def __call__(self, inputs_BT: Tensor, targets_BT: Tensor, learning_rate: float, num_targets: int) -> None:
        """Make one update on a training window.

        Args:
            inputs_BT: Inputs of this process's rows.
            targets_BT: Targets of this process's rows.
            learning_rate: Learning rate.
            num_targets: Number of targets of the window, over all processes.
        """
        batches = MicroBatch.split(inputs_BT, targets_BT, self.settings.accumulate, self.model.output)
        self._set_learning_rate(learning_rate)
        target_count = torch.tensor(num_targets)
        if self._captured is None:
            device = self.world.device
            batches = [batch.to(device) for batch in batches]
            self.state.hidden = self._apply_update(batches, self.state.hidden, send(target_count, device))
        else:
            self.state.hidden = self._captured(batches, self.state.hidden, target_count)

    def _set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of all parameter groups."""
        for group in self.state.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):  # captured graphs read this tensor
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def _apply_update(self, batches: Sequence[MicroBatch], hidden: State, target_count: Tensor) -> State:
        """Compute and apply an update, and return the next hidden state.

        Args:
            batches: The micro-batches of the window, on the device.
            hidden: The hidden state before the window.
            target_count: Number of targets of the window, over all processes, as a scalar tensor.
        """
        optimiser = self.state.optimiser
        scaler = self.state.scaler

        # Compute the gradient.
        optimiser.zero_grad(set_to_none=True)
        part_sums, penalties, next_hidden = self._backward(batches, hidden, target_count)
        scaler.unscale_(optimiser)
        norm = self.parallel.clip_gradients(self.settings.clip)

        # Apply it, unless the loss or the gradient is not finite.
        self.stats.add(norm, part_sums, penalties, target_count)
        # On a GPU, the optimiser itself reads `found_inf`.
        if not self.synchronous or not self.stats.found_inf:
            optimiser.step()
        scaler.update()
        if self.state.averages is not None:
            self.state.averages.update(1.0 - self.stats.found_inf)
        return next_hidden

    def _backward(
        self, batches: Sequence[MicroBatch], hidden: State, target_count: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], State]:
        """Accumulate the gradients of micro-batches.

        Returns:
            The sums of the parts of the loss, the penalties, and the next hidden state.
        """
        divisor = self._loss_divisor(batches, target_count)
        part_sums: dict[str, Tensor] = {}
        penalties: dict[str, Tensor] = {}
        next_states: list[State] = []
        first_row = 0
        # The output end computes its class vectors once for all micro-batches.
        with self.model.output.cache_for_step() as announce_last:
            for index, batch in enumerate(batches):
                # The hidden state of the rows of this micro-batch.
                end_row = first_row + len(batch.inputs)
                previous_state = None
                if self.carries_state:
                    previous_state = select_streams(hidden, slice(first_row, end_row))
                first_row = end_row

                is_last = index == len(batches) - 1
                if is_last:
                    announce_last()
                # Replicas of a model exchange gradients only once per update, after the last micro-batch.
                with nullcontext() if is_last else self.parallel.no_sync():
                    result = self._backward_one(batch, previous_state, divisor, add_penalties=is_last)

                if part_sums:
                    part_sums = {name: part_sums[name] + part for name, part in result.part_sums.items()}
                else:
                    part_sums = result.part_sums
                penalties = result.penalties
                next_states.append(result.next_state)

        next_hidden: State = {}
        if self.carries_state:
            next_hidden = join_streams(next_states)
        return part_sums, penalties, next_hidden

    def _loss_divisor(self, batches: Sequence[MicroBatch], target_count: Tensor) -> Tensor:
        """Return the number by which the summed loss is divided: of targets or of rows, over all processes."""
        if self.settings.divisor != "batch":
            return target_count
        num_rows = sum(len(batch.inputs) for batch in batches)
        return torch.full_like(target_count, num_rows * self.world.size)

    def _backward_one(
        self, batch: MicroBatch, previous_state: State | None, divisor: Tensor, add_penalties: bool
    ) -> WindowResult:
        """Add the gradients of one micro-batch, and return the result of its forward pass."""
        device = self.world.device
        with (
            autocast(device, self.settings.precision),
            self.compiled_blocks.use(batch.inputs.shape),
            general_kernels(),  # an update has the same bits whether or not it is captured
        ):
            result: WindowResult = self.parallel.loss_module(
                batch.inputs, batch.targets, previous_state, batch.plan, batch.positions
            )
        # Gradients are averaged over the processes, so the loss is multiplied by their number. Penalties are the same
        # in every process, so they are not.
        loss_factor = self.world.size / divisor.double()
        objective = result.loss_sum * loss_factor.to(result.loss_sum.dtype)
        if add_penalties and result.penalties:
            penalty_sum = torch.stack(list(result.penalties.values())).sum()
            objective = objective + penalty_sum / divisor
        scaled_objective = self.state.scaler.scale(objective)
        scaled_objective.backward()  # type: ignore[no-untyped-call]
        # Detach the sum, so that the graph of this micro-batch does not live on during the next micro-batch.
        return result._replace(loss_sum=result.loss_sum.detach())


@dataclass(frozen=True)
class MicroBatch:
    """Inputs, targets and plan for some of the rows of a training window."""

    inputs: Tensor
    """Input ids, with shape (B, T)."""
    targets: Tensor
    """Target ids, with shape (B, T)."""
    positions: Tensor | None
    """Indices, with shape (M,), of the positions that the output end reads: all positions with a target, and padding.
    None for all positions."""
    plan: Plan

    @classmethod
    def split(cls, inputs_BT: Tensor, targets_BT: Tensor, max_batches: int, output: OutputEnd) -> list[Self]:
        """Split the rows of a training window into `max_batches` micro-batches, or fewer if there are fewer rows.

        The tensors are on the host, so that finding the positions with a target does not wait for the device.
        """
        num_batches = min(max_batches, len(inputs_BT))
        all_inputs = inputs_BT.tensor_split(num_batches)
        all_targets = targets_BT.tensor_split(num_batches)

        # Find the positions that the output end reads, and compute its plans for them.
        all_positions: list[Tensor | None] = []
        targets_to_read: list[Tensor] = []
        for batch_targets_BT in all_targets:
            targets_N = batch_targets_BT.reshape(-1)
            positions_M = _output_positions(targets_N)
            all_positions.append(positions_M)
            if positions_M is None:
                targets_to_read.append(batch_targets_BT)
            else:
                targets_to_read.append(targets_N[positions_M])
        plans = output.prepare_micro_batches(targets_to_read)

        batches = []
        for inputs, targets, positions, plan in zip(all_inputs, all_targets, all_positions, plans, strict=True):
            batches.append(cls(inputs=inputs, targets=targets, positions=positions, plan=plan))
        return batches

    def map(self, function: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return a micro-batch with `function` applied to each of its `tensors`, in their order."""
        inputs = function(self.inputs)
        targets = function(self.targets)
        positions = None
        if self.positions is not None:
            positions = function(self.positions)
        plan = self.plan.map(function)
        return MicroBatch(inputs=inputs, targets=targets, positions=positions, plan=plan)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy on a device."""
        return self.map(partial(send, device=device))

    def tensors(self) -> list[Tensor]:
        """Return all tensors, including those of the plan."""
        tensors = [self.inputs, self.targets]
        if self.positions is not None:
            tensors.append(self.positions)
        return tensors + self.plan.tensors()

    def shape_key(self) -> Hashable:
        """Return a key that is equal for micro-batches whose tensors have equal shapes and types."""
        positions_shape = None if self.positions is None else _shape_and_dtype(self.positions)
        # The plan with shapes in place of its tensors. Its count may differ, because graphs read it from a tensor.
        plan_shapes = replace(self.plan.map(_shape_and_dtype), count=0)
        return plan_shapes, _shape_and_dtype(self.inputs), _shape_and_dtype(self.targets), positions_shape


@dataclass(frozen=True)
class UpdateReport:
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


class UpdateStats:
    """Accumulates the results of updates on the device, with few kernel launches, until they are reported.

    It also decides whether an update is applied: `found_inf` is 1 if the optimiser must skip its step. If the loss or
    the gradient of an update is not finite, neither this update nor any later update is applied. In float16, such
    updates are expected, because torch's GradScaler raises the scale of the loss until a gradient overflows. They are
    skipped, and only `patience` of them in a row end training.
    """

    def __init__(self, world: World, step: int, *, patience: int = 1, skipped_in_a_row: int = 0) -> None:
        """Start to count after `step` updates.

        Args:
            world: The processes that train together.
            step: Number of updates so far.
            patience: Number of failed updates in a row that end training. If fewer updates fail in a row, they are
                skipped.
            skipped_in_a_row: Number of skipped updates since the last applied update.
        """
        self._world = world
        self._patience = patience
        self._step = torch.tensor(step, device=world.device)
        self._failed_step = torch.zeros_like(self._step)
        self._skipped = torch.zeros_like(self._step)
        self._tokens = torch.zeros_like(self._step)
        self._skipped_in_a_row = torch.full_like(self._step, skipped_in_a_row)
        self.found_inf = torch.zeros((), device=world.device)
        """1 if the current update must not be applied, because it or an earlier update has failed; otherwise 0. torch's
        fused optimisers read this tensor before they change a weight."""
        self._part_names: list[str] = []
        self._penalty_names: list[str] = []
        # `_sums` has the sums of the parts of the loss. `_latest` has the penalties, the loss and the gradient norm of
        # the latest update. `add` sets their sizes.
        self._sums = torch.zeros(0, device=world.device)
        self._latest = torch.zeros(0, device=world.device)

    def add(
        self, norm: Tensor, part_sums: dict[str, Tensor], penalties: dict[str, Tensor], target_count: Tensor
    ) -> None:
        """Add the results of an update and decide whether it is applied (`found_inf`).

        Args:
            norm: Norm of the gradient.
            part_sums: Sums of the parts of the loss, by name. The part `nll` is always present.
            penalties: Penalties, by name.
            target_count: Number of targets of the update, over all processes.
        """
        # One tensor for all results, because every operation is a kernel launch. Decisions are tensors too (0 or 1),
        # because `if` would wait for the device.
        all_results = [*part_sums.values(), *penalties.values(), part_sums["nll"], norm]
        results = torch.stack([result.detach().double() for result in all_results])
        update_sums = results[: len(part_sums)]
        latest = results[len(part_sums) :]
        if not self._part_names:
            self._part_names = list(part_sums)
            self._penalty_names = list(penalties)
            self._sums = torch.zeros_like(update_sums)
            self._latest = torch.zeros_like(latest)

        # Count the update. The loss differs between processes, but all processes must make the same decision.
        self._step += 1
        is_finite = self._world.all_true(results.isfinite().all())
        self._skipped += ~is_finite
        self._skipped_in_a_row.copy_((self._skipped_in_a_row + 1) * ~is_finite)
        self._tokens += target_count * is_finite
        self._sums += torch.where(is_finite, update_sums, 0.0)

        # Once an update has failed, its results stay, so that the report shows them.
        had_failed = self._failed_step > 0
        fails_now = self._skipped_in_a_row >= self._patience
        self._latest.copy_(torch.where(~had_failed & (is_finite | fails_now), latest, self._latest))
        self._failed_step.copy_(torch.where(~had_failed & fails_now, self._step, self._failed_step))
        self.found_inf.copy_(~is_finite | (self._failed_step > 0))

    def report(self) -> UpdateReport:
        """Wait for the device, return the accumulated results, and reset them."""
        # One copy from the device is enough for all numbers.
        counts = torch.stack([self._tokens, self._failed_step, self._skipped, self._skipped_in_a_row]).double()
        numbers = torch.cat([self._sums, self._latest, counts]).tolist()
        for accumulated in (self._sums, self._tokens, self._skipped):
            accumulated.zero_()

        # Take the numbers apart again, in the same order.
        *results, tokens, failed_step, skipped, skipped_in_a_row = numbers
        part_sums = results[: len(self._part_names)]
        penalties = results[len(self._part_names) : -2]
        nll, norm = math.nan, math.nan  # before the first update
        if results:
            nll, norm = results[-2:]
        return UpdateReport(
            sums=dict(zip(self._part_names, part_sums, strict=True)),
            tokens=int(tokens),
            penalties=dict(zip(self._penalty_names, penalties, strict=True)),
            nll=nll,
            gradient_norm=norm,
            failed_step=int(failed_step),
            skipped=int(skipped),
            skipped_in_a_row=int(skipped_in_a_row),
        )


class CapturedUpdates:
    """Replays updates as CUDA graphs, because the kernels of small models take longer to launch than to run.

    An update is captured when its shapes occur for the second time, and replayed from then on. Lines differ in length.
    So that shapes still repeat, the number of targets is a tensor, and `MicroBatch` pads the positions with a target.
    All graphs read the hidden state from the same tensors and write the next state to them, so that a window of any
    length can follow a window of any other length.
    """

    def __init__(
        self, apply_update: Callable[[Sequence[MicroBatch], State, Tensor], State], device: torch.device
    ) -> None:
        """Create a cache of graphs.

        Args:
            apply_update: Function that makes an update. It is called with the micro-batches, the hidden state and the
                number of targets, and returns the next hidden state.
            device: The device of the model.
        """
        self._apply_update = apply_update
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._steps: RepeatedSteps[None] = RepeatedSteps(device, MAX_GRAPHS)
        self._hidden: State = {}

    def __call__(self, batches: Sequence[MicroBatch], hidden: State, target_count: Tensor) -> State:
        """Run or replay an update, and return the next hidden state."""
        with side_stream(self._device, self._stream):
            # Copy the hidden state into the tensors that the graphs read, unless it is there already.
            if hidden is not self._hidden:
                if not self._hidden:
                    self._hidden = {name: torch.empty_like(tensor) for name, tensor in hidden.items()}
                overwrite(self._hidden, hidden)

            key = tuple(batch.shape_key() for batch in batches)
            inputs = [target_count]
            for batch in batches:
                inputs += batch.tensors()
            self._steps(key, partial(self._step, batches), inputs)
        return self._hidden

    def _step(self, batches: Sequence[MicroBatch], target_count: Tensor, *tensors: Tensor) -> None:
        """Apply an update to the micro-batches, with `tensors` in place of their tensors."""
        replacements = iter(tensors)
        device_batches = [batch.map(lambda _: next(replacements)) for batch in batches]
        next_hidden = self._apply_update(device_batches, self._hidden, target_count)
        overwrite(self._hidden, next_hidden)


def carries_state(model: LanguageModel, settings: TrainingSettings) -> bool:
    """Return whether each training window continues from the hidden state of the previous window."""
    return settings.batching == "streams" and model.encoder.carries_state


def check_precision(model: LanguageModel, settings: TrainingSettings) -> None:
    """Raise an error if the precision is float16 and torch cannot train this encoder, which is on a CPU, with it.

    Few CPUs support an LSTM in float16. Some of them compute its outputs but not its gradients, so the check includes
    a backward pass.
    """
    if settings.precision != "float16":
        return
    was_training = model.training
    model.train()
    try:
        # The check must not change the dropout masks of the run.
        with torch.random.fork_rng(devices=()), torch.autocast("cpu", dtype=torch.float16):
            _compute_tiny_gradient(model)
    except RuntimeError as error:
        raise SettingsError(
            f"training.precision = float16: torch cannot train this {type(model.encoder).__name__} in float16 "
            "on a CPU; use bfloat16, or a GPU"
        ) from error
    finally:
        model.train(was_training)


def _compute_tiny_gradient(model: LanguageModel) -> None:
    """Run the model forward and backward on one word. A translator also reads a source of one word."""
    targets_BT = torch.zeros(1, 1, dtype=torch.int64)
    if model.encoder.reads_source:
        pairs_BU = torch.zeros(1, 2, dtype=torch.int64)
        output, _ = model.target_log_probs(pairs_BU, targets_BT)
    else:
        output = model(targets_BT).output
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.autograd.grad(output.float().sum(), parameters, allow_unused=True)


def _output_positions(targets_N: Tensor) -> Tensor | None:
    """Return the positions that the output end reads, or None if all positions have a target.

    The positions with a target come first, in their order. They are padded with positions without a target up to a
    multiple of the bucket size. With 32 positions, for example, a bucket has 2 positions; if 5 of the positions have a
    target, 6 positions are returned.
    """
    has_target_N = targets_N != IGNORE
    if has_target_N.all():
        return None
    num_targets = int(has_target_N.sum())
    bucket_size = math.ceil(len(targets_N) / TARGET_BUCKETS)
    padded_count = math.ceil(num_targets / bucket_size) * bucket_size
    targets_first_N = has_target_N.argsort(descending=True, stable=True)
    return targets_first_N[:padded_count]


def _shape_and_dtype(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
