"""The operations that work on deferred logits without computing them.

Each function handles the torch operations that are named above it, with their arguments. It returns `NotImplemented`
for arguments that need real logits.

Shapes: (..., V) logits, (..., D) hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from reefknot.hf import scores as compute
from reefknot.hf.deferred import HANDLERS, DeferredLogits, Handler
from reefknot.hf.scores import Scores, Step
from reefknot.kernels.arguments import is_distributed
from reefknot.kernels.linear_cross_entropy import Reduction

_Function = TypeVar("_Function", bound=Handler)


def _handles(*names: str) -> Callable[[_Function], _Function]:
    """Register a function as the handler of these operations."""

    def register(function: _Function) -> _Function:
        HANDLERS.update(dict.fromkeys(names, function))
        return function

    return register


def _is_last(logits: DeferredLogits, dim: int) -> bool:
    return dim in (-1, logits.dim() - 1)


def _alias(logits: DeferredLogits, hidden: Tensor) -> DeferredLogits:
    """Return the logits of other rows of the hidden states."""
    return logits.derive(replace(logits.scores, hidden=hidden), is_alias=True)


# -- shapes and rows ----------------------------------------------------------------------------------------------


def _reshape(logits: DeferredLogits, shape: torch.Size) -> Any:
    """Return the logits in another shape with the same order of elements, if the last dimension stays."""
    if not shape or shape[-1] != logits.shape[-1]:
        return NotImplemented
    return _alias(logits, logits.scores.hidden.reshape(*shape[:-1], logits.scores.hidden.shape[-1]))


def _handle_reshaping(name: str) -> None:
    """Register an operation that keeps the order of the elements. The meta device computes its shape."""

    def reshape(logits: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.dtype) for value in args):  # view(dtype)
            return NotImplemented
        like = torch.empty(logits.shape, device="meta")
        return _reshape(logits, getattr(like, name)(*args, **kwargs).shape)

    HANDLERS[name] = reshape


for _name in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"):
    _handle_reshaping(_name)


def _handle_row_operation(name: str) -> None:
    """Register an operation along a dimension of the rows: it does the same to the hidden states."""

    def apply(logits: DeferredLogits, *args: Any, dim: int, **kwargs: Any) -> Any:
        if _is_last(logits, dim):
            return NotImplemented
        results = getattr(logits.scores.hidden, name)(*args, dim=dim % logits.dim(), **kwargs)
        if isinstance(results, Tensor):
            return _alias(logits, results)
        return tuple(_alias(logits, hidden) for hidden in results)

    def size_first(logits: DeferredLogits, size: Any, dim: int = 0) -> Any:
        return apply(logits, size, dim=dim)

    def dim_only(logits: DeferredLogits, dim: int = 0) -> Any:
        return apply(logits, dim=dim)

    def dim_first(logits: DeferredLogits, dim: int, index: Any, *args: Any) -> Any:
        if _is_last(logits, dim):
            return NotImplemented
        hidden = getattr(logits.scores.hidden, name)(dim % logits.dim(), index, *args)
        return _alias(logits, hidden)

    kinds: dict[str, Handler] = {
        "split": size_first,
        "chunk": size_first,
        "tensor_split": size_first,
        "unbind": dim_only,
    }
    HANDLERS[name] = kinds.get(name, dim_first)


for _name in ("split", "chunk", "tensor_split", "unbind", "select", "narrow", "index_select"):
    _handle_row_operation(_name)


@_handles("__iter__")
def _iterate(logits: DeferredLogits) -> Iterator[Any]:
    return iter(logits.unbind(0))


@_handles("transpose", "swapaxes", "swapdims")
def _transpose(logits: DeferredLogits, dim0: int, dim1: int) -> Any:
    if _is_last(logits, dim0) or _is_last(logits, dim1):
        return NotImplemented
    return _alias(logits, logits.scores.hidden.transpose(dim0 % logits.dim(), dim1 % logits.dim()))


@_handles("__getitem__")
def _index(logits: DeferredLogits, index: Any) -> Any:
    """Index rows, and optionally a range of classes."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(part, list | tuple) for part in parts):
        return NotImplemented
    consumed = [_num_indexed_dims(part) for part in parts]
    ellipses = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(ellipses) > 1 or sum(consumed) > logits.dim():
        return NotImplemented
    touches_classes = sum(consumed) == logits.dim() or (bool(ellipses) and ellipses[0] < len(parts) - 1)
    classes = slice(None)
    if touches_classes:
        if not isinstance(parts[-1], slice):
            return NotImplemented
        classes, parts[-1] = parts[-1], slice(None)
    hidden = logits.scores.hidden[tuple(parts)]
    scores = replace(logits.scores, hidden=hidden)
    if classes != slice(None):
        if any(step.kind == "log_softmax" for step in scores.steps):
            return NotImplemented
        scores = scores.with_classes(classes)
        if not scores.num_classes:
            return NotImplemented
    return logits.derive(scores, is_alias=True)


def _num_indexed_dims(part: Any) -> int:
    """Return how many dimensions a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1


# -- types and copies ---------------------------------------------------------------------------------------------


@_handles("contiguous")
def _contiguous(logits: DeferredLogits) -> DeferredLogits:
    return logits


@_handles("clone")
def _clone(logits: DeferredLogits) -> DeferredLogits:
    return logits.derive(logits.scores)


@_handles("detach")
def _detach(logits: DeferredLogits) -> DeferredLogits:
    return logits.derive(logits.scores.detached(), is_alias=True)


def _cast(logits: DeferredLogits, dtype: torch.dtype) -> Any:
    if dtype == logits.dtype:
        return logits
    if not dtype.is_floating_point:
        return NotImplemented
    return logits.derive(logits.scores.with_step(Step("cast", dtype), dtype))


@_handles("float")
def _to_float32(logits: DeferredLogits) -> Any:
    return _cast(logits, torch.float32)


@_handles("bfloat16")
def _to_bfloat16(logits: DeferredLogits) -> Any:
    return _cast(logits, torch.bfloat16)


@_handles("half")
def _to_float16(logits: DeferredLogits) -> Any:
    return _cast(logits, torch.float16)


@_handles("to", "type", "type_as")
def _to(logits: DeferredLogits, *args: Any, device: Any = None, dtype: Any = None, non_blocking: bool = False) -> Any:
    """Convert the type. The device must stay the same."""
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, Tensor):
            device, dtype = arg.device, arg.dtype
        elif isinstance(arg, str | torch.device) and not str(arg).startswith("torch."):
            device = arg
        elif arg is not False:  # non_blocking
            return NotImplemented
    if device is not None and not _is_same_device(torch.device(device), logits.device):
        return NotImplemented
    return logits if dtype is None else _cast(logits, dtype)


def _is_same_device(device: torch.device, other: torch.device) -> bool:
    return device.type == other.type and (device.index is None or device.index == other.index)


# -- arithmetic ---------------------------------------------------------------------------------------------------


def _with_step(logits: DeferredLogits, step: Step) -> Any:
    """Return the logits after a step, if our kernels have a formula for it."""
    scores = logits.scores.with_step(step)
    return NotImplemented if scores.fold() is None else logits.derive(scores)


def _with_step_in_place(logits: DeferredLogits, step: Step, name: str) -> Any:
    scores = logits.scores.with_step(step)
    if scores.fold() is None or (torch.is_grad_enabled() and logits.requires_grad and logits.is_leaf):
        return NotImplemented
    logits.check_not_shared(name)
    logits.scores = scores
    return logits


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(float(value))


@_handles("mul", "multiply", "__mul__", "__rmul__")
def _multiply(logits: DeferredLogits, other: Any) -> Any:
    return _with_step(logits, Step("multiply", other)) if _is_number(other) else NotImplemented


@_handles("div", "divide", "true_divide", "__truediv__", "__div__")
def _divide(logits: DeferredLogits, other: Any) -> Any:
    return _with_step(logits, Step("divide", other)) if _is_number(other) else NotImplemented


@_handles("neg", "negative", "__neg__")
def _negate(logits: DeferredLogits) -> Any:
    return _with_step(logits, Step("multiply", -1))


@_handles("mul_", "multiply_", "__imul__")
def _multiply_in_place(logits: DeferredLogits, other: Any) -> Any:
    return _with_step_in_place(logits, Step("multiply", other), "mul_") if _is_number(other) else NotImplemented


@_handles("div_", "divide_", "true_divide_", "__itruediv__", "__idiv__")
def _divide_in_place(logits: DeferredLogits, other: Any) -> Any:
    return _with_step_in_place(logits, Step("divide", other), "div_") if _is_number(other) else NotImplemented


@_handles("tanh")
def _tanh(logits: DeferredLogits) -> Any:
    return _with_step(logits, Step("tanh"))


@_handles("tanh_")
def _tanh_in_place(logits: DeferredLogits) -> Any:
    return _with_step_in_place(logits, Step("tanh"), "tanh_")


@_handles("add", "__add__", "__radd__")
def _add(logits: DeferredLogits, other: Any) -> Any:
    """Add a row with one number per class, or other deferred logits."""
    if isinstance(other, type(logits)):
        if other.dense_logits is not None:
            return NotImplemented
        scores = compute.combine(logits.scores, other.scores)
        return NotImplemented if scores is None else logits.derive(scores)
    row_V = _row(logits, other)
    return NotImplemented if row_V is None else _with_step(logits, Step("add", row_V))


@_handles("add_", "__iadd__")
def _add_in_place(logits: DeferredLogits, other: Any) -> Any:
    row_V = _row(logits, other)
    return NotImplemented if row_V is None else _with_step_in_place(logits, Step("add", row_V), "add_")


def _row(logits: DeferredLogits, other: Any) -> Tensor | None:
    """Return a tensor as a row with one number per class, or None if it is something else."""
    is_plain = isinstance(other, Tensor) and not isinstance(other, DeferredLogits) and not is_distributed(other)
    if not is_plain or not 0 < other.dim() <= logits.dim():
        return None
    is_row = other.shape[-1] == other.numel() == logits.shape[-1]
    if not is_row or other.device != logits.device or torch.promote_types(other.dtype, logits.dtype) != logits.dtype:
        return None
    row_V: Tensor = other.reshape(-1)
    return row_V


# -- reductions over the classes ----------------------------------------------------------------------------------


def _result(logits: DeferredLogits, operation: str, result: Tensor | None, dtype: torch.dtype | None = None) -> Any:
    """Return a result in the type that torch would return, and log that it did not need the logits."""
    if result is None:
        return NotImplemented
    logits.scores.log(operation, False)
    return result.to(dtype or logits.scores.result_dtype()) if result.is_floating_point() else result


@_handles("cross_entropy")
def _cross_entropy(
    input: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    is_deprecated = size_average is not None or reduce is not None
    if is_deprecated or not _is_target(input, target) or reduction not in ("mean", "sum", "none"):
        return NotImplemented
    loss = compute.cross_entropy(input.scores, target, weight, ignore_index, reduction, label_smoothing)
    return _result(input, "cross_entropy", loss)


@_handles("nll_loss")
def _nll_loss(
    input: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
) -> Any:
    formula = input.scores.fold()
    if formula is None or not formula.is_normalised:
        return NotImplemented
    return _cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction)


def _is_target(logits: DeferredLogits, target: Any) -> bool:
    """Return whether the targets are class ids, one per row. With more dimensions, torch has the classes second."""
    if not isinstance(target, Tensor) or isinstance(target, DeferredLogits) or logits.dim() > 2:
        return False
    return target.dtype == torch.long and target.shape == logits.shape[:-1] and target.device == logits.device


@_handles("log_softmax")
def _log_softmax(
    input: DeferredLogits, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Any:
    if dim is None or not _is_last(input, dim):
        return NotImplemented
    result_dtype = dtype or input.scores.result_dtype()
    scores: Scores = input.scores
    if result_dtype != scores.dtype:
        scores = scores.with_step(Step("cast", result_dtype), result_dtype)
    scores = scores.with_step(Step("log_softmax"))
    return NotImplemented if scores.fold() is None else input.derive(scores)


@_handles("gather")
def _gather(input: DeferredLogits, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Any:
    if sparse_grad or not _is_last(input, dim) or index.shape[:-1] != input.shape[:-1] or not index.shape[-1]:
        return NotImplemented
    return _result(input, "gather", compute.target_scores(input.scores, index), input.dtype)


@_handles("logsumexp")
def _logsumexp(input: DeferredLogits, dim: Any, keepdim: bool = False) -> Any:
    if not isinstance(dim, int) or not _is_last(input, dim):
        return NotImplemented
    lse = compute.logsumexp(input.scores)
    return _result(input, "logsumexp", lse[..., None] if keepdim and lse is not None else lse)


@_handles("argmax")
def _argmax(input: DeferredLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or not _is_last(input, dim):
        return NotImplemented
    best = compute.argmax(input.scores)
    return _result(input, "argmax", best[..., None] if keepdim and best is not None else best)


@_handles("sum")
def _sum(input: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Sum log-probabilities over the classes, as label smoothing does."""
    if not isinstance(dim, int) or not _is_last(input, dim):
        return NotImplemented
    total = compute.sum_of_log_probs(input.scores)
    return _result(input, "sum", total[..., None] if keepdim and total is not None else total, dtype or input.dtype)
