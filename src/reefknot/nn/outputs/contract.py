"""The interface of output ends: the last stage of a language model, which predicts words and computes the loss.

An output end turns hidden states into a distribution over classes, which are usually the words of the vocabulary. Start
reading at `OutputEnd`. An implementation must define only its first five methods. `softmax.py` is the shortest
implementation.

Small types come first:

    LossPart      one named term of the loss: a sum over the targets, with a count and a weight
    RowLoss       the same term for each target, without the sum
    OutputLoss    the result of calling an output end: the loss to minimise, the mean negative log-likelihood, a count
    Plan          everything that an output end computes from the targets of a batch before the forward pass

Shapes: N rows (one row per token), D dimensions of the hidden state, V classes, K best classes. "..." stands for any
leading shape, such as (B, T) for B streams and T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self, get_args

import torch
from torch import Tensor, nn

from reefknot.errors import ArgumentError, SettingsError, describe_type
from reefknot.kernels.arguments import check_integer, check_number, check_target_values, replace_ignore_index
from reefknot.kernels.capture import send
from reefknot.kernels.linear_cross_entropy import Reduction
from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.contract import CacheType, Classifier, EvaluationCache, StepCache
from reefknot.nn.outputs.rows import any_leading_shape, check_hidden, check_targets
from reefknot.nn.part import FLOPS_PER_WEIGHT, InheritsDocstrings, RecordsArguments, count_matrix_weights
from reefknot.nn.tables import WordTable


@dataclass(frozen=True)
class LossPart:
    """One named part of a loss: a sum over targets, and the number of targets.

    To average over several batches, add the sums, add the counts and divide once.
    """

    sum: Tensor
    """The sum over all targets, a scalar. The weight is not applied, so that metrics show the quantity of the paper."""
    count: int
    """The number of targets in the sum."""
    weight: float = 1.0
    """The weight of this part in the objective."""

    def weighted_sum(self) -> Tensor:
        """Return the sum times the weight."""
        return self.sum if self.weight == 1 else self.weight * self.sum


def add_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Return the sum of scalars, by as few operations as possible, because each launch takes time."""
    total, *others = scalars
    for scalar in others:
        total = total + scalar
    return total


class RowLoss(NamedTuple):
    """One named part of a loss, with one value per row."""

    values: Tensor
    """The value of each row, with shape (N,), zero where the target is ignored. The weight is not applied."""
    weight: float = 1.0
    """The weight of this part in the objective."""


class OutputLoss(NamedTuple):
    """The result of calling an output end: `loss, nll, count = end(hidden, targets)`."""

    loss: Tensor
    """The loss to minimise, with all parts and penalties."""
    nll: Tensor
    """The negative log-likelihood alone, without penalties and without gradient: exp(nll) is a perplexity."""
    count: int  # type: ignore[assignment]  # hides the method `count` of tuples
    """The number of targets that are not ignored."""


@dataclass(frozen=True)
class Plan:
    """The result of `OutputEnd.prepare`: everything that an output end computes from the targets of a batch on the CPU.

    A plan is computed on the host (the CPU) before the targets are copied to the GPU, so that the loss does not wait
    for the GPU. Subclasses add tensors. An adaptive softmax, for example, groups the targets by word frequency.
    """

    count: int
    """The number of targets that are not ignored."""

    def to(self, device: torch.device) -> Self:
        """Return the plan with all tensors on a device, or the plan itself if they are already on it."""
        return self.map(partial(send, device=device))

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the plan, in a fixed order."""
        tensors: list[Tensor] = []
        for field in fields(self):
            tensors += _list_tensors(getattr(self, field.name))
        return tensors

    def map(self, function: Callable[[Tensor], Any]) -> Self:
        """Return the plan with `function` applied to every tensor, or the plan itself if no tensor changes."""
        changed_fields: dict[str, Any] = {}
        for field in fields(self):
            old_value = getattr(self, field.name)
            new_value = _map_tensors(old_value, function)
            if new_value is not old_value:
                changed_fields[field.name] = new_value
        if not changed_fields:
            return self
        return replace(self, **changed_fields)


class OutputEnd(nn.Module, InheritsDocstrings, RecordsArguments):
    """Base class of output ends, which turn hidden states into a distribution over the classes and compute its loss.

    An output end is a layer. Call it with hidden states and targets of any leading shape:

        loss, nll, count = output(hidden, targets)      # (..., D) and (...)
        loss.backward()

    The trainer calls `prepare` on the host and `loss` on the device instead, which gives the parts of the loss as sums:

        plan = output.prepare(targets_N)
        loss_parts = output.loss(hidden_ND, targets_N, plan)
        loss_parts["nll"].sum.backward()

    A subclass sets `vocab_size` and `context_dim`, and defines `loss`, `log_probs`, `target_log_probs`, `vectors` and
    `tables`. All other members have a default.
    """

    # -- members that every output end defines ----------------------------------------------------------------------

    vocab_size: int
    """Number of classes, V."""
    context_dim: int
    """Dimension of the hidden states, D."""
    divides_classes: ClassVar[bool] = False
    """Whether `loss` works while the tables of the classifiers are divided among processes (`WordTable.shard`)."""

    def loss(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, LossPart]:
        """Return the loss of the targets in named parts.

        The part `nll`, the negative log-likelihood, is always present. Perplexity is computed from it alone.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        raise NotImplementedError

    def log_probs(self, hidden_ND: Tensor) -> Tensor:
        """Return the log-probabilities of all classes, with shape (..., V), in float32 or a wider type.

        A subclass writes this method for rows, (N, D), with the decorator `any_leading_shape`.

        Args:
            hidden_ND: Hidden states, with shape (..., D).
        """
        raise NotImplementedError

    def target_log_probs(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Return the log-probability of each target, with shape (...). It is zero if the target is -100.

        A subclass writes this method for rows, (N, D), with the decorator `any_leading_shape_with_targets`.

        Args:
            hidden_ND: Hidden states, with shape (..., D).
            targets_N: Target classes, with shape (...).
        """
        raise NotImplementedError

    def vectors(self) -> Tensor:
        """Return one vector per class, in a matrix with V rows, for example to find nearest neighbours."""
        raise NotImplementedError

    def tables(self) -> list[WordTable]:
        """Return the word tables from which the class vectors are made.

        An input end that holds one of these tables is tied to this output end.
        """
        raise NotImplementedError

    # -- the end as a layer -----------------------------------------------------------------------------------------

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = IGNORE,
        reduction: Reduction = "mean",
        divisor: float | Tensor | None = None,
        plan: Plan | None = None,
    ) -> OutputLoss:
        """Return the loss of the targets, their negative log-likelihood and their number.

            loss, nll, count = output(hidden, targets)

        With the weighted sum S of the parts of the loss, the sum P of the penalties, and the divisor d, which is the
        number of targets unless it is given:

            reduction "sum"     loss = S + P count / d
            reduction "mean"    loss = (S + P count / d) / d
            reduction "none"    one loss per target, each with the share P / d of the penalties

        So with d = the number of targets in all micro-batches of an optimiser step, the losses of the micro-batches
        add up to the loss of the whole batch, and the penalties count once. The result `nll` has no penalties and no
        gradient. It is the sum, the mean over the targets of this call (whatever the divisor), or one number per
        target.

        Without a plan, the plan is made here. This does not make the host wait for a GPU if the targets are on the
        CPU: pass them from the CPU, even if the hidden states are on a GPU. For targets on a GPU, pass the plan of
        their copy on the CPU, or the host waits until the GPU has computed them.

        Args:
            hidden: Hidden states, with shape (..., D).
            targets: Target classes, with shape (...), on the device of `hidden` or on the CPU.
            ignore_index: Targets with this value have no loss and no gradient. If all targets are ignored, the loss is
                zero.
            reduction: `mean`, `sum`, or `none` for one loss per target, which takes a third more arithmetic in
                training.
            divisor: The number of targets in the whole optimiser step, if this call is one of its micro-batches: a
                number or a tensor with one element. By default the number of targets of this call.
            plan: The result of `prepare` for these targets. It requires the default `ignore_index`.
        """
        name = type(self).__name__
        check_hidden(self, hidden)
        check_targets(name, targets, hidden)
        _check_call_settings(name, ignore_index, reduction, divisor, plan)
        targets_N = targets.reshape(-1).long()
        if ignore_index != IGNORE:
            targets_N = replace_ignore_index(targets_N, ignore_index, self.vocab_size)
            check_target_values(name, targets_N, targets, self.vocab_size, ignore_index)
        if plan is None:
            plan = self.prepare(targets_N.view(targets.shape))
        targets_N = send(targets_N, hidden.device)
        hidden_ND = hidden.reshape(-1, self.context_dim)
        if divisor is None:
            divisor = max(plan.count, 1)
        elif isinstance(divisor, Tensor):
            divisor = divisor.reshape(())

        if reduction == "none":
            loss_N, nll_N = self._compute_row_losses(hidden_ND, targets_N, plan, divisor)
            return OutputLoss(loss_N.reshape(targets.shape), nll_N.reshape(targets.shape), plan.count)
        loss_sum, nll_sum = self._compute_summed_losses(hidden_ND, targets_N, plan, divisor)
        if reduction == "sum":
            return OutputLoss(loss_sum, nll_sum, plan.count)
        return OutputLoss(loss_sum / divisor, nll_sum / max(plan.count, 1), plan.count)

    def _compute_summed_losses(
        self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan, divisor: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses with the share of the penalties, and the sum of the nll without gradient."""
        loss_parts = self.loss(hidden_ND, targets_N, plan)
        terms = [part.weighted_sum() for part in loss_parts.values()]
        penalty_share = plan.count / divisor
        terms += [penalty * penalty_share for penalty in self.penalties().values()]
        terms += self._zero_terms()
        return add_scalars(terms), loss_parts["nll"].sum.detach()

    def _compute_row_losses(
        self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan, divisor: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each row with its share of the penalties, and the nll of each row without gradient."""
        row_losses = self.loss_per_row(hidden_ND, targets_N, plan)
        loss_N = torch.stack([row_loss.weight * row_loss.values for row_loss in row_losses.values()]).sum(0)
        terms = [penalty / divisor for penalty in self.penalties().values()] + self._zero_terms()
        if terms:
            loss_N = loss_N + torch.stack(terms).sum() * (targets_N != IGNORE)
        return loss_N, row_losses["nll"].values.detach()

    def _zero_terms(self) -> list[Tensor]:
        """Return a zero with a gradient of zero for each parameter that this end holds but does not train.

        Data parallelism waits for the gradient of every parameter. The sum of no elements is exactly zero, even if the
        parameter has infinite elements.
        """
        return [parameter.reshape(-1)[:0].sum() for parameter, _ in self.untrained_parameters()]

    def loss_per_row(self, hidden_ND: Tensor, targets_N: Tensor, plan: Plan) -> dict[str, RowLoss]:
        """Return the named parts of `loss` for each row. The default is for a loss that is the exact nll alone.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,). Rows whose target is -100 are ignored.
            plan: The result of `prepare` for these targets.
        """
        return {"nll": RowLoss(-self.target_log_probs(hidden_ND, targets_N))}

    # -- the plan of a batch ----------------------------------------------------------------------------------------

    def prepare(self, targets: Tensor) -> Plan:
        """Return the plan for a batch of targets, which `loss` needs. An unknown class raises an `ArgumentError`.

        Args:
            targets: Target classes on the host, with any shape. Targets of -100 are ignored.
        """
        if targets.numel():
            smallest, largest = map(int, torch.aminmax(targets))
            if smallest >= 0 and largest < self.vocab_size:
                return Plan(count=targets.numel())  # with few operations, because most batches end here
        is_scored = targets != IGNORE
        is_outside = (targets < 0) | (targets >= self.vocab_size)
        is_invalid = is_scored & is_outside
        if bool(is_invalid.any()):
            first_invalid = int(targets[is_invalid].flatten()[0])
            raise ArgumentError(
                f"target {first_invalid} is not a class: there are {self.vocab_size}, counted from 0; "
                f"use {IGNORE} for targets to leave out"
            )
        return Plan(count=int(is_scored.sum()))

    def prepare_micro_batches(self, micro_batches: Sequence[Tensor]) -> Sequence[Plan]:
        """Return one plan for each micro-batch of an optimiser step.

        Their shapes should be the same, because a CUDA graph is captured for each combination of shapes.

        Args:
            micro_batches: The target classes of each micro-batch, on the host.
        """
        return [self.prepare(targets) for targets in micro_batches]

    # -- predictions ------------------------------------------------------------------------------------------------

    @any_leading_shape
    def topk(self, hidden_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities and ids of the k best classes, both with shape (..., k), best first.

        Args:
            hidden_ND: Hidden states, with shape (..., D).
            k: Number of classes to return, from 1 to V.
        """
        self.check_topk_size(k)
        log_probs_NK, ids_NK = self.log_probs(hidden_ND).topk(k, dim=-1)
        return log_probs_NK, ids_NK

    def check_topk_size(self, k: int) -> None:
        """Raise a `SettingsError` unless k is an integer from 1 to the number of classes."""
        if not isinstance(k, int | torch.SymInt):
            raise SettingsError(f"k = {k!r}: the number of classes must be an integer")
        if not 1 <= k <= self.vocab_size:
            raise SettingsError(f"k = {k}: the best of {self.vocab_size} classes need a k from 1 to {self.vocab_size}")

    @any_leading_shape
    def sample(self, hidden_ND: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one class per hidden state from its distribution. The result has shape (...).

        Args:
            hidden_ND: Hidden states, with shape (..., D).
            generator: Random number generator on the device of `hidden_ND`. The default is torch's own.
        """
        probabilities_NV = self.log_probs(hidden_ND).exp()
        return torch.multinomial(probabilities_NV, 1, generator=generator).squeeze(-1)

    # -- penalties, costs and limits --------------------------------------------------------------------------------

    bands: int = 1
    """Number of bands (groups of words of similar frequency): more than 1 only for an adaptive softmax."""
    rows_per_token: int = 1
    """Number of rows of scores per token: more than 1 only for a mixture of softmaxes. The memory estimate of a window
    (the tokens that are computed at once) uses it."""
    synchronizes: bool = False
    """Whether `topk` or `target_log_probs` reads a value from the GPU. Such a call cannot be captured in a CUDA graph.
    `loss` never reads values from the GPU, because the plan contains them."""

    def penalties(self) -> dict[str, Tensor]:
        """Return named penalties on the parameters, as scalars. Each is added to the loss sums once per step."""
        return {}

    def maps_hidden(self) -> bool:
        """Return whether a matrix of this end maps the hidden state, which must then have the type of the matrix."""
        for module in self.modules():
            if isinstance(module, Classifier) and type(module).context is not Classifier.context:
                return True
        return False

    def flops(self, targets_N: Tensor) -> int:
        """Return the number of floating-point operations of a training step on these targets (see `nn/part.py`).

        Args:
            targets_N: Target classes, with shape (N,), without ignored targets.
        """
        weights_per_target = count_matrix_weights(self) + self.context_dim * self.vocab_size
        return FLOPS_PER_WEIGHT * len(targets_N) * weights_per_target

    def untrained_parameters(self) -> list[tuple[nn.Parameter, str]]:
        """Return pairs of a parameter that this end holds but does not train, and an error message.

        Such a parameter belongs to an object that both ends may share. A model raises an error with the message if its
        input end does not train the parameter either.
        """
        return []

    # -- class vectors that are computed once -----------------------------------------------------------------------

    @contextmanager
    def cache_for_evaluation(self) -> Iterator[None]:
        """Compute the class vectors once for all calls without gradients inside the `with` block, as for an evaluation.

        No parameter may change inside the `with` block.
        """
        with self._use_caches(EvaluationCache):
            yield

    @contextmanager
    def cache_for_step(self) -> Iterator[Callable[[], None]]:
        """Compute the class vectors once for all micro-batches of an optimiser step inside the `with` block.

            with output.cache_for_step() as announce_last_micro_batch:
                for index, (hidden_ND, targets_N) in enumerate(micro_batches):
                    if index == len(micro_batches) - 1:
                        announce_last_micro_batch()
                    plan = output.prepare(targets_N)
                    output.loss(hidden_ND, targets_N, plan)["nll"].sum.backward()

        The last backward pass continues into the label encoder (the network that computes the class vectors), with the
        gradients of all micro-batches. The label encoder uses one dropout mask for the whole step.
        """
        with self._use_caches(StepCache) as caches:

            def announce_last_micro_batch() -> None:
                for cache in caches:
                    cache.announce_last_micro_batch()

            yield announce_last_micro_batch
            for cache in caches:
                cache.check_gradients_passed_on()

    @contextmanager
    def _use_caches(self, cache_class: Callable[[], CacheType]) -> Iterator[list[CacheType]]:
        """Give a new cache to every classifier of this output end inside the `with` block."""
        caches: list[CacheType] = []
        with ExitStack() as stack:
            for module in self.modules():
                if isinstance(module, Classifier):
                    caches.append(stack.enter_context(module.use_cache(cache_class())))
            yield caches


def _check_call_settings(name: str, ignore_index: Any, reduction: Any, divisor: Any, plan: Any) -> None:
    """Raise an `ArgumentError` unless the keywords of a call of an output end are valid."""
    check_integer(name, "ignore_index", ignore_index)
    if plan is not None and not isinstance(plan, Plan):
        raise ArgumentError(f"{name}: plan is {describe_type(plan)}; pass the result of `prepare` for these targets")
    if plan is not None and ignore_index != IGNORE:
        raise ArgumentError(
            f"{name}: a plan is given with ignore_index = {ignore_index}, but a plan ignores {IGNORE}; replace the "
            f"targets {ignore_index} by {IGNORE} before `prepare`, or leave out the plan"
        )
    if reduction not in get_args(Reduction):
        raise ArgumentError(f"{name}: reduction = {reduction!r}: must be one of {', '.join(get_args(Reduction))}")
    if isinstance(divisor, Tensor):
        if divisor.numel() != 1:
            raise ArgumentError(f"{name}: divisor is {tuple(divisor.shape)}; it must be one number")
    elif divisor is not None:
        check_number(name, "divisor", divisor, 0, above=True)


def _list_tensors(value: Any) -> list[Tensor]:
    """Return a tensor, or the tensors in nested tuples, as a flat list."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, tuple):
        return []
    tensors: list[Tensor] = []
    for item in value:
        tensors += _list_tensors(item)
    return tensors


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to a tensor or to the tensors in nested tuples. Return any other value unchanged."""
    if isinstance(value, Tensor):
        return function(value)
    if not isinstance(value, tuple):
        return value
    mapped = tuple(_map_tensors(item, function) for item in value)
    is_unchanged = all(old is new for old, new in zip(value, mapped, strict=True))
    return value if is_unchanged else mapped
