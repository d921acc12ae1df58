"""Run LSTM layers on a GPU: launch one Triton kernel for the forward and one for the backward pass of a window.

`run_forward_kernel` and `run_backward_kernel` are the functions to start from; the autograd function in `recurrence`
calls them. They allocate the results, and `_KernelRun` launches the kernels of `triton_recurrence_kernels`.

A step is a small product that waits for the previous step, so its cost is mostly latency. So one launch covers all
steps. `LaunchConfig` divides the work among the programs of a launch. All of them run at once, so they can wait for
each other.

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


def run_forward_kernel(
    inputs_TBG: Tensor,
    hidden_LBH: Tensor,
    cell_LBH: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    masks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, ForwardResults]:
    """Compute the forward pass of all layers.

    Return the outputs of all steps, (T, B, H), the last states and cells, (L, B, H), and what the backward kernel
    needs.

    Args:
        inputs_TBG: The contribution of the input to the gates of the first layer, including biases.
        hidden_LBH: The states before the first step.
        cell_LBH: The cells before the first step.
        weights: Recurrent weights weight_GH of all layers, then the upward weights of all layers but the first.
        biases: bias_G of all layers but the first.
        masks: Factors of the states, (L, B, H) or (L, 4, B, H), or None.
        dtype: The type of the matrix products.
    """
    num_steps, (num_layers, num_rows, num_units) = len(inputs_TBG), hidden_LBH.shape
    run = _KernelRun(num_layers, num_steps, num_rows, num_units, masks, dtype, inputs_TBG.device)
    states = run.allocate_padded(num_layers, num_steps + 1, num_rows, run.num_masks)
    first_states = states[:, 0, :, :, :num_units]
    if masks is None:
        first_states.copy_(hidden_LBH[:, :, None])
    else:
        masks_LBMH = masks.view(num_layers, run.num_masks, num_rows, num_units).transpose(1, 2)
        torch.mul(hidden_LBH[:, :, None], masks_LBMH, out=first_states)
    cells = inputs_TBG.new_empty(num_layers, num_steps + 1, num_rows, num_units, dtype=torch.float32)
    cells[:, 0] = cell_LBH
    gates = inputs_TBG.new_empty(num_layers, *inputs_TBG.shape, dtype=dtype)
    hidden_TBH = inputs_TBG.new_empty(num_steps, num_rows, num_units, dtype=dtype)
    last_h, last_c = (inputs_TBG.new_empty(hidden_LBH.shape, dtype=torch.float32) for _ in range(2))
    weight_4HP = run.pad_weights(torch.stack(list(weights)).view(-1, 4, num_units, num_units))
    bias = torch.stack(list(biases)) if biases else None
    run.launch(
        forward_kernel,
        x_ptr=inputs_TBG.contiguous(),
        w_ptr=weight_4HP,
        bias_ptr=bias,
        mask_ptr=run.masks,
        states_ptr=states,
        cells_ptr=cells,
        gates_ptr=gates,
        h_ptr=hidden_TBH,
        last_h_ptr=last_h,
        last_c_ptr=last_c,
    )
    return hidden_TBH, last_h, last_c, ForwardResults(states, cells, gates, weight_4HP)


def run_backward_kernel(
    grad_TBH: Tensor,
    grad_last_hidden_LBH: Tensor | None,
    grad_last_cell_LBH: Tensor | None,
    masks: Tensor | None,
    saved: ForwardResults,
) -> tuple[Tensor, Tensor]:
    """Compute the backward pass of all layers.

    Return the gradients of all gates, (L, T, B, 4, P), and of the cells before the first step, (L, B, H).

    Args:
        grad_TBH: Gradients of the outputs.
        grad_last_hidden_LBH: Gradients of the last states, or None.
        grad_last_cell_LBH: Gradients of the last cells, or None.
        masks: The masks of the forward pass, or None.
        saved: The results of `run_forward_kernel` for the backward pass.
    """
    num_steps = len(grad_TBH)
    num_layers, _, num_rows, num_units = saved.cells.shape
    run = _KernelRun(num_layers, num_steps, num_rows, num_units, masks, saved.gates.dtype, grad_TBH.device)
    d_gates = run.allocate_padded(num_layers, num_steps, num_rows, 4)
    grad_cell_LBH = grad_TBH.new_empty(num_layers, num_rows, num_units, dtype=torch.float32)
    run.launch(
        backward_kernel,
        g_ptr=grad_TBH.contiguous(),
        g_last_h_ptr=None if grad_last_hidden_LBH is None else grad_last_hidden_LBH.contiguous(),
        g_last_c_ptr=None if grad_last_cell_LBH is None else grad_last_cell_LBH.contiguous(),
        w_ptr=run.pad_weights(saved.weights[..., :num_units].mT),
        mask_ptr=run.masks,
        cells_ptr=saved.cells,
        gates_ptr=saved.gates,
        d_ptr=d_gates,
        dc_ptr=grad_cell_LBH,
    )
    return d_gates, grad_cell_LBH


class _KernelRun:
    """One call of a kernel: its sizes, its configuration and its launches."""

    def __init__(
        self,
        num_layers: int,
        num_steps: int,
        num_rows: int,
        num_units: int,
        masks: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        config = LaunchConfig.choose(num_rows, num_units, dtype, device, num_layers)
        if config is None:
            raise ArgumentError(
                f"{num_layers} layers of {num_units} units do not fit on this GPU; use impl = 'reference'"
            )
        self.config = config
        self.num_layers, self.num_steps, self.num_rows, self.num_units = num_layers, num_steps, num_rows, num_units
        self.dtype, self.device = dtype, device
        self.masks = None if masks is None else masks.contiguous()
        self.num_masks = 1 if masks is None or masks.dim() == 3 else 4
        # Padding aligns every row for loads of 16 bytes.
        self.num_padded = triton.cdiv(num_units * dtype.itemsize, 16) * 16 // dtype.itemsize

    def allocate_padded(self, *shape: int) -> Tensor:
        """Allocate rows of all units, with zeros in the padding."""
        allocate = torch.empty if self.num_padded == self.num_units else torch.zeros
        return allocate(*shape, self.num_padded, dtype=self.dtype, device=self.device)

    def pad_weights(self, weight_4HH: Tensor) -> Tensor:
        """Return weights as the kernels read them: in the type of the products, with padded rows."""
        if self.num_padded == self.num_units:
            return weight_4HH.to(self.dtype).contiguous()
        weight_4HP = self.allocate_padded(*weight_4HH.shape[:-1])
        weight_4HP[..., : self.num_units] = weight_4HH
        return weight_4HP

    def launch(self, kernel: Any, **tensors: Tensor | None) -> None:
        """Launch a kernel until all steps, layers and tiles are computed. `tensors` go to the kernel by name."""
        config = self.config
        row_tiles = triton.cdiv(self.num_rows, config.block_b)
        # The interpreter runs one program after the other, so no program may wait. There, each launch is one step
        # of one layer.
        is_concurrent = self.device.type == "cuda"
        counters = None
        if is_concurrent:
            # Programs wait for a counter, one per tile of rows and layer. Each counter has its own cache line.
            counters = torch.zeros(row_tiles * self.num_layers * 32, dtype=torch.int32, device=self.device)
        for launch in self._plan_launches(row_tiles, is_concurrent):
            kernel[launch.grid](
                **tensors,
                count_ptr=counters,
                start_step=launch.start_step,
                end_step=launch.end_step,
                T=self.num_steps,
                first_tile=launch.first_tile,
                first_layer=launch.first_layer,
                B=self.num_rows,
                LAYERS=self.num_layers,
                H=self.num_units,
                P=self.num_padded,
                M=self.num_masks,
                BLOCK_B=config.block_b,
                BLOCK_H=config.block_h,
                BLOCK_K=config.block_k,
                HOLD=config.held_units,
                PRECISION=config.precision,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                # The launch fails unless all programs can run at once, so a barrier cannot wait forever.
                launch_cooperative_grid=is_concurrent,
            )

    def _plan_launches(self, row_tiles: int, is_concurrent: bool) -> Iterator[_Launch]:
        """Yield the launches that together compute all steps, layers and tiles."""
        unit_tiles = triton.cdiv(self.num_units, self.config.block_h)
        for first_tile in range(0, row_tiles, self.config.tiles_per_launch):
            num_tiles = min(self.config.tiles_per_launch, row_tiles - first_tile)
            if is_concurrent:
                yield _Launch(0, self.num_steps, 0, first_tile, (unit_tiles, num_tiles, self.num_layers))
                continue
            for step, layer in product(range(self.num_steps), range(self.num_layers)):
                yield _Launch(step, step + 1, layer, first_tile, (unit_tiles, num_tiles, 1))


class _Launch(NamedTuple):
    """The part of the work that one launch does, and its grid: tiles of units, tiles of rows, layers."""

    start_step: int
    end_step: int
    first_layer: int
    first_tile: int
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class LaunchConfig:
    """How rows and units are divided among programs. A program computes a tile of rows x units of one layer."""

    block_b: int
    """Rows of a tile."""
    block_h: int
    """Units of a tile."""
    block_k: int
    """Units of the previous state that are loaded and multiplied at a time. A program reads the states of all units."""
    num_warps: int
    num_stages: int
    precision: str
    """How `tl.dot` multiplies float32 numbers."""
    tiles_per_launch: int
    """Number of tiles of rows per launch. All programs of a launch run at once."""
    held_units: int
    """The padded number of units, a power of 2, if a program keeps its weights on the chip for all steps; else 0."""

    @classmethod
    def choose(
        cls, num_rows: int, num_units: int, dtype: torch.dtype, device: torch.device, num_layers: int = 1
    ) -> LaunchConfig | None:
        """Choose the tiles for a batch of this many rows.

        Return None if the device has too few multiprocessors for the layers, or too little shared memory.
        """
        if device.type != "cuda":
            return cls._for_interpreter(num_rows, num_units)
        num_processors, shared_memory = _device_limits(device)
        block_b = min(max(triton.next_power_of_2(num_rows), 16), 64)
        row_tiles = triton.cdiv(num_rows, block_b)
        block_h = _choose_block_h(num_units, row_tiles, num_processors)
        unit_tiles = triton.cdiv(num_units, block_h)
        tiles_per_launch = min(row_tiles, num_processors // unit_tiles)
        if not tiles_per_launch or (num_layers > 1 and num_layers * unit_tiles * row_tiles > num_processors):
            return None
        block_k = _choose_block_k(num_units, block_b, block_h, dtype, shared_memory)
        if block_k is None:
            return None
        return cls(
            block_b=block_b,
            block_h=block_h,
            block_k=block_k,
            num_warps=4,
            num_stages=_NUM_STAGES,
            precision="tf32" if rounds_to_tf32() else "tf32x3",
            tiles_per_launch=tiles_per_launch,
            held_units=_choose_held_units(num_units, block_b, block_h, dtype, shared_memory),
        )

    @classmethod
    def _for_interpreter(cls, num_rows: int, num_units: int) -> LaunchConfig:
        """Return small tiles, so that the small shapes of tests have several tiles.

        Only the smallest layers hold their weights, so that tests cover both cases.
        """
        return cls(
            block_b=16,
            block_h=16,
            block_k=32,
            num_warps=4,
            num_stages=1,
            precision="ieee",
            tiles_per_launch=triton.cdiv(num_rows, 16),
            held_units=16 if num_units <= 16 else 0,
        )


def _choose_block_h(num_units: int, row_tiles: int, num_processors: int) -> int:
    """Return the units of a tile: 16, 32 or 64.

    A program needs a multiprocessor of its own. Larger tiles of units need fewer programs.
    """
    block_h = 16
    while block_h < 64 and triton.cdiv(num_units, block_h) * (row_tiles if block_h < 32 else 1) > num_processors:
        block_h *= 2
    return block_h


def _choose_block_k(num_units: int, block_b: int, block_h: int, dtype: torch.dtype, shared_memory: int) -> int | None:
    """Return how many units of the previous state are loaded at a time, or None if no number fits."""
    block_k = min(128 if dtype == torch.bfloat16 else 32, max(triton.next_power_of_2(num_units), 16))
    # The backward kernel reads four gates of all rows and of the program's units at a time.
    bytes_per_unit = _NUM_STAGES * 4 * (block_b + block_h) * dtype.itemsize
    while block_k > 16 and bytes_per_unit * block_k > shared_memory:
        block_k //= 2
    return block_k if bytes_per_unit * block_k <= shared_memory else None


def _choose_held_units(num_units: int, block_b: int, block_h: int, dtype: torch.dtype, shared_memory: int) -> int:
    """Return the padded number of units if a program can keep its weights on the chip, or 0."""
    if dtype == torch.float32 or block_b > 32:
        return 0
    held_units = max(triton.next_power_of_2(num_units), 16)
    # Recurrent and upward weights of a layer, and in the backward kernel four gates of all rows.
    fits = 4 * (block_b + 2 * block_h) * held_units * dtype.itemsize <= shared_memory
    return held_units if fits and held_units <= _MAX_HELD_UNITS else 0


_NUM_STAGES = 4
"""Depth of a product's pipeline: how many blocks of `block_k` units are loaded ahead."""
_MAX_HELD_UNITS = 256
"""The maximum number of units of a layer whose weights stay on the chip. More units or rows, or float32, need too many
registers."""


@cache
def _device_limits(device: torch.device) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory that a program may use."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 49_152)
