"""Parameters that are divided among processes by their rows: find the rows of a process, and gather all rows to save.

Every process has the same number of rows, as `torch.chunk` divides them, except that the last processes may have fewer.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from reefknot.lab.training.distributed import World


class RowShards:
    """The divided parameters of a model.

    Args:
        full_shapes: The shape of each divided parameter as a whole, by its name in the model.
        world: The processes.
    """

    def __init__(self, full_shapes: dict[str, torch.Size], world: World) -> None:
        self.full_shapes = full_shapes
        self.world = world

    def local_rows(self, full_shape: torch.Size) -> slice:
        """Return the rows of this process in a parameter of this shape."""
        num_rows = self._rows_per_process(full_shape)
        first_row = num_rows * self.world.rank
        return slice(min(first_row, full_shape[0]), min(first_row + num_rows, full_shape[0]))

    def local_shard(self, name: str, full: Tensor) -> Tensor:
        """Return a copy of this process's rows of a tensor. A tensor that is not divided is returned unchanged."""
        if full.shape != self.full_shapes.get(name):
            return full
        # A copy, because a view would keep the full tensor alive.
        return full[self.local_rows(full.shape)].clone()

    def gather_full(self, name: str, shard: Tensor) -> Tensor | None:
        """Gather a tensor with the shape of a divided parameter in the main memory of the first process.

        All processes must call this together. The other processes get None.
        """
        full_shape = self.full_shapes[name]
        # The last shards may be smaller, but all gathered tensors must have the same shape.
        padded_shard = shard.new_zeros(self._rows_per_process(full_shape), *full_shape[1:])
        padded_shard[: len(shard)] = shard.detach()

        if not self.world.is_first:
            dist.gather(padded_shard)
            return None
        shards = [torch.empty_like(padded_shard) for _ in range(self.world.size)]
        dist.gather(padded_shard, shards)
        padded_tensor = torch.cat([shard.cpu() for shard in shards])
        return padded_tensor[: full_shape[0]]

    def _rows_per_process(self, full_shape: torch.Size) -> int:
        """Return the number of rows of every process. The last processes may have fewer rows, or none."""
        return math.ceil(full_shape[0] / self.world.size)
