"""Optimisers that a recipe can name: SGD, AdamW, Adam and Adadelta.

The first three are subclasses of torch's optimisers with the settings that the papers use; Adadelta is our own. The
arguments of a constructor, apart from `parameters`, are the settings of `training.optimiser` in a recipe:

    optimiser = { kind = "sgd", learning_rate = 1.0, momentum = 0.9 }

No step waits for a GPU. On a GPU, a step changes nothing if the tensor `found_inf` is 1, as in torch's fused kernels.
The trainer sets it if the loss or the gradient is not finite.
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

    Nesterov momentum is torch's. fairseq, which Baevski & Auli (2019) use with momentum 0.99, includes the learning
    rate in its velocity and rescales the velocity whenever the rate changes. The steps are the same.

    Args:
        parameters: The parameters to update.
        learning_rate: Learning rate, which the schedule multiplies.
        momentum: Momentum. Papers on recurrent models use 0; Baevski & Auli use 0.99.
        nesterov: Use Nesterov momentum.
        weight_decay: L2 penalty: weight_decay * p is added to the gradient of each parameter p.
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
            raise SettingsError("sgd: nesterov = true needs momentum, but momentum = 0; set sgd's momentum above 0")
        parameter_list = list(parameters)
        super().__init__(
            parameter_list,
            lr=_rate_on_device(parameter_list, learning_rate),
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            fused=parameter_list[0].is_cuda or None,
        )
        for group in self.param_groups:
            group["decoupled_decay"] = decoupled_decay
        if momentum:
            # Torch's fused kernel leaves these buffers uninitialised if the first update is skipped.
            for parameter in parameter_list:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update, then decay. If `found_inf` is set, both are skipped."""
        loss = super().step(closure)
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if not group["decoupled_decay"]:
                continue
            decay: float | Tensor = group["decoupled_decay"]
            if found_inf is not None:
                decay = decay * (1.0 - found_inf)
            # The parameters are not multiplied by 1 - decay, because float32 has no number between 1 - 1.2e-7 and
            # 1 - 6e-8.
            decayed_shares = torch._foreach_mul(group["params"], decay)
            torch._foreach_sub_(group["params"], decayed_shares)
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
        parameter_list = list(parameters)
        rate = _rate_on_device(parameter_list, learning_rate)
        super().__init__(parameter_list, rate, (beta1, beta2), epsilon, weight_decay, **_fused_options(parameter_list))


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
        parameter_list = list(parameters)
        rate = _rate_on_device(parameter_list, learning_rate)
        super().__init__(parameter_list, rate, (beta1, beta2), epsilon, **_fused_options(parameter_list))


class Adadelta(torch.optim.Optimizer):
    """Adadelta (Zeiler 2012): the size of a step depends on earlier steps, not on the scale of the gradient.

    For a parameter p with gradient g, v and u are the running mean squares of gradients and steps:

        v += (1 - rho) (g^2 - v)                         square_avg
        d = sqrt(u + epsilon) / sqrt(v + epsilon) g      the step
        u += (1 - rho) (d^2 - u)                         acc_delta
        p -= rate d

    Torch's Adadelta has no fused kernel, so on a GPU it cannot skip an update whose gradient is not finite. This class
    skips such an update by setting 1 - rho and g to zero.

    Args:
        parameters: The parameters to update.
        learning_rate: Learning rate, which the schedule multiplies.
        rho: Decay rate of the running mean squares of gradients and steps.
        epsilon: Added to both mean squares. It determines the size of the first steps.
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
            raise SettingsError(
                f"adadelta: epsilon = {epsilon}: must be above 0, because it determines the size of the first step"
            )
        parameter_list = list(parameters)
        super().__init__(
            parameter_list, {"lr": _rate_on_device(parameter_list, learning_rate), "rho": rho, "eps": epsilon}
        )
        for parameter in parameter_list:
            self.state[parameter] = {name: torch.zeros_like(parameter) for name in ("square_avg", "acc_delta")}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the parameters, unless `found_inf` is set, as in torch's fused optimisers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters: list[Tensor] = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Update parameters that have a gradient, with the settings of their group."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        new_weight: float | Tensor = 1.0 - group["rho"]
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None:
            # `where` and not a product with 0, because a gradient may be infinite or NaN.
            gradients = [gradient.where(found_inf == 0, 0.0) for gradient in gradients]
            new_weight = new_weight * (1.0 - found_inf.to(parameters[0].dtype))
        gradient_squares = [self.state[parameter]["square_avg"] for parameter in parameters]
        step_squares = [self.state[parameter]["acc_delta"] for parameter in parameters]

        # The four lines of the class docstring. A `_foreach` function changes all parameters in one kernel launch.
        _update_mean_squares(gradient_squares, gradients, new_weight)

        steps = list(torch._foreach_add(step_squares, group["eps"]))
        gradient_roots = list(torch._foreach_add(gradient_squares, group["eps"]))
        torch._foreach_sqrt_(steps)
        torch._foreach_sqrt_(gradient_roots)
        torch._foreach_div_(steps, gradient_roots)
        torch._foreach_mul_(steps, gradients)

        _update_mean_squares(step_squares, steps, new_weight)

        torch._foreach_mul_(steps, group["lr"])
        torch._foreach_sub_(parameters, steps)


def _update_mean_squares(means: list[Tensor], values: list[Tensor], new_weight: float | Tensor) -> None:
    """Move running means towards the squares of the values: mean += new_weight (value^2 - mean)."""
    changes = list(torch._foreach_mul(values, values))
    torch._foreach_sub_(changes, means)
    torch._foreach_mul_(changes, new_weight)
    torch._foreach_add_(means, changes)


def _rate_on_device(parameters: list[nn.Parameter], rate: float) -> float | Tensor:
    """Return the rate as a float, or on a GPU as a tensor, because a CUDA graph reads the rate from device memory."""
    if not parameters[0].is_cuda:
        return rate
    return torch.tensor(rate, device=parameters[0].device)


def _fused_options(parameters: list[nn.Parameter]) -> dict[str, Any]:
    """Return the options that make torch's Adam use one fused kernel on a GPU, with its step counts on the device."""
    on_gpu = parameters[0].is_cuda
    return {"fused": on_gpu or None, "capturable": on_gpu}


def _check_signs(kind: str, learning_rate: float, **values: float) -> None:
    """Raise an error if a rate is not positive or another value is negative. Recipes have been checked already."""
    if not learning_rate > 0:
        raise SettingsError(f"{kind}: learning_rate = {learning_rate}: must be above 0")
    for name, value in values.items():
        if not value >= 0:
            raise SettingsError(f"{kind}: {name} = {value}: must be at least 0")
