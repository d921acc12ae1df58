"""Class vectors that are computed once and used in many calls.

The class vectors that a classifier computes from a table, such as those of a label encoder, are the same for all
windows of an evaluation and for all micro-batches of an optimiser step.

Shapes: V classes, D dimensions of the class vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reefknot.kernels.scores import at_least_float32


class WeightCache:
    """A source of the vectors of all classes, for a classifier that has one."""

    def weight(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return w_VD, calling `compute` if it is not cached."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a classifier has no cache, because nothing would ever remove it."""


class EvaluationCache(WeightCache):
    """Computes the class vectors once, without gradients. A call that needs gradients does not use the cache."""

    def __init__(self) -> None:
        self._weight: Tensor | None = None

    def weight(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return w_VD, calling `compute` in the first call without gradients and in every call with gradients."""
        if torch.is_grad_enabled():
            return compute()
        if self._weight is None:
            self._weight = compute()
        return self._weight


class StepCache(WeightCache):
    """Computes the class vectors once for all micro-batches of an optimiser step, with one backward pass through them.

    All micro-batches except the last receive a detached leaf, which accumulates their gradients. The last one receives
    the weight itself, and the accumulated gradients are added to its gradient. So only the last backward pass continues
    into what computed the weight.
    """

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._leaf: Tensor | None = None
        self._last = False

    def weight(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return w_VD, calling `compute` in the first micro-batch and in every call without gradients."""
        if not torch.is_grad_enabled():
            return compute()
        if self._weight is None:
            weight_VD = compute()
            # Under autocast a label encoder may end in half precision, in which gradients must not be accumulated.
            self._weight = at_least_float32(weight_VD) if _under_autocast(weight_VD) else weight_VD
        if self._last or self._weight.grad_fn is None:  # None: a parameter, which accumulates gradients itself
            return self._weight
        if self._leaf is None:
            self._leaf = self._weight.detach().requires_grad_()
            self._weight.register_hook(partial(_add_accumulated, self._leaf))  # type: ignore[no-untyped-call]
        return self._leaf

    def join(self) -> None:
        """Announce that the next micro-batch is the last."""
        self._last = True

    def check_joined(self) -> None:
        """Raise an error if accumulated gradients would be lost."""
        if self._leaf is not None and self._leaf.grad is not None:
            raise RuntimeError(
                "class vectors were shared between micro-batches, but the last one did not receive the gradients of "
                "the others; join before the last one, and call its backward inside the context"
            )


def _add_accumulated(leaf: Tensor, gradient: Tensor) -> Tensor:
    accumulated, leaf.grad = leaf.grad, None
    return gradient if accumulated is None else accumulated.add_(gradient)


def _under_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)
