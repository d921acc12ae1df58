"""The interface of output ends: the last stage of a language model, which predicts words and computes the loss.

An output end turns hidden states into a distribution over classes, which are usually the words of the vocabulary. Start
reading at `OutputEnd`. An implementation must define only its first five methods. `softmax.py` is the shortest
implementation.

Two small types come first:

    LossPart    one named term of the loss: a sum over the targets, with a count and a weight
    Plan        everything that an output end computes from the targets of a batch before the forward pass

Shapes: N rows (one row per token), D dimensions of the hidden state, V classes, K best classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from reefknot.errors import ArgumentError, SettingsError
from reefknot.kernels.capture import send
from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.contract import CacheType, Classifier, EvaluationCache, StepCache
from reefknot.nn.part import FLOPS_PER_WEIGHT, InheritsDocstrings, count_matrix_weights
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


class OutputEnd(nn.Module, InheritsDocstrings):
    """Base class of output ends, which turn hidden states into a distribution over the classes and compute its loss.

    Training calls `prepare` on the host and `loss` on the device:

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
        """Return the log-probabilities of all classes, with shape (N, V), in float32 or a wider type.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
        """
        raise NotImplementedError

    def target_log_probs(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Return the log-probability of the target of each row, with shape (N,). It is zero if the target is -100.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            targets_N: Target classes, with shape (N,).
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

    # -- the plan of a batch ----------------------------------------------------------------------------------------

    def prepare(self, targets: Tensor) -> Plan:
        """Return the plan for a batch of targets, which `loss` needs. An unknown class raises an `ArgumentError`.

        Args:
            targets: Target classes on the host, with any shape. Targets of -100 are ignored.
        """
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

    def topk(self, hidden_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities and ids of the k best classes of each row, both with shape (N, k), best first.

        Args:
            hidden_ND: Hidden states, with shape (N, D).
            k: Number of classes to return, from 1 to V.
        """
        self.check_topk_size(k)
        log_probs_NK, ids_NK = self.log_probs(hidden_ND).topk(k, dim=-1)
        return log_probs_NK, ids_NK

    def check_topk_size(self, k: int) -> None:
        """Raise a `SettingsError` unless k is from 1 to the number of classes."""
        if not 1 <= k <= self.vocab_size:
            raise SettingsError(f"k = {k}: the best of {self.vocab_size} classes need a k from 1 to {self.vocab_size}")

    def sample(self, hidden_ND: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Draw one class per row from the distribution. The result has shape (N,).

        Args:
            hidden_ND: Hidden states, with shape (N, D).
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
