"""Several processes under torchrun: who we are, and what the processes tell each other.

    torchrun --nproc-per-node=2 -m reefknot train RECIPE

Every process owns an equal share of the streams. Losses are sums, so gradients are summed, not averaged, and the number
of processes does not show in the result.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from reefknot.encoders.contract import State, join_streams
from reefknot.models.language_model import LanguageModel
from reefknot.outputs.contract import Plan


class Window(nn.Module):
    """The loss of one window as a module's forward, which is what DistributedDataParallel can wrap."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x_BT: Tensor, y_BT: Tensor, state: State, plan: Plan
    ) -> tuple[Tensor, dict[str, Tensor], State, dict[str, Tensor]]:
        losses = self.model.loss(x_BT, y_BT, state, plan)
        parts = {name: part.sum.detach() for name, part in losses.parts.items()}
        return losses.sum(), parts, losses.state, losses.penalties


@dataclass(frozen=True)
class World:
    """This process among the others. One process alone is a world of size 1 and talks to nobody."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """Whether this process writes the files and speaks to the user."""
        return self.rank == 0

    def parallel(self, module: nn.Module) -> nn.Module:
        """A module whose gradients are averaged over the processes as its backward makes them."""
        if self.size == 1:
            return module
        wrapped = DistributedDataParallel(module)
        # Buffers follow from the settings and never change. The argument of this name warns in newer versions.
        wrapped.broadcast_buffers = False
        return wrapped

    def sum(self, values: list[float]) -> list[float]:
        """Each value added up over the processes."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        summed: list[float] = tensor.tolist()
        return summed

    def from_first(self, value: float) -> float:
        """The first process's value, everywhere."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, 0)
        return float(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensor, by rank. Shapes must agree."""
        if self.size == 1:
            return [tensor]
        # A GPU's generator state lives on the host, where NCCL cannot see it.
        local = tensor.to(self.device).contiguous()
        found = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(found, local)
        return [each.to(tensor.device) for each in found]

    def gather_streams(self, state: State) -> State:
        """The carried state of all streams, in their order in the text."""
        if self.size == 1:
            return state
        shares = {name: self.gather(tensor) for name, tensor in state.items()}
        return join_streams([{name: shares[name][rank] for name in shares} for rank in range(self.size)])

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def quiet(module: nn.Module) -> AbstractContextManager[None]:
    """Processes keep the gradients of a module that `World.parallel` gave to themselves."""
    if isinstance(module, DistributedDataParallel):
        alone: AbstractContextManager[None] = module.no_sync()
        return alone
    return nullcontext()


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Enter the world that torchrun made, or a world of one. `device` is `cpu` or `cuda`."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(device=torch.device(device))
        return
    rank = int(os.environ["RANK"])
    local = torch.device(device, int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
    if local.type == "cuda":
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if local.type == "cuda" else "gloo")
    try:
        yield World(rank, size, local)
    finally:
        dist.destroy_process_group()
