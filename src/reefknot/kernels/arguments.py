"""Checks of the arguments of the public functions on linear classifiers: `linear_cross_entropy` and its relatives.

Every check raises an `ArgumentError` whose message begins with the name of the function and says what to pass instead.
`weight` here means the weight of the classifier, one vector per class, which torch calls `linear_weight`.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from reefknot.errors import ArgumentError, describe_type
from reefknot.kernels.choice import Choice, Impl, current_choice
from reefknot.kernels.columns import ClassVectors, column_parts
from reefknot.kernels.scores import IGNORE, ScoreTransform, is_class

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_classifier(function: str, hidden: Any, weight: Any, bias: Any) -> None:
    """Raise an error unless these are the hidden states, the weight and the bias of a linear classifier."""
    matrices = (("linear_weight", part) for part in column_parts(weight))
    for name, argument in (("input", hidden), *matrices, ("linear_bias", bias)):
        if name == "linear_bias" and argument is None:
            continue
        check_float_tensor(function, name, argument)
    if len(weight.shape) != 2 or not hidden.dim() or weight.shape[-1] != hidden.shape[-1]:
        raise ArgumentError(
            f"{function}: input is {tuple(hidden.shape)} and linear_weight is {tuple(weight.shape)}; they must be "
            "(..., dim) and (classes, dim), with the same dim"
        )
    check_has_classes(function, weight)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            f"{function}: linear_bias is {tuple(bias.shape)}; with {weight.shape[0]} classes it must be "
            f"({weight.shape[0]},)"
        )


def check_has_classes(function: str, weight: ClassVectors) -> None:
    """Raise an error if the weight has no class or no dimension."""
    if not weight.shape[0] or not weight.shape[-1]:
        raise ArgumentError(
            f"{function}: linear_weight is {tuple(weight.shape)}; it needs at least one class and one dimension"
        )


def check_float_tensor(function: str, name: str, argument: Any) -> None:
    """Raise an error unless the argument is a dense tensor of a type that the kernels compute with."""
    check_is_tensor(function, name, argument)
    if argument.dtype not in _FLOATS:
        raise ArgumentError(f"{function}: {name} is {argument.dtype}; it must be float16, bfloat16, float32 or float64")


def check_is_tensor(function: str, name: str, argument: Any) -> None:
    """Raise an error unless the argument is a dense tensor."""
    if not isinstance(argument, Tensor):
        attribute = name.split()[-1].removeprefix("linear_")
        hint = f"; pass its {attribute}, not the layer" if isinstance(argument, torch.nn.Module) else ""
        raise ArgumentError(f"{function}: {name} is {describe_type(argument)}; it must be a tensor{hint}")
    if argument.layout != torch.strided:
        layout = str(argument.layout).removeprefix("torch.")
        raise ArgumentError(f"{function}: {name} has the layout {layout}; pass a dense tensor")
    if argument.is_nested:
        raise ArgumentError(f"{function}: {name} is a nested tensor; pass its values, a dense tensor")
    if is_distributed(argument):
        raise ArgumentError(f"{function}: {name} is a DTensor; pass a plain tensor, for example its full_tensor()")


def is_distributed(tensor: Any) -> bool:
    """Return whether a tensor is a `DTensor`. Importing that class to ask would take long."""
    return hasattr(tensor, "device_mesh")


def check_target_type(function: str, hidden: Tensor, target: Any) -> None:
    """Raise an error unless the target has one integer per hidden state."""
    check_is_tensor(function, "target", target)
    if not has_integers(target):
        raise ArgumentError(f"{function}: target is {target.dtype}; class ids must be integers")
    if target.shape != hidden.shape[:-1]:
        raise ArgumentError(
            f"{function}: target is {tuple(target.shape)} but input is {tuple(hidden.shape)}; pass one id per row, "
            f"{tuple(hidden.shape[:-1])}"
        )


def has_integers(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are integers."""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def check_devices(function: str, *tensors: Tensor | None) -> None:
    """Raise an error unless all tensors are on one device."""
    devices = {str(tensor.device) for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ArgumentError(f"{function}: the arguments are on {' and '.join(sorted(devices))}; put them on one device")


def check_target_values(function: str, targets_N: Tensor, target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise an error unless every target is a class or ignored. Do nothing if the values cannot be read.

    Args:
        function: The name of the public function.
        targets_N: The targets, with `IGNORE` in place of `ignore_index`.
        target: The targets as the user passed them.
        num_classes: Number of classes.
        ignore_index: The value of targets that are ignored.
    """
    if needs_operators(target) or is_capturing(target):
        return
    outside_N = (targets_N != IGNORE) & ~is_class(targets_N, num_classes)
    try:
        has_outsider = bool(outside_N.any())
    except RuntimeError:  # torch.vmap does not let its functions read values
        return
    if has_outsider:
        row = int(outside_N.nonzero()[0])
        raise ArgumentError(
            f"{function}: target {int(target.reshape(-1)[row])} of row {row} is not a class; "
            f"use 0 to {num_classes - 1}, or {ignore_index} (ignore_index) to ignore a row"
        )


def replace_ignore_index(targets_N: Tensor, ignore_index: int, num_classes: int) -> Tensor:
    """Replace `ignore_index` by `IGNORE`, and targets that happen to equal `IGNORE` by an id that is out of range."""
    if ignore_index == IGNORE:
        return targets_N
    other_targets_N = torch.where(targets_N == IGNORE, num_classes, targets_N)
    return torch.where(targets_N == ignore_index, IGNORE, other_targets_N)


def check_is_number(function: str, name: str, value: Any, hint: str = "") -> None:
    """Raise an error unless the value is a number of Python or numpy."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(f"{function}: {name} is {describe_type(value)}; it must be a Python number{hint}")


def check_integer(function: str, name: str, value: Any) -> None:
    """Raise an error unless the value is an integer that fits into 64 bits, as targets do."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentError(f"{function}: {name} = {value!r}: must be an integer")
    if not -(2**63) <= int(value) < 2**63:
        raise ArgumentError(f"{function}: {name} = {value}: must fit into 64 bits, as targets do")


def check_number(function: str, name: str, value: Any, least: float, above: bool = False) -> None:
    """Raise an error unless the value is a finite number of at least `least`, or above it."""
    if torch.compiler.is_compiling():
        return  # a graph may have symbols in place of numbers
    check_is_number(function, name, value)
    if not value < math.inf or value < least or (above and value == least):
        bound = f"above {least:g}" if above else f"{least:g} or more"
        raise ArgumentError(f"{function}: {name} = {value!r}: must be {bound}, and finite")


def score_transform(function: str, logit_scale: Any, softcap: float | None, temperature: float) -> ScoreTransform:
    """Return the transform of the scores, or raise an error if a setting is out of range."""
    check_number(function, "temperature", temperature, 0, above=True)
    if softcap is not None:
        check_number(function, "softcap", softcap, 0, above=True)
    if not torch.compiler.is_compiling():
        hint = "; multiply input by a scale that is learned" if isinstance(logit_scale, Tensor) else ""
        check_is_number(function, "logit_scale", logit_scale, hint)
        if not math.isfinite(logit_scale) or logit_scale == 0:
            raise ArgumentError(f"{function}: logit_scale = {logit_scale!r}: must be a finite number other than 0")
    return ScoreTransform(float(logit_scale), None if softcap is None else float(softcap), float(temperature))


def choose(impl: Impl | None, memory: float | None) -> Choice:
    """Return the implementation and working memory of a call. What is None is the choice of `using`."""
    choice = current_choice()
    if impl is None and memory is None:
        return choice
    return Choice(impl or choice.impl, choice.memory if memory is None else memory)


def has_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape but no values: it is on the meta device, or a `FakeTensor`."""
    return tensor.is_meta or hasattr(tensor, "fake_mode")


def is_capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being captured. Values cannot be read then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def needs_operators(tensor: Tensor) -> bool:
    """Return whether a loss must be an operator (`ops`): in a compiled or exported graph, or without values."""
    return torch.compiler.is_compiling() or has_no_values(tensor)
