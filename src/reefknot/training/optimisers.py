"""Optimisers: torch's own, with the settings that the papers state. No step waits for a GPU.

Nesterov's momentum is torch's: fairseq's keeps the rate inside its velocity and rescales it whenever the rate changes,
which makes the same steps (Baevski & Auli 2019 train so, with momentum 0.99).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.settings import NonNegative, Positive, Probability, check_rates

LearningRate = Annotated[Positive, Field(description="rate that the schedule multiplies")]


class SGD(torch.optim.SGD):
    """Stochastic gradient descent."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: LearningRate,
        momentum: Annotated[Probability, Field(description="0 in the recurrent papers; Baevski & Auli: 0.99")] = 0.0,
        nesterov: Annotated[
            bool, Field(description="look ahead: the gradient counts with the momentum to come")
        ] = False,
        weight_decay: Annotated[NonNegative, Field(description="added to the gradient as weight_decay * p")] = 0.0,
        decoupled_decay: Annotated[
            Probability, Field(description="taken off each p after its update, whatever the rate (Gal: 1e-7)")
        ] = 0.0,
    ) -> None:
        check_rates("sgd", momentum=momentum, decoupled_decay=decoupled_decay)
        _check_signs("sgd", learning_rate, weight_decay=weight_decay)
        if nesterov and not momentum:
            raise SettingsError("sgd: nesterov = true looks ahead along the momentum, which is 0; give a momentum")
        held = list(parameters)
        super().__init__(
            held,
            lr=_rate(held, learning_rate),
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            fused=held[0].is_cuda or None,
        )
        for group in self.param_groups:
            group["decoupled_decay"] = decoupled_decay
        if momentum:
            # Torch's fused kernel leaves them as it finds them where the first update is refused.
            for parameter in held:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

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


class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), which every parameter has, biases too."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: LearningRate,
        beta1: Annotated[Probability, Field(description="memory of the mean of the gradients")] = 0.9,
        beta2: Annotated[Probability, Field(description="memory of the mean of their squares")] = 0.98,
        epsilon: Annotated[Positive, Field(description="added to the root of the mean square")] = 1e-8,
        weight_decay: Annotated[
            NonNegative, Field(description="share of each p, times the rate, that an update takes off")
        ] = 0.01,
    ) -> None:
        check_rates("adamw", beta1=beta1, beta2=beta2)
        _check_signs("adamw", learning_rate, epsilon=epsilon, weight_decay=weight_decay)
        held = list(parameters)
        on_gpu = held[0].is_cuda
        super().__init__(
            held,
            lr=_rate(held, learning_rate),
            betas=(beta1, beta2),
            eps=epsilon,
            weight_decay=weight_decay,
            fused=on_gpu or None,
            capturable=on_gpu,
        )


def _rate(parameters: list[nn.Parameter], rate: float) -> float | Tensor:
    """On a GPU in a tensor: a captured step reads its rate where it finds it, and torch's fused kernels alone can."""
    return torch.tensor(rate, device=parameters[0].device) if parameters[0].is_cuda else rate


def _check_signs(who: str, learning_rate: float, **values: float) -> None:
    """A recipe is checked against the annotations, a call from Python is not."""
    if not learning_rate > 0:
        raise SettingsError(f"{who}: learning_rate = {learning_rate}: must be above 0")
    for name, value in values.items():
        if not value >= 0:
            raise SettingsError(f"{who}: {name} = {value}: must be at least 0")
