"""Measurements: memory in bytes, interleaved timing, relative errors and equality of runs."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from reefknot.lab.bench.measure import (
    MAX_REPEATS,
    MIN_REPEATS,
    Step,
    compute_relative_errors,
    is_deterministic,
    measure_working_memory,
    time_steps,
)


def _step(scratch: int = 0) -> Step:
    """Return a step with a gradient of 4,000 bytes that allocates and frees `scratch` numbers."""
    leaf = torch.ones(1000, requires_grad=True)

    def loss() -> Tensor:
        if scratch:
            torch.empty(scratch)
        return (leaf * 2.0).sum()

    return Step(loss, [leaf], lambda: {"leaf": leaf.grad})


def test_memory_excludes_the_gradients() -> None:
    without_scratch = measure_working_memory(_step(), "cpu")
    with_scratch = measure_working_memory(_step(scratch=1_000_000), "cpu")
    assert without_scratch < 20_000
    assert 4_000_000 - 20_000 <= with_scratch - without_scratch <= 4_000_000


def test_memory_of_stored_logits_is_two_to_three_copies() -> None:
    """At its peak, eager torch holds logits, their log-softmax and one gradient."""
    hidden_ND = torch.randn(32, 8, requires_grad=True)
    weight_VD = torch.randn(500, 8, requires_grad=True)
    targets_N = torch.zeros(32, dtype=torch.long)

    def compute_loss() -> Tensor:
        return torch.nn.functional.cross_entropy(hidden_ND @ weight_VD.T, targets_N)

    step = Step(compute_loss, [hidden_ND, weight_VD], dict)
    step.run()
    logit_bytes = 4 * 32 * 500
    assert 1.8 * logit_bytes < measure_working_memory(step, "cpu") < 3.5 * logit_bytes


def test_step_leaves_no_gradients() -> None:
    step = _step()
    measure_working_memory(step, "cpu")
    assert step.leaves[0].grad is None
    is_deterministic(step)
    assert step.leaves[0].grad is None


def test_timed_steps_alternate() -> None:
    order: list[int] = []

    def step(index: int) -> Step:
        leaf = torch.ones(1, requires_grad=True)

        def loss() -> Tensor:
            order.append(index)
            time.sleep(0.001 * index)
            return leaf.sum()

        return Step(loss, [leaf], dict)

    fast_times, slow_times = time_steps([step(1), step(2)], "cpu", seconds=10.0)
    assert len(fast_times) == len(slow_times) == MAX_REPEATS
    assert order[-6:] == [1, 2, 1, 2, 1, 2]
    assert sum(fast_times) < sum(slow_times)


def test_slow_steps_are_repeated_fewer_times() -> None:
    (milliseconds,) = time_steps([_step()], "cpu", seconds=0.0)
    assert len(milliseconds) == MIN_REPEATS


def test_errors_are_relative_and_missing_gradients_count_as_zero() -> None:
    exact = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0]), "c": torch.zeros(1)}
    gradients = {"a": torch.tensor([3.0, 4.5]), "b": None, "c": torch.zeros(1)}
    assert compute_relative_errors(gradients, exact) == {"a": pytest.approx(0.1), "b": 1.0, "c": 0.0}


def test_nondeterministic_step_is_detected() -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert is_deterministic(Step(lambda: (leaf * 2.0).sum(), [leaf], dict))
    assert not is_deterministic(Step(lambda: (leaf * torch.rand(3)).sum(), [leaf], dict))
