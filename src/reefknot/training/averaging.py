"""Averaged stochastic gradient descent (Polyak and Juditsky 1992): the mean of all iterates, not the last of them, is
the model that training ends with. AWD-LSTM (Merity et al. 2018) begins to average when plain descent no longer
helps, and calls it NT-ASGD.

The mean is that of every iterate since averaging began. `torch.optim.ASGD` with `t0 = 0` leaves out the first of them:
its weight of a step is reckoned in the step before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from reefknot.settings import Count, Settings


class AveragingSettings(Settings):
    """Validate and keep the mean of the iterates, while training goes on from the last one."""

    start: Annotated[
        Literal["nonmonotone", "at_once"],
        Field(
            description="nonmonotone: once a validation loss is worse than the best of more than `interval` epochs "
            "ago; at_once: from the first step on"
        ),
    ]
    interval: Annotated[Count, Field(description="epochs that the nonmonotone rule does not look at")] = 5


class Averages:
    """The running mean of a model's parameters, one `update` per optimiser step; before the first, what they are now.

    Nothing waits for the device, and `update` can be captured in a CUDA graph.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self.means = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        device = next(iter(self.means.values())).device
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        """Iterates so far."""

    @classmethod
    def at_once(cls, model: nn.Module, settings: AveragingSettings | None) -> Averages | None:
        """Those that training has before its first step; None: it has none yet."""
        return cls(model) if settings is not None and settings.start == "at_once" else None

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are now into the mean."""
        means = list(self.means.values())
        self.count += 1
        steps = torch._foreach_sub(list(self._parameters.values()), means)
        torch._foreach_mul_(steps, self.count.reciprocal().to(means[0].dtype))
        torch._foreach_add_(means, steps)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model with the means for parameters; afterwards with its own again. The tensors stay the same ones."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._put(self.means)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        torch._foreach_copy_(list(self._parameters.values()), list(values.values()))
