"""Class vectors computed once and given to many calls.

What a classifier computes from a table (a label network, vectors of unit norm) is the same for all windows of an
evaluation and for all micro-batches of an optimiser step.

Shapes: V classes, D width of the class vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from reefknot.kernels.scores import at_least_float32


class Held:
    """What gives a classifier the vectors of all classes while they are held."""

    def weight(self, compute: Callable[[], Tensor]) -> Tensor:
        """w_VD, from `compute` where it has to be."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a classifier holds nothing: nobody would let go of it."""


class Kept(Held):
    """For evaluation: computed once, without gradients. A call that wants gradients computes for itself."""

    def __init__(self) -> None:
        self._weight: Tensor | None = None

    def weight(self, compute: Callable[[], Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            return compute()
        if self._weight is None:
            self._weight = compute()
        return self._weight


class Shared(Held):
    """For the micro-batches of an optimiser step: computed once, and one backward through what computes it.

    All micro-batches but the last are given a leaf, which collects their gradients. The last is given the weight
    itself, in whose gradient the collected ones are added: what lies below is reached by the last backward alone.
    """

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._leaf: Tensor | None = None
        self._last = False

    def weight(self, compute: Callable[[], Tensor]) -> Tensor:
        if not torch.is_grad_enabled():
            return compute()
        if self._weight is None:
            weight_VD = compute()
            # Under autocast a network may end in half precision, in which gradients must not be added up.
            self._weight = at_least_float32(weight_VD) if _under_autocast(weight_VD) else weight_VD
        if self._last or self._weight.grad_fn is None:  # None: a parameter, which collects gradients of its own
            return self._weight
        if self._leaf is None:
            self._leaf = self._weight.detach().requires_grad_()
            self._weight.register_hook(partial(_with_collected, self._leaf))  # type: ignore[no-untyped-call]
        return self._leaf

    def join(self) -> None:
        """The last micro-batch follows."""
        self._last = True

    def check_joined(self) -> None:
        """Refuse to lose the gradients that were collected."""
        if self._leaf is not None and self._leaf.grad is not None:
            raise RuntimeError(
                "class vectors were shared, but no last micro-batch took on the gradients of those before it; "
                "join before the last one, and call its backward inside the context"
            )


def _with_collected(leaf: Tensor, gradient: Tensor) -> Tensor:
    collected, leaf.grad = leaf.grad, None
    return gradient if collected is None else collected.add_(gradient)


def _under_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)
