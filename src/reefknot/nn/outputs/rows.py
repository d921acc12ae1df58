"""Hidden states of any leading shape: the methods of output ends are written for rows, (N, D), and accept (..., D).

    @any_leading_shape
    def log_probs(self, hidden_ND): ...                      # (B, T, D) -> (B, T, V)

    @any_leading_shape_with_targets
    def target_log_probs(self, hidden_ND, targets_N): ...    # (B, T, D), (B, T) -> (B, T)

Both decorators check the arguments, call the method with a matrix of rows and restore the leading shape of the result.
Rows that already are a matrix are passed on unchanged. `rows_only` checks the arguments of a method that accepts
nothing but rows.

Shapes: N rows (one row per token), D dimensions of the hidden state, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.arguments import check_is_tensor

Method = TypeVar("Method", bound=Callable[..., Any])


def any_leading_shape(method: Method) -> Method:
    """Let a method that reads rows, (N, D), accept hidden states with any leading shape, (..., D)."""

    @wraps(method)
    def method_of_any_shape(self: Any, hidden_ND: Tensor, *arguments: Any, **keywords: Any) -> Any:
        check_hidden(self, hidden_ND)
        if hidden_ND.dim() == 2:
            return method(self, hidden_ND, *arguments, **keywords)
        result = method(self, hidden_ND.reshape(-1, self.context_dim), *arguments, **keywords)
        return _restore_leading_shape(result, hidden_ND.shape[:-1])

    return cast(Method, method_of_any_shape)


def any_leading_shape_with_targets(method: Method) -> Method:
    """Let a method that reads rows, (N, D), and their targets, (N,), accept (..., D) and (...)."""

    @wraps(method)
    def method_of_any_shape(self: Any, hidden_ND: Tensor, targets_N: Tensor) -> Any:
        check_hidden(self, hidden_ND)
        check_targets(type(self).__name__, targets_N, hidden_ND)
        rows_ND = hidden_ND if hidden_ND.dim() == 2 else hidden_ND.reshape(-1, self.context_dim)
        result = method(self, rows_ND, targets_N.reshape(-1).long())
        return _restore_leading_shape(result, hidden_ND.shape[:-1])

    return cast(Method, method_of_any_shape)


def rows_only(method: Method) -> Method:
    """Let a method that reads rows, (N, D), raise an `ArgumentError` for hidden states of any other shape."""

    @wraps(method)
    def method_of_rows(self: Any, hidden_ND: Tensor, *arguments: Any, **keywords: Any) -> Any:
        check_hidden(self, hidden_ND)
        if hidden_ND.dim() != 2:
            raise ArgumentError(
                f"{type(self).__name__}: {method.__name__} reads rows, (N, {self.context_dim}), but hidden is "
                f"{tuple(hidden_ND.shape)}; call the end itself, end(hidden, targets), for any leading shape"
            )
        return method(self, hidden_ND, *arguments, **keywords)

    return cast(Method, method_of_rows)


def check_hidden(end: Any, hidden: Any) -> None:
    """Raise an `ArgumentError` unless `hidden` has the shape (..., D) and a type that the end can compute with.

    Args:
        end: The output end.
        hidden: The hidden states.
    """
    name, context_dim = type(end).__name__, end.context_dim
    check_is_tensor(name, "hidden", hidden)
    if not hidden.is_floating_point():
        raise ArgumentError(
            f"{name}: hidden is {tuple(hidden.shape)} and {hidden.dtype}; hidden states must be floating-point "
            f"numbers, (..., {context_dim})"
        )
    if not hidden.dim() or hidden.shape[-1] != context_dim:
        raise ArgumentError(
            f"{name}: hidden is {tuple(hidden.shape)}, but this end reads hidden states of {context_dim} numbers, "
            f"(..., {context_dim})"
        )
    _check_type(end, hidden)


def _check_type(end: Any, hidden: Tensor) -> None:
    """Raise an `ArgumentError` if a matrix of the end maps the hidden states but has another type."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(hidden.device.type):
        return
    if any(parameter.dtype == hidden.dtype for parameter in end.parameters()):
        return  # usually at the first parameter, so that a call takes little time
    if end.maps_hidden():
        parameter_types = " and ".join(sorted({str(parameter.dtype) for parameter in end.parameters()}))
        raise ArgumentError(
            f"{type(end).__name__}: hidden is {tuple(hidden.shape)} and {hidden.dtype}, but the parameters of the end "
            f"are {parameter_types}; convert one of them, or use torch.autocast"
        )


def check_targets(name: str, targets: Any, hidden: Tensor) -> None:
    """Raise an `ArgumentError` unless `targets` has one integer per hidden state. Values are not checked.

    Args:
        name: The name of the output end, for the message.
        targets: The target classes.
        hidden: The hidden states, with shape (..., D).
    """
    check_is_tensor(name, "targets", targets)
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ArgumentError(
            f"{name}: targets is {tuple(targets.shape)} and {targets.dtype}; classes must be integers, one per "
            "hidden state"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ArgumentError(
            f"{name}: targets is {tuple(targets.shape)} but hidden is {tuple(hidden.shape)}; pass one class per "
            f"hidden state, {tuple(hidden.shape[:-1])}"
        )


def _restore_leading_shape(result: Any, leading_shape: torch.Size) -> Any:
    """Reshape the first dimension, N, of a tensor or of a tuple of tensors to `leading_shape`."""
    if isinstance(result, tuple):
        return tuple(_restore_leading_shape(tensor, leading_shape) for tensor in result)
    return result.reshape(leading_shape + result.shape[1:])
