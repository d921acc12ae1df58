"""How fast training is, and how near to what the device can do: tokens and operations a second, memory, and the share
of the rate at which the device multiplies large matrices.

The rate is measured, not looked up: once at the start, in the precision of the run, on the device as it is. What a
training step would need at least (`nn/flops.py`), over what it takes, is held against it. A CPU is shared
with everything else that runs there, so nothing is measured on one and no share is told.

Shapes: B streams, T steps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from reefknot.kernels.scores import IGNORE
from reefknot.lab.runs.environment import peak_memory_bytes
from reefknot.lab.training.distributed import World
from reefknot.nn.models.language_model import LanguageModel

SECONDS = 0.2
"""What measuring the rate may take at the start of a run."""
SIZES = {"cuda": 8192, "cpu": 1536}
"""Rows and columns of the matrices."""


@dataclass(frozen=True)
class Speed:
    """What training does in a second, all processes together, and the most memory that this one has held."""

    tokens: float
    flops: float
    memory_bytes: int
    share: float | None
    """Of the matrix rate; None where that is not known."""

    def record(self) -> dict[str, Any]:
        """For a line of metrics."""
        found = {"tokens_per_second": self.tokens, "flops": self.flops, "memory_bytes": self.memory_bytes}
        return found if self.share is None else found | {"share": self.share}

    def told(self) -> list[str]:
        """For a person."""
        facts = [f"{self.tokens:,.0f} tokens/s", f"{self.memory_bytes / 2**30:.1f} GiB"]
        return facts if self.share is None else [*facts, f"{self.share:.0%} of the matrix rate"]


class Throughput:
    """Turns tokens a second into what they are worth on this device."""

    def __init__(self, model: LanguageModel, world: World, dtype: torch.dtype) -> None:
        """Measures the rate, where there is one to measure and somebody to tell it to."""
        self.model, self.world = model, world
        told = world.first and world.device.type == "cuda"
        self.rate = world.size * matrix_rate(world.device, dtype) if told else None
        """Operations a second that the devices of all processes can do, in large products."""

    def speed(self, tokens_per_second: float, x_BT: Tensor, y_BT: Tensor) -> Speed:
        """At so many targets a second, where this window stands for all: what a target costs depends on the text."""
        targets = max(int((y_BT != IGNORE).sum()), 1)
        flops = tokens_per_second * self.model.flops(x_BT, y_BT) / targets
        share = None if self.rate is None else flops / self.rate
        return Speed(tokens_per_second, flops, peak_memory_bytes(self.world.device), share)


def matrix_rate(device: torch.device | str, dtype: torch.dtype, seconds: float = SECONDS) -> float:
    """Floating-point operations a second of a large square product, measured here and now.

    On a GPU the median of the second half of the time, since its clock falls under load; on a CPU the best, since
    others may use it too. No generator but its own is drawn from, and the peak of memory is counted from here on.
    """
    device = torch.device(device)
    on_gpu, size = device.type == "cuda", SIZES[device.type]
    draw = torch.Generator(device).manual_seed(0)
    one, other = (torch.randn(size, size, device=device, generator=draw).to(dtype) for _ in range(2))
    _product_seconds(one, other, 1)  # the first one also chooses its kernel
    spent: list[float] = []
    began = time.perf_counter()
    while len(spent) < 3 or time.perf_counter() - began < seconds:
        spent.append(_product_seconds(one, other, 10 if on_gpu else 1))
    if on_gpu:
        del one, other
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return 2.0 * size**3 / (median(spent[len(spent) // 2 :]) if on_gpu else min(spent))


def _product_seconds(one: Tensor, other: Tensor, times: int) -> float:
    """Of one product, in a row of so many."""
    if one.is_cuda:
        torch.cuda.synchronize(one.device)
    began = time.perf_counter()
    for _ in range(times):
        torch.mm(one, other)
    if one.is_cuda:
        torch.cuda.synchronize(one.device)
    return (time.perf_counter() - began) / times
