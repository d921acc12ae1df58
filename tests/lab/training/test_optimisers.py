"""Optimisers agree with their formulas and with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.lab.training.optimisers import SGD, Adadelta, Adam, AdamW
from reefknot.lab.training.schedules import Cosine


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    created = [nn.Parameter(torch.randn(4, 3, generator=generator, dtype=dtype)) for _ in range(2)]
    for parameter in created:
        parameter.grad = torch.randn(4, 3, generator=generator, dtype=dtype)
    return created


def test_decoupled_decay_does_not_depend_on_the_rate() -> None:
    for rate in (0.1, 10.0):
        before, after = parameters(), parameters()
        SGD(after, rate, decoupled_decay=0.25).step()
        for old, new in zip(before, after, strict=True):
            assert old.grad is not None
            torch.testing.assert_close(new, (old - rate * old.grad) * 0.75, rtol=1e-14, atol=0)


def test_sgd_without_decoupled_decay_agrees_with_torch() -> None:
    weights, torch_weights = parameters(), parameters()
    optimiser = SGD(weights, 0.5, momentum=0.9, weight_decay=0.01)
    torch_optimiser = torch.optim.SGD(torch_weights, 0.5, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        optimiser.step()
        torch_optimiser.step()
    assert all(torch.equal(weight, torch_weight) for weight, torch_weight in zip(weights, torch_weights, strict=True))


def test_decay_below_float32_resolution_holds_on_average() -> None:
    """1 - 1e-7 is not a float32 number. The nearest ones differ by a fifth and by a half of the decay."""
    weight = nn.Parameter(torch.rand(100_000, generator=torch.Generator().manual_seed(1)) + 1.0)
    weight.grad = torch.zeros_like(weight)
    before = weight.detach().double().clone()
    optimiser = SGD([weight], 1.0, decoupled_decay=1e-7)
    for _ in range(10):
        optimiser.step()
    lost = (1 - weight.detach().double() / before).mean().item()
    assert lost == pytest.approx(1e-6, rel=0.05)


def test_skipped_update_does_not_decay() -> None:
    weights = parameters()
    before = [parameter.detach().clone() for parameter in weights]
    for parameter in weights:
        parameter.grad = torch.zeros_like(parameter)
    optimiser = SGD(weights, 0.5, decoupled_decay=0.25)
    optimiser.param_groups[0]["fused"] = True  # as on a GPU
    optimiser.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimiser.step()
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
    optimiser.found_inf.zero_()  # type: ignore[attr-defined]
    optimiser.step()
    assert all(torch.equal(weight, 0.75 * old) for weight, old in zip(weights, before, strict=True))


def test_decoupled_decay_is_saved_and_loaded() -> None:
    saved = SGD(parameters(), 0.5, decoupled_decay=0.25).state_dict()
    restored = SGD(parameters(), 0.5)
    restored.load_state_dict(saved)
    assert restored.param_groups[0]["decoupled_decay"] == 0.25


def gradients(weights: list[nn.Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) for parameter in weights]


def test_nesterov_agrees_with_fairseq_at_changing_rates() -> None:
    """fairseq's velocity includes the learning rate and is rescaled with it.

    With momentum mu, gradient g, velocity v and the rates lr and old (of the previous step), a weight p changes by
    p += mu^2 (lr/old) v - (1 + mu) lr g, then v = mu (lr/old) v - lr g.
    """
    momentum = 0.99
    schedule = Cosine(30, warmup=20, warmup_from=1e-3, growth=2.0, shrink=0.75, least=1e-3)
    weights = parameters()
    optimiser = SGD(weights, 1.0, momentum=momentum, nesterov=True)
    expected = [parameter.detach().clone() for parameter in weights]
    velocities = [torch.zeros_like(parameter) for parameter in expected]
    old_rate = schedule.learning_rate_factor(1, 0)
    for step in range(120):
        rate = schedule.learning_rate_factor(1, step)
        optimiser.param_groups[0]["lr"] = rate
        step_gradients = gradients(weights, step)
        for weight, exact, velocity, gradient in zip(weights, expected, velocities, step_gradients, strict=True):
            weight.grad = gradient
            exact += momentum**2 * (rate / old_rate) * velocity - (1 + momentum) * rate * gradient
            velocity.mul_(momentum * rate / old_rate).sub_(rate * gradient)
        old_rate = rate
        optimiser.step()
    for weight, exact in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.detach(), exact, rtol=1e-10, atol=1e-10)


Optimisers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


def train_both(
    make: Callable[[list[nn.Parameter], list[nn.Parameter]], Optimisers],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return two sets of equal parameters after many updates with equal gradients at changing rates."""
    ours, theirs = parameters(), parameters()
    optimiser_one, optimiser_two = make(ours, theirs)
    for step in range(60):
        for one, two, gradient in zip(ours, theirs, gradients(ours, step), strict=True):
            one.grad, two.grad = gradient, gradient.clone()
        for optimiser in (optimiser_one, optimiser_two):
            optimiser.param_groups[0]["lr"] = 0.5 / (1 + step)
            optimiser.step()
    assert not torch.equal(ours[0], parameters()[0])
    return ours, theirs


def test_adamw_agrees_with_torch() -> None:
    ours, theirs = train_both(
        lambda ours, theirs: (
            AdamW(ours, 0.5, beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.1),
            torch.optim.AdamW(theirs, 0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1),
        )
    )
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


def test_adam_agrees_with_torch() -> None:
    ours, theirs = train_both(
        lambda ours, theirs: (Adam(ours, 0.5), torch.optim.Adam(theirs, 0.5, betas=(0.9, 0.98), eps=1e-9))
    )
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("rho", [0.95, 0.5, 0.0])
def test_adadelta_agrees_with_torch(rho: float) -> None:
    ours, theirs = train_both(
        lambda ours, theirs: (Adadelta(ours, rho=rho), torch.optim.Adadelta(theirs, rho=rho, eps=1e-6))
    )
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)


def test_adadelta_ignores_parameters_without_gradient() -> None:
    weights = parameters()
    weights[1].grad = None
    Adadelta(weights).step()
    before = parameters()
    assert not torch.equal(weights[0], before[0])
    assert torch.equal(weights[1], before[1])


def test_adadelta_calls_a_closure_with_gradients() -> None:
    (weight, _) = parameters()
    optimiser = Adadelta([weight])

    def closure() -> float:
        optimiser.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    losses = [optimiser.step(closure) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize("kind", [Adadelta, Adam])
def test_saved_optimiser_resumes_bit_for_bit(kind: Any) -> None:
    def make_steps(weights: list[nn.Parameter], optimiser: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for weight, gradient in zip(weights, gradients(weights, step), strict=True):
                weight.grad = gradient
            optimiser.step()

    whole, halves = parameters(), parameters()
    make_steps(whole, kind(whole, 0.1), range(10))
    first = kind(halves, 0.1)
    make_steps(halves, first, range(5))
    second = kind(halves, 0.9)
    second.load_state_dict(first.state_dict())
    make_steps(halves, second, range(5, 10))
    assert all(torch.equal(one, two) for one, two in zip(whole, halves, strict=True))


def test_adamw_decays_biases_too() -> None:
    bias = nn.Parameter(torch.ones(3, dtype=torch.float64))
    bias.grad = torch.zeros_like(bias)
    AdamW([bias], 0.5, weight_decay=0.1).step()
    torch.testing.assert_close(bias.detach(), torch.full_like(bias, 0.95))


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "adam", "adadelta"])
def test_skipped_update_has_no_effect(kind: str, broken: float) -> None:
    """The next update is the same as without the skipped one, even if the first update is skipped."""

    def after(*skipped: float) -> list[nn.Parameter]:
        weights = parameters(torch.float32)
        optimisers: dict[str, Callable[[], Any]] = {
            "sgd": lambda: SGD(weights, 0.5, momentum=0.9, nesterov=True),
            "adamw": lambda: AdamW(weights, 0.5),
            "adam": lambda: Adam(weights, 0.5),
            "adadelta": lambda: Adadelta(weights, 0.5),
        }
        optimiser = optimisers[kind]()
        if "fused" in optimiser.param_groups[0]:
            optimiser.param_groups[0]["fused"] = True
        for skip in skipped:
            optimiser.found_inf = torch.tensor(skip)
            for weight, gradient in zip(weights, gradients(weights, 7), strict=True):
                weight.grad = gradient * (broken if skip else 1.0)
            optimiser.step()
        return weights

    assert all(torch.equal(one, two) for one, two in zip(after(1.0), parameters(torch.float32), strict=True))
    for skipped in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0, 1.0)):
        for one, two in zip(after(*skipped), after(0.0, 0.0), strict=True):
            assert torch.equal(one, two)
            assert one.isfinite().all()


def test_adadelta_does_not_depend_on_the_found_inf_attribute() -> None:
    ours, others = parameters(), parameters()
    optimiser_one, optimiser_two = Adadelta(ours), Adadelta(others)
    optimiser_one.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    for step in range(10):
        for one, two, gradient in zip(ours, others, gradients(ours, step), strict=True):
            one.grad, two.grad = gradient, gradient.clone()
        optimiser_one.step()
        optimiser_two.step()
    assert all(torch.equal(one, two) for one, two in zip(ours, others, strict=True))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(parameters(), 1.0, nesterov=True), "nesterov = true needs momentum"),
        (lambda: SGD(parameters(), 1.0, momentum=1.0), "sgd: momentum = 1.0: must be at least 0 and less than 1"),
        (lambda: SGD(parameters(), 0.0), "sgd: learning_rate = 0.0: must be above 0"),
        (lambda: AdamW(parameters(), 1.0, beta2=1.0), "adamw: beta2 = 1.0: must be at least 0 and less than 1"),
        (lambda: AdamW(parameters(), 1.0, weight_decay=-0.1), "adamw: weight_decay = -0.1: must be at least 0"),
        (lambda: Adam(parameters(), 1.0, beta1=-0.5), "adam: beta1 = -0.5: must be at least 0 and less than 1"),
        (lambda: Adam(parameters(), -1.0), "adam: learning_rate = -1.0: must be above 0"),
        (lambda: Adadelta(parameters(), rho=1.0), "adadelta: rho = 1.0: must be at least 0 and less than 1"),
        (lambda: Adadelta(parameters(), epsilon=-1.0), "adadelta: epsilon = -1.0: must be above 0"),
    ],
)
def test_invalid_settings_are_rejected(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        make()
