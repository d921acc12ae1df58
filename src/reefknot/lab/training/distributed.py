"""Several processes under torchrun: who we are, what they tell each other, and a model that they train together.

    torchrun --nproc-per-node=2 -m reefknot train RECIPE

Every process owns a share of each window's rows. Losses are sums, so gradients are summed, not averaged, and the number
of processes does not show in the result. Each holds the whole model, or, with `training.shard`, a part of it.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from reefknot.errors import SettingsError
from reefknot.nn.encoders.contract import State, join_streams
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.contract import Plan

PATIENCE = timedelta(hours=12)
"""How long processes wait for one another: the others have nothing to do while the first scores a text. If one dies,
torchrun ends them all at once."""


class Window(nn.Module):
    """The loss of one window as a module's forward, which is what torch's ways to train together can wrap."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x_BT: Tensor, y_BT: Tensor, state: State | None, plan: Plan, places_M: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor], State, dict[str, Tensor]]:
        losses = self.model.loss(x_BT, y_BT, state, plan, places_M)
        parts = {name: part.sum.detach() for name, part in losses.parts.items()}
        return losses.sum(), parts, losses.state, losses.penalties

    def during(self, function: Callable[[], float]) -> float:
        """A number that a function finds while the model's parameters are there to be used."""
        return function()


class Parallel:
    """A model as this process trains it: alone, or a copy of one that other processes train too."""

    def __init__(self, model: LanguageModel, world: World) -> None:
        self.model = model
        self.world = world
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """What this process holds of the parameters, under the model's names."""
        self.window: nn.Module = Window(model)
        if world.size > 1:
            self.window = self._joined(self.window)

    @property
    def trained(self) -> list[nn.Parameter]:
        """What its optimiser changes. A frozen table is not among them: decay, too, would change it."""
        return [parameter for parameter in self.parameters.values() if parameter.requires_grad]

    def _joined(self, window: nn.Module) -> nn.Module:
        """A module whose gradients are averaged over the processes as its backward makes them."""
        wrapped = DistributedDataParallel(window, gradient_as_bucket_view=True)
        # Buffers follow from the settings and never change. The argument of this name warns in newer versions.
        wrapped.broadcast_buffers = False
        return wrapped

    def quiet(self) -> AbstractContextManager[None]:
        """Where a backward pass's gradients stay in the process, until a later one's are exchanged. Those of parts are
        exchanged each time: no process has room for the whole."""
        if isinstance(self.window, DistributedDataParallel):
            alone: AbstractContextManager[None] = self.window.no_sync()
            return alone
        return nullcontext()

    def clip(self, limit: float | None) -> Tensor:
        """Scale the whole gradient down to a norm, if it is longer; returns the norm that it had."""
        return nn.utils.clip_grad_norm_(self.parameters.values(), limit or math.inf)

    def scaler(self, enabled: bool) -> GradScaler:
        """What scales the loss and finds the same overflows in every process; not enabled, it does nothing."""
        return GradScaler(self.world.device.type, enabled=enabled)

    def score(self, validate: Callable[[], float]) -> float:
        """What a function finds that computes with the model, the same in every process."""
        return self.world.from_first(validate() if self.world.first else math.nan)

    def whole(self, name: str, tensor: Tensor) -> Tensor | None:
        """A parameter, or what an optimiser or a mean keeps of it, to be saved. All processes call it; the first is
        given it whole, the others may be given None. What has not the parameter's shape comes back as it is."""
        return tensor.detach()

    def own(self, name: str, whole: Tensor) -> Tensor:
        """What this process keeps of what `whole` gave to be saved."""
        return whole


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

    def parallel(self, model: LanguageModel, shard: bool = False) -> Parallel:
        """A model for all processes to train. `shard` cuts its parameters up in place, so optimisers come after."""
        if not shard or self.size == 1:
            return Parallel(model, self)
        from reefknot.lab.training.sharding import Sharded  # half a second of imports that few runs need

        return Sharded(model, self)

    def sum(self, values: list[float]) -> list[float]:
        """Each value added up over the processes."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        summed: list[float] = tensor.tolist()
        return summed

    def agreed(self, flag: Tensor) -> Tensor:
        """Whether a flag is set in every process, the same tensor everywhere; nobody waits for the device."""
        if self.size == 1:
            return flag
        number = flag.to(torch.int32)
        dist.all_reduce(number, dist.ReduceOp.MIN)
        return number.bool()

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
        shares = {name: self.gather(tensor) for name, tensor in sorted(state.items())}
        return join_streams([{name: shares[name][rank] for name in shares} for rank in range(self.size)])

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def choose_device(name: str) -> str:
    """Return `cpu` or `cuda`; `auto` is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda: torch sees no GPU here; use --device cpu")
    if name not in ("cpu", "cuda"):
        raise SettingsError(f"--device {name}: must be auto, cpu or cuda")
    return name


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
    for module in ("torch.distributed.nn", "torch.distributed.fsdp.sharded_grad_scaler"):
        # torch would import them later, when the group is the default of their functions, which then keep it for good.
        import_module(module)
    dist.init_process_group("nccl" if local.type == "cuda" else "gloo", timeout=PATIENCE)
    world = World(rank, size, local)
    try:
        yield world
        world.wait()  # torchrun ends whoever is not done yet when another process fails, be it on its way out
    finally:
        # A model that was trained together holds the group in cycles of references, and its threads, if they are still
        # at work when the interpreter goes, abort the process.
        gc.collect()
        dist.destroy_process_group()
