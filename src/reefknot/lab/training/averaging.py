"""Averaged stochastic gradient descent (Polyak and Juditsky 1992): the mean of all iterates, not the last of them, is
the model that training ends with. AWD-LSTM (Merity et al. 2018) begins to average when plain descent no longer
helps, and calls it NT-ASGD.

The mean is that of every iterate since averaging began. `torch.optim.ASGD` with `t0 = 0` leaves out the first of them:
its weight of a step is reckoned in the step before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from reefknot.lab.config.parts import describe_values
from reefknot.lab.config.settings import Count, Settings


class AveragingSettings(Settings):
    """Validate and keep the mean of the iterates, while training goes on from the last one."""

    start: Annotated[Literal["nonmonotone", "at_once"], Field(description=describe_values("training.averaging.start"))]
    interval: Annotated[Count, Field(description="validations that the nonmonotone rule does not look at")] = 5


class Averages:
    """The running mean of named parameters, one `update` per optimiser step; before the first, what they are now.

    Nothing waits for the device, and `update` can be captured in a CUDA graph.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self.means = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        device = next(iter(self.means.values())).device
        self.count = torch.zeros((), dtype=torch.float64, device=device)
        """Iterates so far."""

    @classmethod
    def at_once(cls, parameters: Mapping[str, nn.Parameter], settings: AveragingSettings | None) -> Averages | None:
        """Those that training has before its first step; None: it has none yet."""
        return cls(parameters) if settings is not None and settings.start == "at_once" else None

    @torch.no_grad()
    def update(self, made: Tensor) -> None:
        """Take the parameters as they are now into the mean; `made` is 0 where they are those of the last time."""
        means = list(self.means.values())
        self.count += made
        steps = torch._foreach_sub(list(self._parameters.values()), means)
        torch._foreach_mul_(steps, (made / self.count.clamp(min=1.0)).to(means[0].dtype))
        torch._foreach_add_(means, steps)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The parameters with the means for values; afterwards with their own again. The tensors stay the same ones."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._put(self.means)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        torch._foreach_copy_(list(self._parameters.values()), list(values.values()))
