"""The recurrence of LSTM layers on a GPU: one kernel walks forward through the whole window, another walks back.

A step is a small product that waits for the previous step, so its cost is mostly latency. This module divides the work
of the kernels (`triton_recurrence_kernels`) among programs and launches them. All programs of a launch run at once, so
they can wait for each other.

Shapes: L layers, T steps, B rows of the batch, H units, P units with padding, G = 4H gates i, f, g, o; M masks, 1 or 4.
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
    """How rows and units are divided: a program computes BM rows x BH units, and reads all units, BK at a time."""

    BM: int
    BH: int
    BK: int
    warps: int
    stages: int
    precision: str
    tiles: int
    """Number of tiles of rows per launch. All programs of a launch run at once."""
    hold: int
    """The padded number of units, a power of 2, if a program keeps its weights on the chip for all steps; else 0."""

    @classmethod
    def choose(cls, rows: int, units: int, dtype: torch.dtype, device: torch.device, layers: int = 1) -> Plan | None:
        """Choose a plan for a batch of this many rows.

        Return None if the device has too few multiprocessors for the layers, or too little shared memory.
        """
        precision = "tf32" if rounds_to_tf32() else "tf32x3"
        if device.type != "cuda":
            # Small tiles for the interpreter, so that the small shapes of tests have several tiles. Only the smallest
            # layers hold their weights, so that tests cover both cases.
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
        # The backward kernel reads four gates of all rows and of the program's units at a time.
        while BK > 16 and _STAGES * 4 * (BM + BH) * BK * dtype.itemsize > memory:
            BK //= 2
        if _STAGES * 4 * (BM + BH) * BK * dtype.itemsize > memory:
            return None
        # Recurrent and upward weights of a layer, and in the backward kernel four gates of all rows.
        hold = max(triton.next_power_of_2(units), 16)
        fits = 4 * (BM + 2 * BH) * hold * dtype.itemsize <= memory
        if not fits or hold > _HELD or BM > 32 or dtype == torch.float32:
            hold = 0
        return cls(BM, BH, BK, 4, _STAGES, precision, together, hold)


_STAGES = 4
"""Number of pipeline stages of a product: the blocks that are loaded ahead."""
_HELD = 256
"""The most units of a layer whose weights stay on the chip. More units or rows, or float32, take too many registers."""


@cache
def _limits(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory that a program may use."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 49_152)


class ForwardResults(NamedTuple):
    """The results of the forward kernel that the backward kernel needs."""

    states: Tensor
    """The masked states before each step and after the last, (L, T + 1, B, M, P), in the type of the products."""
    cells: Tensor
    """The cells before each step and after the last, (L, T + 1, B, H), in float32."""
    gates: Tensor
    """The gates after their activation, (L, T, B, G), in the type of the products."""
    weights: Tensor
    """Recurrent weights of all layers, then the upward weights, (2L - 1, 4, H, P), in the type of the products."""


def walk_forward(
    x_TBG: Tensor,
    h_LBH: Tensor,
    c_LBH: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    masks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, ForwardResults]:
    """Run the forward kernel.

    Return the outputs of all steps, (T, B, H), the last states and cells, (L, B, H), and what `walk_backward` needs.
    """
    steps, (layers, rows, units) = len(x_TBG), h_LBH.shape
    walk = _Walk(layers, steps, rows, units, masks, dtype, x_TBG.device)
    states = walk.empty(layers, steps + 1, rows, walk.masks)
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
    w_4HP = walk.padded_weights(torch.stack(list(weights)).view(-1, 4, units, units))
    bias = torch.stack(list(biases)) if biases else None
    inputs = x_TBG.contiguous(), w_4HP, bias, walk.mask
    walk.launch(forward_kernel, *inputs, states, cells, gates, h_TBH, end_h, end_c)
    return h_TBH, end_h, end_c, ForwardResults(states, cells, gates, w_4HP)


def walk_backward(
    g_TBH: Tensor, g_h_LBH: Tensor | None, g_c_LBH: Tensor | None, masks: Tensor | None, saved: ForwardResults
) -> tuple[Tensor, Tensor]:
    """Run the backward kernel.

    Return the gradients of all gates, (L, T, B, 4, P), and of the cells before the first step, (L, B, H).

    Args:
        g_TBH: Gradients of the outputs.
        g_h_LBH: Gradients of the last states, or None.
        g_c_LBH: Gradients of the last cells, or None.
        masks: The masks of the forward pass, or None.
        saved: The results of `walk_forward` for the backward pass.
    """
    layers, _, rows, units = saved.cells.shape
    walk = _Walk(layers, len(g_TBH), rows, units, masks, saved.gates.dtype, g_TBH.device)
    d = walk.empty(layers, len(g_TBH), rows, 4)
    dc_LBH = g_TBH.new_empty(layers, rows, units, dtype=torch.float32)
    last = (None if gradient is None else gradient.contiguous() for gradient in (g_h_LBH, g_c_LBH))
    weights = walk.padded_weights(saved.weights[..., :units].mT)
    walk.launch(backward_kernel, g_TBH.contiguous(), *last, weights, walk.mask, saved.cells, saved.gates, d, dc_LBH)
    return d, dc_LBH


class _Walk:
    """One call of a kernel: its shapes, its plan and its launches."""

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
            raise ArgumentError(f"{layers} layers of {units} units do not fit on this GPU; use impl = 'reference'")
        self.layers, self.steps, self.rows, self.units, self.plan = layers, steps, rows, units, plan
        self.dtype, self.device = dtype, device
        self.mask = None if masks is None else masks.contiguous()
        self.masks = 1 if masks is None or masks.dim() == 3 else 4
        # Padding aligns every row for loads of 16 bytes.
        self.padded = triton.cdiv(units * dtype.itemsize, 16) * 16 // dtype.itemsize

    def empty(self, *shape: int) -> Tensor:
        """Allocate rows of all units, with zeros in the padding."""
        make = torch.empty if self.padded == self.units else torch.zeros
        return make(*shape, self.padded, dtype=self.dtype, device=self.device)

    def padded_weights(self, w_4HH: Tensor) -> Tensor:
        """Return weights as the kernels read them: in the type of the products, with padded rows."""
        if self.padded == self.units:
            return w_4HH.to(self.dtype).contiguous()
        w_4HP = self.empty(*w_4HH.shape[:-1])
        w_4HP[..., : self.units] = w_4HH
        return w_4HP

    def launch(self, kernel: Any, *tensors: Tensor | None) -> None:
        """Launch a kernel until all steps, layers and tiles are computed."""
        plan = self.plan
        tiles, slices = triton.cdiv(self.rows, plan.BM), triton.cdiv(self.units, plan.BH)
        # The interpreter runs one program after the other, so no program may wait. There, each launch is one step
        # of one layer.
        concurrent = self.device.type == "cuda"
        count = torch.zeros(tiles * self.layers * 32, dtype=torch.int32, device=self.device) if concurrent else None
        for first, last, layer, tile, grid in self._launches(tiles, slices, concurrent):
            kernel[grid](
                *(*tensors, count, first, last, self.steps, tile, layer, self.rows),
                **{"LAYERS": self.layers, "H": self.units, "P": self.padded, "M": self.masks},
                **{"BM": plan.BM, "BH": plan.BH, "BK": plan.BK, "HOLD": plan.hold, "PRECISION": plan.precision},
                num_warps=plan.warps,
                num_stages=plan.stages,
                # The launch fails unless all programs can run at once, so a barrier cannot wait forever.
                launch_cooperative_grid=concurrent,
            )

    def _launches(
        self, tiles: int, slices: int, concurrent: bool
    ) -> Iterator[tuple[int, int, int, int, tuple[int, ...]]]:
        """Yield for each launch its first step, the step after its last, its first layer and tile, and its grid."""
        for tile in range(0, tiles, self.plan.tiles):
            together = min(self.plan.tiles, tiles - tile)
            if concurrent:
                yield 0, self.steps, 0, tile, (slices, together, self.layers)
                continue
            for step, layer in product(range(self.steps), range(self.layers)):
                yield step, step + 1, layer, tile, (slices, together, 1)
