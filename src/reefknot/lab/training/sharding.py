"""Sharded models: every process holds one shard of each parameter.

`ShardedModel` wraps a model with FSDP2 of torch, which follows ZeRO (Rajbhandari et al. 2020). It replaces
`ParallelModel` in `distributed.py` if a recipe sets `training.shard`.

Each parameter is split along its first dimension, as `torch.chunk` does, and so are its gradient and the state of the
optimiser. torch gathers the parameters of one block of the encoder at a time, while the block computes. It gathers all
other parameters for the forward and backward pass of a whole training window: those of the input end (embedding), of
the output end (classifier and loss), and of an encoder without blocks. So kernels always see plain, full tensors.

torch represents a shard as a DTensor. Optimisers, averages and clipping use plain tensors on the same memory, because
torch's fused SGD does not support DTensors. All of them work element by element, except that the norm of the gradient
is summed over the processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from reefknot.errors import SettingsError
from reefknot.lab.training.distributed import LossModule, ParallelModel, World
from reefknot.lab.training.row_shards import RowShards
from reefknot.nn.models.language_model import LanguageModel

try:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.distributed.tensor import DTensor
except ImportError as error:
    raise SettingsError(
        "training.shard needs torch 2.6 or newer with its distributed package, but this is torch "
        f"{torch.__version__}; leave training.shard out"
    ) from error


class ShardedModel(ParallelModel):
    """A model that is sharded over several processes."""

    loss_module: LossModule

    def __init__(self, model: LanguageModel, world: World) -> None:
        self._shards = RowShards({name: parameter.shape for name, parameter in model.named_parameters()}, world)
        super().__init__(model, world)
        # torch may change the layout of the shards in the first forward pass. Tensors taken earlier would be copies.
        self.run_validation(lambda: 0.0)
        self.parameters = {name: _local_parameter(parameter) for name, parameter in model.named_parameters()}

    def _wrap(self, loss_module: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.world.device.type, (self.world.size,))
        for block in getattr(self.model.encoder, "blocks", ()):
            fully_shard(block, mesh=mesh)
        fully_shard(loss_module, mesh=mesh, reshard_after_forward=False)
        register_fsdp_forward_method(loss_module, "run")
        return loss_module

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        if max_norm is None:
            max_norm = math.inf
        local_gradients = [shard.grad for shard in self.parameters.values() if shard.grad is not None]
        squared_norm = nn.utils.get_total_norm(local_gradients).double().square()
        dist.all_reduce(squared_norm)
        norm = squared_norm.sqrt().to(local_gradients[0].dtype)
        nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        return norm

    def build_scaler(self, enabled: bool) -> GradScaler:
        return ShardedGradScaler(self.world.device.type, enabled=enabled)

    @torch.no_grad()
    def run_validation(self, validate: Callable[[], float]) -> float:
        """Return the result of `validate` in every process.

        All processes compute it, because every process needs the shards of the others. This takes no longer than
        waiting for the first process, and needs no more memory than training.
        """
        assert isinstance(self.loss_module, FSDPModule)
        result = self.loss_module.run(validate)
        self.loss_module.reshard()
        return self.world.broadcast(result)

    def gather_full(self, name: str, tensor: Tensor) -> Tensor | None:
        if tensor.shape != self.parameters[name].shape:
            return tensor.detach()
        return self._shards.gather_full(name, tensor)

    def local_shard(self, name: str, full: Tensor) -> Tensor:
        return self._shards.local_shard(name, full)


def _local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a plain parameter that shares the memory of a shard and accumulates its gradients over micro-batches."""
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        local = nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)
    if not local.requires_grad:
        return local

    def move_gradient(shard: Tensor) -> None:
        """Move the gradient of the shard to the plain parameter, after a backward pass has computed it."""
        assert isinstance(shard.grad, DTensor)
        gradient = shard.grad.to_local()
        shard.grad = None
        if local.grad is None:
            local.grad = gradient
        else:
            local.grad.add_(gradient)

    parameter.register_post_accumulate_grad_hook(move_gradient)  # type: ignore[no-untyped-call]
    return local
