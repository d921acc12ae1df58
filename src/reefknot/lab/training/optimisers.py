"""Optimisers: torch's own, with the settings that the papers state. No step waits for a GPU, nor is one made there
that `found_inf` refuses, which torch's fused kernels read before they change anything.

Nesterov's momentum is torch's: fairseq's keeps the rate inside its velocity and rescales it whenever the rate changes,
which makes the same steps (Baevski & Auli 2019 train so, with momentum 0.99).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.bounds import NonNegative, Positive, Probability, check_rates


class SGD(torch.optim.SGD):
    """Stochastic gradient descent.

    Args:
        parameters: The parameters to update.
        learning_rate: Learning rate, which the schedule multiplies.
        momentum: Momentum. It is 0 in the recurrent papers and 0.99 in Baevski & Auli.
        nesterov: Use Nesterov's momentum.
        weight_decay: Weight decay that is added to the gradient, as weight_decay * p.
        decoupled_decay: Share of each parameter that is subtracted after its update, independently of the learning
            rate. Gal uses 1e-7.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: Positive,
        momentum: Probability = 0.0,
        nesterov: bool = False,
        weight_decay: NonNegative = 0.0,
        decoupled_decay: Probability = 0.0,
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
    """Adam with decoupled weight decay of all parameters, including biases (Loshchilov & Hutter 2019).

    Args:
        parameters: The parameters to update.
        learning_rate: Learning rate, which the schedule multiplies.
        beta1: Decay rate of the running mean of the gradients.
        beta2: Decay rate of the running mean of the squared gradients.
        epsilon: Added to the root of the mean square.
        weight_decay: Share of each parameter, times the learning rate, that an update subtracts.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: Positive,
        beta1: Probability = 0.9,
        beta2: Probability = 0.98,
        epsilon: Positive = 1e-8,
        weight_decay: NonNegative = 0.01,
    ) -> None:
        check_rates("adamw", beta1=beta1, beta2=beta2)
        _check_signs("adamw", learning_rate, epsilon=epsilon, weight_decay=weight_decay)
        held = list(parameters)
        super().__init__(held, _rate(held, learning_rate), (beta1, beta2), epsilon, weight_decay, **_fused(held))


class Adam(torch.optim.Adam):
    """Adam (Kingma & Ba 2015), by default with the constants that Vaswani et al. (2017) use for translation.

    Args:
        parameters: The parameters to update.
        learning_rate: Learning rate, which the schedule multiplies.
        beta1: Decay rate of the running mean of the gradients.
        beta2: Decay rate of the running mean of the squared gradients.
        epsilon: Added to the root of the mean square.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: Positive,
        beta1: Probability = 0.9,
        beta2: Probability = 0.98,
        epsilon: Positive = 1e-9,
    ) -> None:
        check_rates("adam", beta1=beta1, beta2=beta2)
        _check_signs("adam", learning_rate, epsilon=epsilon)
        held = list(parameters)
        super().__init__(held, _rate(held, learning_rate), (beta1, beta2), epsilon, **_fused(held))


class Adadelta(torch.optim.Optimizer):
    """Adadelta (Zeiler 2012): the length of a step follows from earlier steps, independently of the gradient's scale.

        v += (1 - rho) (g^2 - v)
        d = sqrt(u + epsilon) / sqrt(v + epsilon) g
        u += (1 - rho) (d^2 - u)
        p -= rate d

    Torch's own has no fused kernel, so on a GPU it cannot skip an update with a gradient that is not finite. These
    formulas can, with zero for 1 - rho and g.

    Args:
        parameters: The parameters to update.
        learning_rate: Learning rate, which the schedule multiplies.
        rho: Decay rate of the running mean squares of gradients and steps.
        epsilon: Added to both mean squares. It determines the length of the first steps.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        learning_rate: Positive = 1.0,
        rho: Probability = 0.95,
        epsilon: Positive = 1e-6,
    ) -> None:
        check_rates("adadelta", rho=rho)
        _check_signs("adadelta", learning_rate)
        if not epsilon > 0:
            raise SettingsError(f"adadelta: epsilon = {epsilon}: must be above 0, since the first step follows from it")
        held = list(parameters)
        super().__init__(held, {"lr": _rate(held, learning_rate), "rho": rho, "eps": epsilon})
        for parameter in held:
            self.state[parameter] = {name: torch.zeros_like(parameter) for name in ("square_avg", "acc_delta")}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update. One that is refused (`found_inf`, as torch's fused optimisers read it) changes nothing."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            changed: list[Tensor] = [each for each in group["params"] if each.grad is not None]
            if changed:
                self._change(changed, group)
        return loss

    def _change(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        share: float | Tensor = 1.0 - group["rho"]
        refused: Tensor | None = getattr(self, "found_inf", None)
        if refused is not None:
            # Not g * 0: where an update is refused, g may be anything.
            gradients = [each.where(refused == 0, 0.0) for each in gradients]
            share = share * (1.0 - refused.to(parameters[0].dtype))
        squares, deltas = ([self.state[each][name] for each in parameters] for name in ("square_avg", "acc_delta"))
        _remember(squares, gradients, share)
        steps, roots = (list(torch._foreach_add(each, group["eps"])) for each in (deltas, squares))
        torch._foreach_sqrt_(steps)
        torch._foreach_sqrt_(roots)
        torch._foreach_div_(steps, roots)
        torch._foreach_mul_(steps, gradients)
        _remember(deltas, steps, share)
        torch._foreach_mul_(steps, group["lr"])
        torch._foreach_sub_(parameters, steps)


def _remember(means: list[Tensor], values: list[Tensor], share: float | Tensor) -> None:
    """Let squares have a share in their running means."""
    news = list(torch._foreach_mul(values, values))
    torch._foreach_sub_(news, means)
    torch._foreach_mul_(news, share)
    torch._foreach_add_(means, news)


def _rate(parameters: list[nn.Parameter], rate: float) -> float | Tensor:
    """On a GPU in a tensor: a captured step reads its rate where it lies, as torch's fused kernels can."""
    return torch.tensor(rate, device=parameters[0].device) if parameters[0].is_cuda else rate


def _fused(parameters: list[nn.Parameter]) -> dict[str, Any]:
    """How torch runs an Adam: on a GPU in one kernel, whose counts lie there too."""
    on_gpu = parameters[0].is_cuda
    return {"fused": on_gpu or None, "capturable": on_gpu}


def _check_signs(who: str, learning_rate: float, **values: float) -> None:
    """A recipe is checked against the annotations, a call from Python is not."""
    if not learning_rate > 0:
        raise SettingsError(f"{who}: learning_rate = {learning_rate}: must be above 0")
    for name, value in values.items():
        if not value >= 0:
            raise SettingsError(f"{who}: {name} = {value}: must be at least 0")
