"""Training in several processes started by torchrun: ranks, collective operations, and data-parallel models.

    torchrun --nproc-per-node=2 -m reefknot train RECIPE

    with join_world("cuda") as world:          # the rank of this process, and the collective operations
        parallel = world.wrap_model(model)     # a `ParallelModel`, through which the training loop uses the model

Each process holds the whole model (DDP), or with `training.shard` one shard of it (`sharding.py`). Every process trains
on some of the rows (sequences) of each training window, which is the part of the text that one update reads.

The gradient of an update is the sum of the gradients of all processes, so it does not depend on their number. DDP and
FSDP average gradients instead. `update.py` therefore multiplies the loss by the number of processes.

Shapes: B rows, T steps, M of the B x T positions that the output end (classifier and loss) reads.
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
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from reefknot.errors import SettingsError
from reefknot.lab.training.signals import raise_on_signal
from reefknot.nn.encoders.contract import State, join_streams
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.contract import Plan

TIMEOUT = timedelta(hours=12)
"""How long processes wait for one another. It is long, because the other processes wait while the first one scores a
text. If a process dies, `PeerWatch` ends the others."""


class WindowResult(NamedTuple):
    """The result of the forward pass of a training window."""

    loss_sum: Tensor
    """The loss, summed over the targets. Training differentiates it."""
    part_sums: dict[str, Tensor]
    """The sum of each named part of the loss, such as `nll`, for the log."""
    next_state: State
    """The hidden state after the window."""
    penalties: dict[str, Tensor]
    """Terms of the objective that depend on the weights alone, by name."""


class LossModule(nn.Module):
    """A module whose forward pass computes the loss of a training window, because DDP and FSDP wrap forward passes."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs_BT: Tensor, targets_BT: Tensor, state: State | None, plan: Plan, positions_M: Tensor | None
    ) -> WindowResult:
        """Compute the loss of a training window.

        Args:
            inputs_BT: Input ids, with shape (B, T).
            targets_BT: Target ids, with shape (B, T).
            state: The hidden state before the window, or None to start from an empty state.
            plan: The result of `OutputEnd.prepare` for these targets, computed on the host.
            positions_M: The positions that the output end reads, with shape (M,), or None for all positions.
        """
        losses = self.model.loss(inputs_BT, targets_BT, state, plan, positions_M)
        part_sums = {name: part.sum.detach() for name, part in losses.parts.items()}
        return WindowResult(losses.sum(), part_sums, losses.state, losses.penalties)

    def run(self, function: Callable[[], float]) -> float:
        """Call a function that uses the model, and return its result.

        FSDP gathers the parameters only while a method of this module runs, so `ShardedModel` evaluates the model here.
        """
        return function()


class ParallelModel:
    """A model in training, in a single process or as one of several replicas.

    The training loop computes the loss with `loss_module`, runs the backward pass, calls `clip_gradients` and steps an
    optimiser of `trainable_parameters`. `ShardedModel` overrides all methods below whose work depends on the other
    processes.
    """

    def __init__(self, model: LanguageModel, world: World) -> None:
        self.model = model
        self.world = world
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        """The parameters, or this process's shards of them, by their names in the model."""
        self.loss_module: nn.Module = LossModule(model)
        if world.size > 1:
            self.loss_module = self._wrap(self.loss_module)

    # -- updates ---------------------------------------------------------------------------------------------------

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters to optimise. Frozen tables are left out, because weight decay would change them."""
        return [parameter for parameter in self.parameters.values() if parameter.requires_grad]

    def _wrap(self, loss_module: nn.Module) -> nn.Module:
        """Wrap the module in DDP, which averages gradients over the processes (see the top of the file)."""
        ddp_module = DistributedDataParallel(loss_module, gradient_as_bucket_view=True)
        # Buffers follow from the settings and never change. The constructor argument is deprecated in newer versions.
        ddp_module.broadcast_buffers = False
        return ddp_module

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients accumulate locally, to be exchanged by a later backward pass.

        A sharded model exchanges gradients in every backward pass, because no process has the memory for all of them.
        """
        if isinstance(self.loss_module, DistributedDataParallel):
            context: AbstractContextManager[None] = self.loss_module.no_sync()
            return context
        return nullcontext()

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        """Clip the norm of the whole gradient to `max_norm`, if it is not None. Return the norm before clipping."""
        if max_norm is None:
            max_norm = math.inf
        return nn.utils.clip_grad_norm_(self.parameters.values(), max_norm)

    def build_scaler(self, enabled: bool) -> GradScaler:
        """Return a gradient scaler that detects the same overflows in every process. It does nothing unless enabled."""
        return GradScaler(self.world.device.type, enabled=enabled)

    # -- validation and checkpoints --------------------------------------------------------------------------------

    def run_validation(self, validate: Callable[[], float]) -> float:
        """Call `validate`, which uses the model, in the first process. Return its result in every process."""
        result = math.nan
        if self.world.is_first:
            result = validate()
        return self.world.broadcast(result)

    def gather_full(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the full tensor to save for the parameter `name`. All processes must call this together.

        Args:
            name: Name of the parameter in the model.
            tensor: The parameter, or a tensor that belongs to it, such as a moment of the optimiser or an averaged
                weight. A tensor that does not have the shape of the local parameter is returned unchanged.

        Returns:
            The full tensor in the first process. The other processes may get None.
        """
        return tensor.detach()

    def local_shard(self, name: str, full: Tensor) -> Tensor:
        """Return this process's shard of a tensor that `gather_full` returned."""
        return full


@dataclass(frozen=True)
class World:
    """The processes that train together, and the rank of this process. A world of size 1 never communicates."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files and reports to the user."""
        return self.rank == 0

    def wrap_model(self, model: LanguageModel, shard: bool | Literal["vocabulary"] = False) -> ParallelModel:
        """Wrap a model for training. `shard` replaces parameters by shards, so create optimisers afterwards.

        Args:
            model: The model.
            shard: Divide all parameters among the processes, only those of the vocabulary, or none.
        """
        if not shard or self.size == 1:
            return ParallelModel(model, self)
        if shard == "vocabulary":
            from reefknot.lab.training.vocabulary import VocabularyParallelModel

            return VocabularyParallelModel(model, self)
        from reefknot.lab.training.sharding import ShardedModel  # takes half a second, and few runs need it

        return ShardedModel(model, self)

    def sum(self, values: list[float]) -> list[float]:
        """Return the sum of each value over all processes."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        sums: list[float] = tensor.tolist()
        return sums

    def all_true(self, flag: Tensor) -> Tensor:
        """Return a tensor that is true if the flag is set in every process. Does not wait for the device."""
        if self.size == 1:
            return flag
        minimum = flag.to(torch.int32)
        dist.all_reduce(minimum, dist.ReduceOp.MIN)
        return minimum.bool()

    def broadcast(self, value: float) -> float:
        """Return the value of the first process in every process."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, 0)
        return float(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes, by rank. They must have the same shape."""
        if self.size == 1:
            return [tensor]
        # The state of a GPU's random generator is a tensor on the host, which NCCL cannot gather.
        local_tensor = tensor.to(self.device).contiguous()
        tensors_by_rank = [torch.empty_like(local_tensor) for _ in range(self.size)]
        dist.all_gather(tensors_by_rank, local_tensor)
        return [rank_tensor.to(tensor.device) for rank_tensor in tensors_by_rank]

    def gather_streams(self, state: State) -> State:
        """Return the hidden state of all processes, for all streams (contiguous parts of the text), in their order."""
        if self.size == 1:
            return state
        states: list[State] = [{} for _ in range(self.size)]
        # Sort by name, because all processes must gather in the same order.
        for name, tensor in sorted(state.items()):
            for rank, rank_tensor in enumerate(self.gather(tensor)):
                states[rank][name] = rank_tensor
        return join_streams(states)

    def barrier(self) -> None:
        """Wait until all processes have arrived."""
        if self.size > 1:
            dist.barrier()


def choose_device(name: str) -> str:
    """Return `cpu` or `cuda` for the value of `--device`. `auto` chooses a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda: torch finds no GPU; use --device cpu")
    if name == "mps":
        raise SettingsError(
            "--device mps: Apple GPUs are not supported, because training adds up losses in float64, which they do not "
            "have; use --device cpu"
        )
    if name not in ("cpu", "cuda"):
        raise SettingsError(f"--device {name}: must be auto, cpu or cuda")
    return name


@contextmanager
def join_world(device: str) -> Iterator[World]:
    """Join the processes started by torchrun, or yield a world of size 1. `device` is `cpu` or `cuda`."""
    # torchrun sets the variables WORLD_SIZE, RANK and LOCAL_RANK.
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(device=torch.device(device))
        return

    rank = int(os.environ["RANK"])
    if device == "cuda":
        local_device = torch.device(device, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local_device)
    else:
        local_device = torch.device("cpu")

    for module in ("torch.distributed.nn", "torch.distributed.fsdp.sharded_grad_scaler"):
        # Import them before the group exists. Otherwise the default arguments of their functions keep it alive forever.
        import_module(module)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)

    world = World(rank, size, local_device)
    try:
        with _ending_together(rank, size):
            yield world
            world.barrier()  # torchrun kills unfinished processes if another process fails, even while it shuts down
    finally:
        # Wrapped models hold the process group in reference cycles. If its threads still run when the interpreter
        # exits, they abort the process.
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def _ending_together(rank: int, size: int) -> Iterator[None]:
    """End this process with a message if another process ends, and report an error of this process to the others."""
    from reefknot.lab.training.peers import PeerWatch  # few runs have several processes

    with PeerWatch(rank, size) as watch, raise_on_signal("stopped; run the same command again to continue"):
        try:
            yield
        except RuntimeError as error:
            stopped = watch.convert_error(error)
            if stopped is None:
                watch.report(error)
                raise
            raise stopped from error
        except BaseException as error:
            watch.report(error)
            raise
