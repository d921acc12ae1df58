"""Deferred logits: a tensor with the shape of the logits that stores only what they are computed from.

    logits = DeferredLogits.defer(scores)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), targets)      # our kernel; the logits are never computed

`__torch_function__` sees every torch operation on the tensor. If `operations` has the operation, it works on the
`Scores` of the tensor. Any other operation gets real logits, which are the same as without deferring.

The tensor is an ordinary node of the autograd graph, so gradients are correct even for code that torch does not show to
`__torch_function__`, such as other people's autograd functions.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from reefknot.errors import ArgumentError
from reefknot.hf.scores import Scores

Handler = Callable[..., Any]

HANDLERS: dict[str, Handler] = {}
"""Operations on deferred logits by name. A handler returns `NotImplemented` if it needs real logits."""

_METADATA = {
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "names", "output_nr"),
    *("is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested", "is_mkldnn"),
    *("itemsize", "nbytes", "_backward_hooks", "_base", "is_xla", "is_sparse_csr", "is_ipu", "is_vulkan", "is_maia"),
}
"""Attributes that the tensor has itself."""
_METADATA_METHODS = {
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "get_device", "__len__", "__hash__"),
    *("is_same_size", "is_conj", "is_neg", "has_names", "register_hook", "_is_view", "is_pinned"),
}
"""Methods that do not look at the values."""
_ATTRIBUTE_ACCESS = ("__get__", "__set__", "__delete__")
_IN_PLACE_OPERATORS = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__idiv__"),
}


class DeferredLogits(Tensor):
    """Logits that are computed only if an operation needs them."""

    scores: Scores
    dense_logits: Tensor | None
    """The real logits, if an operation has needed them."""
    aliases: list[weakref.ref[DeferredLogits]]
    """All deferred logits that would share memory with these, if they were real."""

    @staticmethod
    def wrap(scores: Scores) -> DeferredLogits:
        """Make deferred logits without a place in the autograd graph."""
        logits: DeferredLogits = Tensor._make_wrapper_subclass(
            DeferredLogits, scores.shape, dtype=scores.dtype, device=scores.hidden.device
        )
        logits.scores = scores
        logits.dense_logits = None
        logits.aliases = [weakref.ref(logits)]
        return logits

    @staticmethod
    def defer(scores: Scores, alias_of: DeferredLogits | None = None) -> DeferredLogits:
        """Make deferred logits. Pass `alias_of` if real logits would share their memory with others.

        Logits that are deferred while gradients are disabled never get gradients, also if they are used later.
        """
        if not torch.is_grad_enabled():
            scores = scores.detached()
        logits: DeferredLogits = _Defer.apply(scores, *scores.tensors)  # type: ignore[no-untyped-call]
        if alias_of is not None:
            alias_of.aliases.extend(logits.aliases)
            logits.aliases = alias_of.aliases
        return logits

    def derive(self, scores: Scores, is_alias: bool = False) -> DeferredLogits:
        """Return other logits that are computed from these. Real aliases would share memory with them."""
        return DeferredLogits.defer(scores, alias_of=self if is_alias else None)

    def materialise(self, operation: str) -> Tensor:
        """Return the real logits, and log the operation that needs them."""
        if self.dense_logits is not None:
            return self.dense_logits
        self.scores.log(operation, True)
        real = self.scores.dense()
        if torch.is_grad_enabled() or not self.requires_grad:
            self.dense_logits = real  # a later operation may need gradients
        return real

    def check_not_shared(self, operation: str) -> None:
        """Raise an error if an in-place operation would have to change other deferred logits too."""
        if sum(reference() is not None for reference in self.aliases) > 1:
            raise ArgumentError(
                f"logits_free: the in-place operation {operation} on deferred logits would change views of the same "
                "logits; use the operation that is not in-place, or call undo()"
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Describe the tensor without computing it."""
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the scores if possible, and otherwise on the real logits."""
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        name = getattr(func, "__name__", str(func))
        attribute = name in _ATTRIBUTE_ACCESS
        if attribute:
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        logits = args[0] if args and isinstance(args[0], DeferredLogits) else None
        if logits is not None and logits.dense_logits is None:
            if name in (_METADATA if attribute else _METADATA_METHODS):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            handler = HANDLERS.get(name)
            if handler is not None and not attribute and _accepts(handler, args, kwargs):
                result = handler(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return _run_on_real_logits(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation below autograd, which takes care of the gradients."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default) and args[0].dense_logits is None:
            return DeferredLogits.wrap(args[0].scores)
        name = str(func)
        real_args, real_kwargs = tree_map(lambda value: _unwrap(value, name), (tuple(args), kwargs or {}))
        return func(*real_args, **real_kwargs)


class _Defer(torch.autograd.Function):
    """The place of deferred logits in the autograd graph: its gradients are those of the real logits."""

    @staticmethod
    def forward(ctx: Any, scores: Scores, *tensors: Tensor) -> DeferredLogits:
        ctx.scores = scores
        ctx.save_for_backward(*tensors)
        return DeferredLogits.wrap(scores)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        tensors = tuple(
            tensor.detach().requires_grad_(is_needed)
            for tensor, is_needed in zip(ctx.saved_tensors, needed, strict=True)
        )
        with torch.enable_grad():
            logits = ctx.scores.with_tensors(tensors).dense()
        inputs = [tensor for tensor, is_needed in zip(tensors, needed, strict=True) if is_needed]
        grads = iter(torch.autograd.grad(logits, inputs, grad))
        return (None, *(next(grads) if is_needed else None for is_needed in needed))


def _run_on_real_logits(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the real logits. An in-place operation makes them the values of the deferred logits."""
    changed = args[0] if args and _is_in_place(func, name) and isinstance(args[0], DeferredLogits) else None
    if changed is not None and changed.dense_logits is None:
        changed.check_not_shared(name)
        changed.dense_logits = changed.materialise(name)
    real_args, real_kwargs = tree_map(lambda value: _unwrap(value, name), (tuple(args), kwargs))
    return func(*real_args, **real_kwargs)


def _unwrap(value: Any, operation: str) -> Any:
    return value.materialise(operation) if isinstance(value, DeferredLogits) else value


def _is_in_place(func: Any, name: str) -> bool:
    """Return whether an operation changes its first argument."""
    if name in _IN_PLACE_OPERATORS or getattr(func, "__name__", "") in ("__set__", "__delete__"):
        return True
    return name.endswith("_") and not name.endswith("__")


@cache
def _signature(handler: Handler) -> inspect.Signature:
    return inspect.signature(handler)


def _accepts(handler: Handler, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a handler knows all arguments of a call."""
    try:
        _signature(handler).bind(*args, **kwargs)
    except TypeError:
        return False
    return True
