"""The recurrence of an LSTM on a GPU: one kernel walks through the whole window, another walks back.

A step is a small product that waits for the last one, so what it costs is latency. Here is how the kernels
(`triton_recurrence_kernels`) are cut up and launched, so that all their programs run at once and can wait for each
other.

Shapes: T steps, B rows of the batch, H units, P of them with padding, G = 4H gates i, f, g, o; M masks, 1 or 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.triton_recurrence_kernels import backward_kernel, forward_kernel


@dataclass(frozen=True)
class Plan:
    """How rows and units are cut up: a program has BM x BH of them, and reads BK units of the others at a time."""

    BM: int
    BH: int
    BK: int
    warps: int
    stages: int
    precision: str
    tiles: int
    """Tiles of rows in one launch: all programs of a launch run at once."""

    @classmethod
    def choose(cls, rows: int, units: int, dtype: torch.dtype, device: torch.device) -> Plan | None:
        """For a batch of so many rows; None where a device has too few multiprocessors or too little memory on each."""
        precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
        if device.type != "cuda":
            # The interpreter: small tiles, so that small shapes have several.
            return cls(16, 16, 32, 4, 1, "ieee", triton.cdiv(rows, 16))
        processors, memory = _limits(device)
        BM, BH = min(max(triton.next_power_of_2(rows), 16), 64), 16
        tiles = triton.cdiv(rows, BM)
        while BH < 64 and triton.cdiv(units, BH) * (tiles if BH < 32 else 1) > processors:
            BH *= 2
        together = min(tiles, processors // triton.cdiv(units, BH))
        if not together:
            return None
        BK = min(128 if dtype == torch.bfloat16 else 32, max(triton.next_power_of_2(units), 16))
        # On the way back, four gates of all rows and of the program's units are read at a time.
        while BK > 16 and _STAGES * 4 * (BM + BH) * BK * dtype.itemsize > memory:
            BK //= 2
        if _STAGES * 4 * (BM + BH) * BK * dtype.itemsize > memory:
            return None
        return cls(BM, BH, BK, 4, _STAGES, precision, together)


_STAGES = 4
"""Blocks of a product that are on the way at once."""


@cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may take on one."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 49_152)


class Walked(NamedTuple):
    """What the way back needs of the way there."""

    states: Tensor
    """The masked states before each step and after the last, (T + 1, B, M, H), in the products' type."""
    cells: Tensor
    """The cells before each step and after the last, (T + 1, B, H), in float32."""
    gates: Tensor
    """Activated, (T, B, G), in the products' type."""


def walk_forward(
    x_TBG: Tensor, h_BH: Tensor, c_BH: Tensor, w_GH: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Walked]:
    """The outputs of all steps, and what the way back needs."""
    steps, rows, units = *x_TBG.shape[:2], w_GH.shape[1]
    walk = _Walk(steps, rows, units, mask, dtype, x_TBG.device)
    states = x_TBG.new_zeros(steps + 1, rows, walk.masks, walk.padded, dtype=dtype)
    recurs = h_BH[None] if mask is None else h_BH * mask.view(walk.masks, rows, units)
    states[0, :, :, :units] = recurs.transpose(0, 1)
    cells = x_TBG.new_empty(steps + 1, rows, units, dtype=torch.float32)
    cells[0] = c_BH
    h_TBH = x_TBG.new_empty(steps, rows, units, dtype=dtype)
    gates_TBG = x_TBG.new_empty(x_TBG.shape, dtype=dtype)
    w_4PP = walk.pad(w_GH.view(4, units, units))
    walk.launch(forward_kernel, x_TBG.contiguous(), w_4PP, walk.mask, states, h_TBH, cells, gates_TBG)
    return h_TBH, Walked(states[..., :units], cells, gates_TBG)


def walk_backward(
    g_TBH: Tensor, g_c_BH: Tensor, w_GH: Tensor, mask: Tensor | None, walked: Walked
) -> tuple[Tensor, Tensor]:
    """The gradients of all gates and of the cells before the first step, from those of the outputs and last cells."""
    steps, rows, units = g_TBH.shape
    walk = _Walk(steps, rows, units, mask, walked.gates.dtype, g_TBH.device)
    d = g_TBH.new_zeros(steps + 1, rows, 4, walk.padded, dtype=walk.dtype)
    dc_BH = g_c_BH.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    w_4PP = walk.pad(w_GH.view(4, units, units).mT)
    walk.launch(backward_kernel, g_TBH.contiguous(), w_4PP, walk.mask, d, dc_BH, walked.cells, walked.gates)
    return d[:steps, :, :, :units].flatten(2), dc_BH


class _Walk:
    """One call: its shapes, its plan and its launches."""

    def __init__(
        self, steps: int, rows: int, units: int, mask: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        plan = Plan.choose(rows, units, dtype, device)
        if plan is None:
            raise ArgumentError(f"{units} units are more than the kernel has room for; use impl = 'reference'")
        self.steps, self.rows, self.units, self.plan = steps, rows, units, plan
        self.dtype, self.device = dtype, device
        self.mask = None if mask is None else mask.contiguous()
        self.masks = 1 if mask is None or mask.dim() == 2 else 4
        block = max(plan.BK, plan.BH)
        # So that every row begins where loads of 16 bytes may, and no block reaches beyond its end.
        self.padded = triton.cdiv(units, block) * block

    def pad(self, w_4HH: Tensor) -> Tensor:
        w_4PP = w_4HH.new_zeros(4, self.padded, self.padded, dtype=self.dtype)
        w_4PP[:, : self.units, : self.units] = w_4HH
        return w_4PP

    def launch(self, kernel: Any, *tensors: Tensor | None) -> None:
        plan = self.plan
        tiles, slices = triton.cdiv(self.rows, plan.BM), triton.cdiv(self.units, plan.BH)
        count = torch.zeros(tiles, dtype=torch.int32, device=self.device)
        # The interpreter runs one program after the other, and none may wait: there a launch is a step.
        meeting = count.is_cuda
        for first, last in [(0, self.steps)] if meeting else [(step, step + 1) for step in range(self.steps)]:
            for tile in range(0, tiles, plan.tiles):
                kernel[(slices, min(plan.tiles, tiles - tile))](
                    *(*tensors, count, first, last, self.steps, tile, self.rows),
                    **{"H": self.units, "P": self.padded, "M": self.masks, "MASKED": self.mask is not None},
                    **{"BM": plan.BM, "BH": plan.BH, "BK": plan.BK, "PRECISION": plan.precision, "MEETING": meeting},
                    num_warps=plan.warps,
                    num_stages=plan.stages,
                    # All programs of a launch run at once, or it is refused: a barrier cannot wait forever.
                    launch_cooperative_grid=meeting,
                )
