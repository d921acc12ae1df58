"""Optimisers against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reefknot.training.optimisers import SGD


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    made = [nn.Parameter(torch.randn(4, 3, generator=draw, dtype=dtype)) for _ in range(2)]
    for each in made:
        each.grad = torch.randn(4, 3, generator=draw, dtype=dtype)
    return made


def test_decoupled_decay_does_not_depend_on_the_rate() -> None:
    for rate in (0.1, 10.0):
        before, after = parameters(), parameters()
        SGD(after, rate, decoupled_decay=0.25).step()
        for old, new in zip(before, after, strict=True):
            assert old.grad is not None
            torch.testing.assert_close(new, (old - rate * old.grad) * 0.75, rtol=1e-14, atol=0)


def test_without_it_a_step_is_torchs() -> None:
    ours, theirs = parameters(), parameters()
    mine = SGD(ours, 0.5, momentum=0.9, weight_decay=0.01)
    other = torch.optim.SGD(theirs, 0.5, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        mine.step()
        other.step()
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


def test_a_decay_smaller_than_the_grain_of_float32_is_kept_on_average() -> None:
    """1 - 1e-7 is no number in float32: its neighbours are off by a fifth of the decay and by half of it."""
    weight = nn.Parameter(torch.rand(100_000, generator=torch.Generator().manual_seed(1)) + 1.0)
    weight.grad = torch.zeros_like(weight)
    before = weight.detach().double().clone()
    optimiser = SGD([weight], 1.0, decoupled_decay=1e-7)
    for _ in range(10):
        optimiser.step()
    lost = (1 - weight.detach().double() / before).mean().item()
    assert lost == pytest.approx(1e-6, rel=0.05)


def test_a_refused_update_does_not_decay() -> None:
    weights = parameters()
    before = [each.detach().clone() for each in weights]
    for each in weights:
        each.grad = torch.zeros_like(each)
    optimiser = SGD(weights, 0.5, decoupled_decay=0.25)
    optimiser.param_groups[0]["fused"] = True  # as on a GPU
    optimiser.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimiser.step()
    assert all(torch.equal(one, other) for one, other in zip(weights, before, strict=True))
    optimiser.found_inf.zero_()  # type: ignore[attr-defined]
    optimiser.step()
    assert all(torch.equal(one, 0.75 * other) for one, other in zip(weights, before, strict=True))


def test_the_decay_is_part_of_the_state() -> None:
    saved = SGD(parameters(), 0.5, decoupled_decay=0.25).state_dict()
    other = SGD(parameters(), 0.5)
    other.load_state_dict(saved)
    assert other.param_groups[0]["decoupled_decay"] == 0.25
