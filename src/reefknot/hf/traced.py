"""Deferred logits while `torch.compile` traces a model.

A compiler cannot trace a tensor without values, so the output layer of a model that is being compiled returns a
`TracedLogits`. It is an ordinary Python object that works like `DeferredLogits`, with the same operations. At the end
of the model's forward pass, `defer_outputs` replaces it by deferred logits. This happens outside of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.hf.deferred import HANDLERS, DeferredLogits
from reefknot.hf.scores import Scores


class TracedLogits:
    """Logits in a graph that is being traced."""

    is_leaf = False
    dense_logits = None

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.is_shared = False
        """Whether real logits would share memory with other logits."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the logits."""
        return self.scores.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of the logits."""
        return self.scores.dtype

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.scores.hidden.device

    @property
    def requires_grad(self) -> bool:
        """Whether the logits get a gradient."""
        return any(tensor.requires_grad for tensor in self.scores.tensors)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of a dimension."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        """Return the size of the first dimension."""
        return self.shape[0]

    def derive(self, scores: Scores, is_alias: bool = False) -> TracedLogits:
        """Return other logits that are computed from these."""
        logits = TracedLogits(scores)
        if is_alias:
            self.is_shared = logits.is_shared = True
        return logits

    def check_not_shared(self, operation: str) -> None:
        """Raise an error if an in-place operation might have to change other logits too."""
        if self.is_shared:
            raise ArgumentError(
                f"logits_free: the in-place operation {operation} on a view of deferred logits does not work with "
                "torch.compile; use the operation that is not in-place, or call undo()"
            )

    def materialise(self, operation: str) -> Tensor:
        """Return the real logits, and log the operation that needs them."""
        self.scores.log(operation, True)
        return self.scores.dense()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch on the scores if possible, and otherwise on the real logits."""
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        name = func.__name__
        if name in ("add", "__add__", "__radd__") and not isinstance(args[0], TracedLogits):
            args = (args[1], args[0])  # torch.compile swaps the operands
        handler = HANDLERS.get(name)
        if handler is not None and args and isinstance(args[0], TracedLogits):
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        real_args = [arg.materialise(name) if isinstance(arg, TracedLogits) else arg for arg in args]
        real_kwargs = {
            key: value.materialise(name) if isinstance(value, TracedLogits) else value for key, value in kwargs.items()
        }
        return func(*real_args, **real_kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real logits that deferred logits do not have."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.materialise(name), name)


def _add_method(name: str) -> None:
    """Give traced logits a method that deferred logits have."""

    def method(self: TracedLogits, *args: Any, **kwargs: Any) -> Any:
        result = HANDLERS[name](self, *args, **kwargs)
        if result is NotImplemented:
            return getattr(self.materialise(name), name)(*args, **kwargs)
        return result

    setattr(TracedLogits, name, method)


def add_methods() -> None:
    """Give traced logits all methods of deferred logits."""
    for name in HANDLERS:
        _add_method(name)


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def defer_outputs(outputs: Any) -> Any:
    """Replace the traced logits in the outputs of a model, a tuple or a dictionary, by deferred logits."""

    def defer(value: Any) -> Any:
        return DeferredLogits.defer(value.scores.stamped()) if isinstance(value, TracedLogits) else value

    if isinstance(outputs, tuple):
        return tuple(defer(value) for value in outputs)
    if isinstance(outputs, dict):
        for name, value in list(outputs.items()):
            if isinstance(value, TracedLogits):
                outputs[name] = defer(value)
    return defer(outputs)
