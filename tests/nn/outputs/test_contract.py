"""Plans of a batch are computed on the host and moved to the device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from reefknot.kernels.capture import send
from reefknot.nn.outputs.contract import Plan

META = torch.device("meta")


@dataclass(frozen=True)
class NestedPlan(Plan):
    rows: Tensor
    bands: tuple[tuple[Tensor, Tensor], ...]
    name: str = "nested"


def nested_plan() -> NestedPlan:
    pairs = tuple((torch.arange(size), torch.arange(size) + 1) for size in (2, 0))
    return NestedPlan(5, torch.arange(3), pairs)


def tensors(plan: NestedPlan) -> list[Tensor]:
    return [plan.rows, *(tensor for pair in plan.bands for tensor in pair)]


def test_moving_a_plan_moves_all_its_tensors() -> None:
    plan = nested_plan()
    moved = plan.to(META)
    assert type(moved) is NestedPlan
    assert (moved.count, moved.name) == (5, "nested")
    assert [tensor.shape for tensor in tensors(moved)] == [tensor.shape for tensor in tensors(plan)]
    assert {tensor.device for tensor in tensors(moved)} == {META}
    assert {tensor.device.type for tensor in tensors(plan)} == {"cpu"}


def test_plan_already_on_the_device_is_returned_unchanged() -> None:
    for plan in (nested_plan(), nested_plan().to(META), Plan(count=3)):
        device = plan.rows.device if isinstance(plan, NestedPlan) else META
        assert plan.to(device) is plan


@pytest.mark.gpu
def test_moving_a_plan_to_a_gpu_does_not_synchronise() -> None:
    plan, words, device = nested_plan(), torch.arange(7), torch.device("cuda")
    torch.zeros(1, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved, sent = plan.to(device), send(words, device)
        assert moved.to(device) is moved
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(on_gpu.cpu(), on_cpu) for on_gpu, on_cpu in zip(tensors(moved), tensors(plan), strict=True))
    assert torch.equal(sent.cpu(), words)
