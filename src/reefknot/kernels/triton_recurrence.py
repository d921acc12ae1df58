"""The recurrence of LSTM layers on a GPU: one kernel walks through the whole window, another walks back.

A step is a small product that waits for the last one, so what it costs is latency. Here is how the kernels
(`triton_recurrence_kernels`) are cut up and launched, so that all their programs run at once and can wait for each
other.

Shapes: L layers, T steps, B rows of the batch, H units, P of them with padding, G = 4H gates i, f, g, o; M masks, 1 or
4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.choice import rounds_to_tf32
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
    hold: int
    """Width of the weights where a program keeps them on the chip for all steps, a power of 2; else 0."""

    @classmethod
    def choose(cls, rows: int, units: int, dtype: torch.dtype, device: torch.device, layers: int = 1) -> Plan | None:
        """For a batch of so many rows; None where a device has too few multiprocessors, for one layer or for several at
        once, or too little memory on each."""
        precision = "tf32" if rounds_to_tf32() else "tf32x3"
        if device.type != "cuda":
            # The interpreter: small tiles, so that small shapes have several, and the smallest are held.
            return cls(16, 16, 32, 4, 1, "ieee", triton.cdiv(rows, 16), 16 if units <= 16 else 0)
        processors, memory = _limits(device)
        BM, BH = min(max(triton.next_power_of_2(rows), 16), 64), 16
        tiles = triton.cdiv(rows, BM)
        while BH < 64 and triton.cdiv(units, BH) * (tiles if BH < 32 else 1) > processors:
            BH *= 2
        slices = triton.cdiv(units, BH)
        together = min(tiles, processors // slices)
        if not together or (layers > 1 and layers * slices * tiles > processors):
            return None
        BK = min(128 if dtype == torch.bfloat16 else 32, max(triton.next_power_of_2(units), 16))
        # On the way back, four gates of all rows and of the program's units are read at a time.
        while BK > 16 and _STAGES * 4 * (BM + BH) * BK * dtype.itemsize > memory:
            BK //= 2
        if _STAGES * 4 * (BM + BH) * BK * dtype.itemsize > memory:
            return None
        # A layer's own weights and those that it reads another by, and on the way back four gates of all rows.
        hold = max(triton.next_power_of_2(units), 16)
        fits = 4 * (BM + 2 * BH) * hold * dtype.itemsize <= memory
        if not fits or hold > _HELD or BM > 32 or dtype == torch.float32:
            hold = 0
        return cls(BM, BH, BK, 4, _STAGES, precision, together, hold)


_STAGES = 4
"""Blocks of a product that are on the way at once."""
_HELD = 256
"""The widest layer whose weights stay on the chip: more units, more rows or float32 take too many registers."""


@cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may take on one."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 49_152)


class Walked(NamedTuple):
    """What the way back needs of the way there."""

    states: Tensor
    """The masked states before each step and after the last, (L, T + 1, B, M, P), in the products' type."""
    cells: Tensor
    """The cells before each step and after the last, (L, T + 1, B, H), in float32."""
    gates: Tensor
    """Activated, (L, T, B, G), in the products' type."""
    weights: Tensor
    """Recurrent ones of all layers, then those that take a state up, (2L - 1, 4, H, P), in the products' type."""


def walk_forward(
    x_TBG: Tensor,
    h_LBH: Tensor,
    c_LBH: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    masks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Walked]:
    """The outputs of all steps, the last states and cells, and what the way back needs."""
    steps, (layers, rows, units) = len(x_TBG), h_LBH.shape
    walk = _Walk(layers, steps, rows, units, masks, dtype, x_TBG.device)
    states = walk.room(layers, steps + 1, rows, walk.masks)
    start = states[:, 0, :, :, :units]
    if masks is None:
        start.copy_(h_LBH[:, :, None])
    else:
        torch.mul(h_LBH[:, :, None], masks.view(layers, walk.masks, rows, units).transpose(1, 2), out=start)
    cells = x_TBG.new_empty(layers, steps + 1, rows, units, dtype=torch.float32)
    cells[:, 0] = c_LBH
    gates = x_TBG.new_empty(layers, *x_TBG.shape, dtype=dtype)
    h_TBH = x_TBG.new_empty(steps, rows, units, dtype=dtype)
    end_h, end_c = (x_TBG.new_empty(h_LBH.shape, dtype=torch.float32) for _ in range(2))
    w_4HP = walk.rows_of(torch.stack(list(weights)).view(-1, 4, units, units))
    bias = torch.stack(list(biases)) if biases else None
    given = x_TBG.contiguous(), w_4HP, bias, walk.mask
    walk.launch(forward_kernel, *given, states, cells, gates, h_TBH, end_h, end_c)
    return h_TBH, end_h, end_c, Walked(states, cells, gates, w_4HP)


def walk_backward(
    g_TBH: Tensor, g_h_LBH: Tensor | None, g_c_LBH: Tensor | None, masks: Tensor | None, walked: Walked
) -> tuple[Tensor, Tensor]:
    """The gradients of all gates, (L, T, B, 4, P), and of the cells before the first step, from those of the outputs
    and of the last states and cells."""
    layers, _, rows, units = walked.cells.shape
    walk = _Walk(layers, len(g_TBH), rows, units, masks, walked.gates.dtype, g_TBH.device)
    d = walk.room(layers, len(g_TBH), rows, 4)
    dc_LBH = g_TBH.new_empty(layers, rows, units, dtype=torch.float32)
    ends = (None if each is None else each.contiguous() for each in (g_h_LBH, g_c_LBH))
    turned = walk.rows_of(walked.weights[..., :units].mT)
    walk.launch(backward_kernel, g_TBH.contiguous(), *ends, turned, walk.mask, walked.cells, walked.gates, d, dc_LBH)
    return d, dc_LBH


class _Walk:
    """One call: its shapes, its plan and its launches."""

    def __init__(
        self,
        layers: int,
        steps: int,
        rows: int,
        units: int,
        masks: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        plan = Plan.choose(rows, units, dtype, device, layers)
        if plan is None:
            raise ArgumentError(
                f"{layers} layers of {units} units are more than the kernel has room for; use impl = 'reference'"
            )
        self.layers, self.steps, self.rows, self.units, self.plan = layers, steps, rows, units, plan
        self.dtype, self.device = dtype, device
        self.mask = None if masks is None else masks.contiguous()
        self.masks = 1 if masks is None or masks.dim() == 3 else 4
        # So that every row begins where loads of 16 bytes may.
        self.padded = triton.cdiv(units * dtype.itemsize, 16) * 16 // dtype.itemsize

    def room(self, *shape: int) -> Tensor:
        """Rows of all units, with zeros where they are padded."""
        make = torch.empty if self.padded == self.units else torch.zeros
        return make(*shape, self.padded, dtype=self.dtype, device=self.device)

    def rows_of(self, w_4HH: Tensor) -> Tensor:
        """Weights as the kernels read them: in the products' type, with rows that are padded."""
        if self.padded == self.units:
            return w_4HH.to(self.dtype).contiguous()
        w_4HP = self.room(*w_4HH.shape[:-1])
        w_4HP[..., : self.units] = w_4HH
        return w_4HP

    def launch(self, kernel: Any, *tensors: Tensor | None) -> None:
        plan = self.plan
        tiles, slices = triton.cdiv(self.rows, plan.BM), triton.cdiv(self.units, plan.BH)
        # The interpreter runs one program after the other, and none may wait: there a launch is a layer's step.
        meeting = self.device.type == "cuda"
        count = torch.zeros(tiles * self.layers * 32, dtype=torch.int32, device=self.device) if meeting else None
        for first, last, place, tile, grid in self._launches(tiles, slices, meeting):
            kernel[grid](
                *(*tensors, count, first, last, self.steps, tile, place, self.rows),
                **{"LAYERS": self.layers, "H": self.units, "P": self.padded, "M": self.masks},
                **{"BM": plan.BM, "BH": plan.BH, "BK": plan.BK, "HOLD": plan.hold, "PRECISION": plan.precision},
                num_warps=plan.warps,
                num_stages=plan.stages,
                # All programs of a launch run at once, or it is refused: a barrier cannot wait forever.
                launch_cooperative_grid=meeting,
            )

    def _launches(self, tiles: int, slices: int, meeting: bool) -> Iterator[tuple[int, int, int, int, tuple[int, ...]]]:
        """Of each: its first step, the one after its last, its first layer and tile, and its grid."""
        for tile in range(0, tiles, self.plan.tiles):
            together = min(self.plan.tiles, tiles - tile)
            if meeting:
                yield 0, self.steps, 0, tile, (slices, together, self.layers)
                continue
            for step, place in product(range(self.steps), range(self.layers)):
                yield step, step + 1, place, tile, (slices, together, 1)
