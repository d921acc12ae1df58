"""What the host knows of a batch, on its way to the device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from reefknot.kernels.capture import send
from reefknot.nn.outputs.contract import Plan

META = torch.device("meta")


@dataclass(frozen=True)
class Nested(Plan):
    rows: Tensor
    bands: tuple[tuple[Tensor, Tensor], ...]
    name: str = "nested"


def nested() -> Nested:
    pairs = tuple((torch.arange(size), torch.arange(size) + 1) for size in (2, 0))
    return Nested(5, torch.arange(3), pairs)


def tensors(plan: Nested) -> list[Tensor]:
    return [plan.rows, *(each for pair in plan.bands for each in pair)]


def test_a_plan_takes_all_its_tensors_along() -> None:
    plan = nested()
    moved = plan.to(META)
    assert type(moved) is Nested
    assert (moved.count, moved.name) == (5, "nested")
    assert [each.shape for each in tensors(moved)] == [each.shape for each in tensors(plan)]
    assert {each.device for each in tensors(moved)} == {META}
    assert {each.device.type for each in tensors(plan)} == {"cpu"}


def test_a_plan_that_is_there_already_is_itself() -> None:
    for plan in (nested(), nested().to(META), Plan(count=3)):
        device = plan.rows.device if isinstance(plan, Nested) else META
        assert plan.to(device) is plan


@pytest.mark.gpu
def test_nothing_waits_for_a_gpu() -> None:
    plan, words, device = nested(), torch.arange(7), torch.device("cuda")
    torch.zeros(1, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved, sent = plan.to(device), send(words, device)
        assert moved.to(device) is moved
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(one.cpu(), other) for one, other in zip(tensors(moved), tensors(plan), strict=True))
    assert torch.equal(sent.cpu(), words)
