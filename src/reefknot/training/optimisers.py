"""Optimisers: torch's own, with the settings that the papers state. No step waits for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from reefknot.settings import NonNegative, Positive, Probability

LearningRate = Annotated[Positive, Field(description="rate of the first epoch; the schedule multiplies it")]


class SGD(torch.optim.SGD):
    """Stochastic gradient descent."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: LearningRate,
        momentum: Annotated[Probability, Field(description="0 in the recurrent papers")] = 0.0,
        weight_decay: Annotated[NonNegative, Field(description="added to the gradient as weight_decay * p")] = 0.0,
        decoupled_decay: Annotated[
            Probability, Field(description="taken off each p after its update, whatever the rate (Gal: 1e-7)")
        ] = 0.0,
    ) -> None:
        held = list(parameters)
        on_gpu = held[0].is_cuda
        # A captured step reads its rate where it finds it, and torch's fused kernel alone can.
        rate = torch.tensor(learning_rate, device=held[0].device) if on_gpu else learning_rate
        super().__init__(held, lr=rate, momentum=momentum, weight_decay=weight_decay, fused=on_gpu or None)
        for group in self.param_groups:
            group["decoupled_decay"] = decoupled_decay

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update, then decay. An update that is refused (torch's `found_inf`) does not decay either."""
        loss = super().step(closure)
        refused: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            decay = group["decoupled_decay"]
            if decay:
                # Not p *= 1 - decay: float32 has no number between 1 - 1.2e-7 and 1 - 6e-8.
                lost = torch._foreach_mul(group["params"], decay if refused is None else decay * (1.0 - refused))
                torch._foreach_sub_(group["params"], lost)
        return loss
