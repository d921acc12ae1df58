"""Speed of training: tokens and floating-point operations per second, memory, and hardware utilisation.

`Throughput.compute_speed` returns a `Speed` for each line of metrics. Its hardware utilisation is

    matrix_rate_share = (operations of an update) / (seconds of the update) / (matrix rate)

The operations are those of the matrix products in the forward and backward pass, without padding and recomputation
(`nn/part.py`). The matrix rate is the number of operations per second that the device reaches when it multiplies large
matrices. `Throughput` measures it at the start of a run on a GPU, in the precision of the run. Runs on a CPU have no
matrix rate, because other programs use the CPU at the same time. `reefknot bench` measures it on any device.

A token counts once, as a target. Padding does not count.

Shapes: B rows (sequences) of a training window, T steps.
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

MEASUREMENT_SECONDS = 0.2
"""How long the matrix rate is measured at the start of a run."""
MATRIX_SIZES = {"cuda": 8192, "cpu": 1536}
"""Rows and columns of the matrices that are multiplied."""


@dataclass(frozen=True)
class Speed:
    """The speed of all processes together, and the peak memory of this process."""

    tokens_per_second: float
    flops_per_second: float
    """Floating-point operations per second."""
    memory_bytes: int
    matrix_rate_share: float | None
    """`flops_per_second` as a share of the matrix rate, or None if the matrix rate is not known."""

    def record(self) -> dict[str, Any]:
        """Return the speed as it is written to a line of metrics."""
        metrics: dict[str, Any] = {
            "tokens_per_second": self.tokens_per_second,
            "flops": self.flops_per_second,
            "memory_bytes": self.memory_bytes,
        }
        if self.matrix_rate_share is not None:
            metrics["share"] = self.matrix_rate_share
        return metrics

    def describe(self) -> list[str]:
        """Return the speed as short texts for the progress line."""
        texts = [f"{self.tokens_per_second:,.0f} tokens/s", f"{self.memory_bytes / 2**30:.1f} GiB"]
        if self.matrix_rate_share is not None:
            texts.append(f"{self.matrix_rate_share:.0%} of the matrix rate")
        return texts


class Throughput:
    """Computes the speed of training from the tokens per second."""

    def __init__(self, model: LanguageModel, world: World, dtype: torch.dtype) -> None:
        """Measure the matrix rate if the device is a GPU. Only the first process does, because it reports the speed."""
        self.model = model
        self.world = world
        self.matrix_rate: float | None = None
        """Operations per second that the devices of all processes reach in large matrix products, if measured."""
        if world.is_first and world.device.type == "cuda":
            self.matrix_rate = world.size * measure_matrix_rate(world.device, dtype)

    def compute_speed(self, tokens_per_second: float, inputs_BT: Tensor, targets_BT: Tensor) -> Speed:
        """Return the speed of training.

        Args:
            tokens_per_second: Number of tokens (targets) that training reads per second.
            inputs_BT: Inputs of a typical training window, on which the operations per token are counted.
            targets_BT: Targets of the same window.
        """
        num_tokens = max(int((targets_BT != IGNORE).sum()), 1)
        flops_per_token = self.model.flops(inputs_BT, targets_BT) / num_tokens
        flops_per_second = tokens_per_second * flops_per_token
        matrix_rate_share = None
        if self.matrix_rate is not None:
            matrix_rate_share = flops_per_second / self.matrix_rate
        return Speed(
            tokens_per_second=tokens_per_second,
            flops_per_second=flops_per_second,
            memory_bytes=peak_memory_bytes(self.world.device),
            matrix_rate_share=matrix_rate_share,
        )


def measure_matrix_rate(device: torch.device | str, dtype: torch.dtype, seconds: float = MEASUREMENT_SECONDS) -> float:
    """Measure the floating-point operations per second of a large square matrix product.

    On a GPU, the result is the median of the second half of the measurements, because the clock slows down under load.
    On a CPU, it is the best measurement, because other programs may use the CPU at the same time. Global random
    generators are not touched. The peak memory of the device is reset.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    size = MATRIX_SIZES[device.type]
    repeats = 10 if on_gpu else 1
    generator = torch.Generator(device).manual_seed(0)
    left = torch.randn(size, size, device=device, generator=generator).to(dtype)
    right = torch.randn(size, size, device=device, generator=generator).to(dtype)

    _product_seconds(left, right, repeats=1)  # the first product also chooses the kernel
    measurements: list[float] = []
    started_at = time.perf_counter()
    while len(measurements) < 3 or time.perf_counter() - started_at < seconds:
        measurements.append(_product_seconds(left, right, repeats))

    if on_gpu:
        del left, right
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        product_seconds = median(measurements[len(measurements) // 2 :])
    else:
        product_seconds = min(measurements)
    return 2.0 * size**3 / product_seconds


def _product_seconds(left: Tensor, right: Tensor, repeats: int) -> float:
    """Return the mean time of one matrix product over `repeats` products."""
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    started_at = time.perf_counter()
    for _ in range(repeats):
        torch.mm(left, right)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return (time.perf_counter() - started_at) / repeats
