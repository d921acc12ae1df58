"""What deferred logits are computed from, and what can be computed from it without them.

`Scores` holds the hidden states, weight and bias of a linear classifier, and the steps that a model applied to its
logits afterwards, such as a division or a cap. `Scores.dense` repeats the steps on real logits. `fold` turns the steps
into the one formula that our kernels compute,

    z = softcap(scale (h . w + b)) * factor,     log p = outer (z - logsumexp(z))

and `cross_entropy`, `logsumexp` and the other functions call the kernels with it.

Shapes: (..., D) hidden states, (V, D) weight, (V,) bias; N rows, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from reefknot.errors import ArgumentError
from reefknot.kernels.autograd import RowResults
from reefknot.kernels.columns import ClassVectors, column_parts, join_columns
from reefknot.kernels.linear_cross_entropy import Reduction, linear_cross_entropy
from reefknot.kernels.losses import row_results
from reefknot.kernels.scores import IGNORE, ScoreTransform, SummaryRequest, at_least_float32

NO_IGNORE_INDEX = -(2**63)
"""An `ignore_index` that no target has."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Step(NamedTuple):
    """One operation that a model applied to its logits."""

    kind: Literal["multiply", "divide", "tanh", "add", "cast", "log_softmax"]
    value: Any = None
    """The number, the row (V,) or the dtype."""

    def apply(self, logits: Tensor) -> Tensor:
        """Apply the operation to real logits."""
        if self.kind == "multiply":
            return logits.mul(self.value)
        if self.kind == "divide":
            return logits.div(self.value)
        if self.kind == "tanh":
            return logits.tanh()
        if self.kind == "add":
            return logits.add(self.value)
        if self.kind == "cast":
            converted: Tensor = logits.to(self.value)
            return converted
        return logits.log_softmax(-1)


_WATCHED = WeakIdKeyDictionary()
"""Parameters whose updates must be noticed."""


def _count_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Increment the version of watched parameters after an optimiser step. Fused optimisers do not do that."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter in _WATCHED:
            torch.autograd.graph.increment_version(parameter)


register_optimizer_step_post_hook(_count_update)


class Stamp(NamedTuple):
    """The state of a tensor when the logits were deferred, to notice that it has changed since."""

    name: str
    tensor: Tensor
    version: int | None
    address: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Stamp:
        """Record the state of a tensor, without keeping its graph alive."""
        if tensor.is_leaf and tensor.requires_grad:
            _WATCHED[tensor] = True
        tensor = tensor if tensor.is_leaf else tensor.detach()  # both share the version counter
        return cls(name, tensor, None if tensor.is_inference() else tensor._version, tensor.data_ptr())

    @property
    def is_current(self) -> bool:
        """Return whether the tensor still has its values."""
        if self.tensor.data_ptr() != self.address or (
            self.version is not None and self.tensor._version != self.version
        ):
            return False
        return not self.tensor.numel() or self.tensor.untyped_storage().size() > 0  # FSDP frees the memory


@dataclass(frozen=True)
class Formula:
    """The formula of the kernels that equals a chain of steps: see the top of this file."""

    bias: Tensor | None
    scale: float = 1.0
    is_capped: bool = False
    factor: float = 1.0
    is_normalised: bool = False
    outer: float = 1.0

    def multiply(self, number: float) -> Formula | None:
        """Return the formula of the scores times a number, or None if our kernels have no such formula."""
        if number == 0 or not math.isfinite(number):
            return None
        if self.is_normalised:
            return replace(self, outer=self.outer * number)
        if self.is_capped:
            return replace(self, factor=self.factor * number)
        return replace(self, scale=self.scale * number)

    def tanh(self) -> Formula | None:
        """Return the formula of the tanh of the scores, or None."""
        return None if self.is_capped or self.is_normalised else replace(self, is_capped=True)

    def add(self, row_V: Tensor) -> Formula | None:
        """Return the formula of the scores plus one number per class, or None."""
        if self.is_capped or self.is_normalised:
            return None
        row_V = row_V if self.scale == 1 else row_V / self.scale
        return replace(self, bias=row_V if self.bias is None else self.bias + row_V)

    def log_softmax(self) -> Formula | None:
        """Return the formula of the log-softmax of the scores, or None."""
        return None if self.is_normalised else replace(self, is_normalised=True)

    @property
    def transform(self) -> ScoreTransform:
        """The transform of z as our kernels take it. A negative factor becomes a negative scale: tanh is odd."""
        if self.is_capped:
            return ScoreTransform(self.scale * self.factor, abs(self.factor))
        return ScoreTransform(self.scale)


@dataclass(frozen=True)
class Scores:
    """The logits of a linear classifier, as what they are computed from."""

    hidden: Tensor
    weight: ClassVectors
    """Several matrices, if the output layer has adapters."""
    bias: Tensor | None
    dtype: torch.dtype
    autocast: torch.dtype | None
    """The type of autocast when the output layer was called, or None."""
    log: Callable[[str, bool], None]
    """Logs a path, and whether it makes real logits."""
    steps: tuple[Step, ...] = ()
    stamps: tuple[Stamp, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.weight.shape[0]))

    @property
    def num_classes(self) -> int:
        return self.weight.shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that get gradients."""
        rows = tuple(step.value for step in self.steps if step.kind == "add")
        return (self.hidden, *column_parts(self.weight), *(() if self.bias is None else (self.bias,)), *rows)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Scores:
        """Return the same scores of other tensors, in the order of `tensors`."""
        hidden, *others = tensors
        weight = join_columns([others.pop(0) for _ in column_parts(self.weight)])
        bias = None if self.bias is None else others.pop(0)
        steps = tuple(Step("add", others.pop(0)) if step.kind == "add" else step for step in self.steps)
        return replace(self, hidden=hidden, weight=weight, bias=bias, steps=steps)

    def detached(self) -> Scores:
        """Return the same scores without gradients. They still notice if a tensor changes."""
        return self.with_tensors(tuple(tensor.detach() for tensor in self.tensors))

    def with_step(self, step: Step, dtype: torch.dtype | None = None) -> Scores:
        """Return the scores after one more operation."""
        stamps = self.stamps
        if step.kind == "add" and stamps:
            stamps = (*stamps, Stamp.of("an added row", step.value))
        return replace(self, steps=(*self.steps, step), dtype=dtype or self.dtype, stamps=stamps)

    def with_classes(self, classes: slice) -> Scores:
        """Return the scores of some of the classes."""
        bias = None if self.bias is None else self.bias[classes]
        steps = tuple(Step("add", step.value[classes]) if step.kind == "add" else step for step in self.steps)
        weight = join_columns([part[classes] for part in column_parts(self.weight)])
        return replace(self, weight=weight, bias=bias, steps=steps)

    def stamped(self) -> Scores:
        """Return scores that notice if a tensor changes from now on."""
        weight = "the weight of the output layer"
        named = [("the hidden state", self.hidden), *((weight, part) for part in column_parts(self.weight))]
        named += [("an added row", step.value) for step in self.steps if step.kind == "add"]
        if self.bias is not None:
            named.append(("the bias of the output layer", self.bias))
        return replace(self, stamps=tuple(Stamp.of(name, tensor) for name, tensor in named))

    def check_current(self) -> None:
        """Raise an error if a tensor has changed since the output layer was called."""
        for stamp in self.stamps:
            if not stamp.is_current:
                raise ArgumentError(
                    f"logits_free: {stamp.name} changed after these logits were deferred, for example in an optimiser "
                    "step or because FSDP freed it; use the logits before that, or keep a copy, logits.cpu()"
                )

    def dense(self) -> Tensor:
        """Compute the real logits, with the operations of the model."""
        self.check_current()
        with torch._C.DisableTorchFunctionSubclass(), self._precision():
            parts = column_parts(self.weight)
            hidden, *low_rank = torch.split(self.hidden, [part.shape[1] for part in parts], -1)
            logits = F.linear(hidden, parts[0], self.bias)
            for rows, columns in zip(low_rank, parts[1:], strict=True):
                logits = logits + F.linear(rows.to(columns.dtype), columns)
            for step in self.steps:
                logits = step.apply(logits)
            return logits

    def fold(self) -> Formula | None:
        """Return the steps as one formula, or None if our kernels do not have such a formula."""
        formula: Formula | None = Formula(self.bias)
        for kind, value in self.steps:
            if formula is None:
                return None
            if kind == "multiply":
                formula = formula.multiply(value)
            elif kind == "divide":
                formula = formula.multiply(1 / value) if value else None
            elif kind == "tanh":
                formula = formula.tanh()
            elif kind == "add":
                formula = formula.add(value)
            elif kind == "log_softmax":
                formula = formula.log_softmax()
            elif value not in _FLOATS and value != self.hidden.dtype:  # the kernels sum at least in float32
                return None
        return formula

    def _precision(self) -> AbstractContextManager[Any]:
        """Return the context in which the output layer was called."""
        device = self.hidden.device.type
        return torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None)

    def result_dtype(self) -> torch.dtype:
        """Return the type of the results that torch would compute from these logits."""
        is_autocast = torch.is_autocast_enabled(self.hidden.device.type)
        return torch.float32 if is_autocast and self.dtype in _FLOATS else self.dtype

    def summarise(self, formula: Formula, request: SummaryRequest) -> RowResults:
        """Compute summaries of each row of z, (N,)."""
        hidden_ND = self.hidden.reshape(-1, self.hidden.shape[-1])
        no_targets_N = torch.full((len(hidden_ND),), IGNORE, device=hidden_ND.device)
        with self._precision():
            return row_results(hidden_ND, self.weight, formula.bias, no_targets_N, request, formula.transform)


def cross_entropy(
    scores: Scores,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = IGNORE,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return `F.cross_entropy` of the logits, at least in float32, or None if it needs real logits."""
    formula = scores.fold()
    if formula is None or (formula.is_normalised and formula.outer != 1):
        return None
    scores.check_current()
    transform = formula.transform
    with scores._precision():
        loss = linear_cross_entropy(
            scores.hidden,
            cast(Tensor, scores.weight),  # it also takes joined columns
            target,
            formula.bias,
            weight=weight,
            reduction=reduction,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            logit_scale=transform.scale,
            softcap=transform.softcap,
            check_targets=not target.is_cuda,  # the check waits for the device
        )
    if reduction != "mean":
        return loss
    # The mean over no targets is NaN in torch, with gradients of zero.
    return loss + torch.where((target != ignore_index).any(), 0.0, math.nan)


def target_scores(scores: Scores, index: Tensor) -> Tensor | None:
    """Return the scores of the classes in `index`, (..., k), at least in float32, or None if it needs real logits."""
    formula = scores.fold()
    count = index.shape[-1]
    is_too_large = count > 1 and count * scores.hidden.shape[-1] > scores.num_classes
    if formula is None or is_too_large:
        return None
    scores.check_current()
    if formula.is_normalised and count == 1:
        loss = cross_entropy(
            replace(scores, steps=scores.steps[: _normalising_step(scores)]),
            index[..., 0],
            ignore_index=NO_IGNORE_INDEX,
            reduction="none",
        )
        return None if loss is None else loss[..., None] * -formula.outer
    with torch.autocast(scores.hidden.device.type, enabled=False):
        vectors = torch.cat([at_least_float32(F.embedding(index, part)) for part in column_parts(scores.weight)], -1)
        z = (at_least_float32(scores.hidden)[..., None, :] * vectors).sum(-1)
        if formula.bias is not None:
            z = z + F.embedding(index, formula.bias[:, None])[..., 0]
        z = z * formula.scale
        if formula.is_capped:
            z = z.tanh() * formula.factor
    if formula.is_normalised:
        lse_N = scores.summarise(formula, SummaryRequest()).lse
        z = formula.outer * (z - lse_N.view(*index.shape[:-1], 1))
    return z


def logsumexp(scores: Scores) -> Tensor | None:
    """Return the log-sum-exp over the classes, (...), at least in float32, or None if it needs real logits."""
    formula = scores.fold()
    if formula is None or formula.is_normalised:
        return None
    scores.check_current()
    return scores.summarise(formula, SummaryRequest()).lse.view(scores.shape[:-1])


def argmax(scores: Scores) -> Tensor | None:
    """Return the class with the largest score, (...), or None if it needs real logits."""
    formula = scores.fold()
    if formula is None or formula.outer < 0:
        return None
    scores.check_current()
    best_class_N = scores.summarise(formula, SummaryRequest(best=True)).best_class
    assert best_class_N is not None
    return best_class_N.view(scores.shape[:-1])


def sum_of_log_probs(scores: Scores) -> Tensor | None:
    """Return the sum over the classes of the log-softmax, (...), or None if there is none or it needs real logits."""
    formula = scores.fold()
    if formula is None or not formula.is_normalised:
        return None
    scores.check_current()
    results = scores.summarise(formula, SummaryRequest(total=True))
    assert results.total is not None
    return (formula.outer * (results.total - scores.num_classes * results.lse)).view(scores.shape[:-1])


def _normalising_step(scores: Scores) -> int:
    """Return the index of the log-softmax among the steps."""
    return next(i for i, step in enumerate(scores.steps) if step.kind == "log_softmax")


def combine(first: Scores, second: Scores) -> Scores | None:
    """Return the sum of two linear scores, such as those of a layer and of its LoRA adapter, or None."""
    formulas = [scores.fold() for scores in (first, second)]
    if first.shape != second.shape or any(f is None or f.is_capped or f.is_normalised for f in formulas):
        return None
    scales = [f.scale for f in formulas if f is not None]
    biases = [f.bias * f.scale for f in formulas if f is not None and f.bias is not None]
    # The adapter is computed in the type of the layer. PEFT stores it in float32.
    hidden = [
        (s.hidden if k == 1 else s.hidden * k).to(first.hidden.dtype)
        for s, k in zip((first, second), scales, strict=True)
    ]
    return replace(
        first,
        hidden=torch.cat(hidden, -1),
        weight=join_columns([*column_parts(first.weight), *column_parts(second.weight)]),
        bias=sum(biases[1:], start=biases[0]) if biases else None,
        dtype=torch.promote_types(first.dtype, second.dtype),
        steps=(),
        stamps=first.stamps + second.stamps,
    )
