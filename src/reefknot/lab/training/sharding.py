"""A model of which every process holds a part: FSDP2 of torch, after ZeRO (Rajbhandari et al. 2020).

Each parameter is cut along its first dimension, as `torch.chunk` does, and so are its gradient and what the optimiser
keeps of it. torch gathers the parameters of one block of the encoder at a time, while it computes, and all others (the
ends, or an encoder without blocks) for a whole window, forward and backward: every kernel sees plain, whole tensors.

torch calls a part a DTensor. Optimisers, averages and clipping get the same memory as plain tensors instead: what they
do is done number by number, torch's fused SGD knows no DTensors, and a norm is all that has to be added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from reefknot.errors import SettingsError
from reefknot.lab.training.distributed import Parallel, Window, World
from reefknot.nn.models.language_model import LanguageModel

try:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.distributed.tensor import DTensor
except ImportError as error:
    raise SettingsError(
        "training.shard needs torch 2.6 or newer, built with its distributed package, and this is "
        f"{torch.__version__}; leave training.shard out"
    ) from error


class Sharded(Parallel):
    """A part of a model, in each of several processes."""

    window: Window

    def __init__(self, model: LanguageModel, world: World) -> None:
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        super().__init__(model, world)
        # torch may lay the parts out anew when the model is first used, and what was taken before would be a copy.
        self.score(lambda: 0.0)
        self.parameters = {name: _own(parameter) for name, parameter in model.named_parameters()}

    def _joined(self, window: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.world.device.type, (self.world.size,))
        for block in getattr(self.model.encoder, "blocks", ()):
            fully_shard(block, mesh=mesh)
        fully_shard(window, mesh=mesh, reshard_after_forward=False)
        register_fsdp_forward_method(window, "during")
        return window

    def clip(self, limit: float | None) -> Tensor:
        gradients = [each.grad for each in self.parameters.values() if each.grad is not None]
        square = nn.utils.get_total_norm(gradients).double().square()
        dist.all_reduce(square)
        norm = square.sqrt().to(gradients[0].dtype)
        nn.utils.clip_grads_with_norm_(self.parameters.values(), limit or math.inf, norm)
        return norm

    def scaler(self, enabled: bool) -> GradScaler:
        return ShardedGradScaler(self.world.device.type, enabled=enabled)

    @torch.no_grad()
    def score(self, validate: Callable[[], float]) -> float:
        """All processes compute the same, because each needs the others' parts. That takes no longer than to wait for
        the first, and no process holds more than it does in training."""
        assert isinstance(self.window, FSDPModule)
        found = self.window.during(validate)
        self.window.reshard()
        return self.world.from_first(found)

    def whole(self, name: str, tensor: Tensor) -> Tensor | None:
        """Gathered one by one on the first process's host; the others have their part in it and keep nothing."""
        if tensor.shape != self.parameters[name].shape:
            return tensor.detach()
        shape = self._shapes[name]
        padded = tensor.new_zeros(self._rows(shape), *shape[1:])
        padded[: len(tensor)] = tensor.detach()
        parts = [torch.empty_like(padded) for _ in range(self.world.size)] if self.world.first else None
        dist.gather(padded, parts)
        return None if parts is None else torch.cat([part.cpu() for part in parts])[: shape[0]]

    def own(self, name: str, whole: Tensor) -> Tensor:
        shape = self._shapes.get(name)
        if whole.shape != shape:
            return whole
        rows = self._rows(shape)
        # A copy: the part must not keep the whole alive.
        return whole[rows * self.world.rank : rows * (self.world.rank + 1)].clone()

    def _rows(self, shape: torch.Size) -> int:
        """Of a parameter's first dimension, how much a part has; the last ones may have less, or nothing."""
        return math.ceil(shape[0] / self.world.size)


def _own(parameter: nn.Parameter) -> nn.Parameter:
    """The memory of a part as a plain parameter, to which the gradients of all pieces are added."""
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        own = nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)
    if not own.requires_grad:
        return own

    def take(part: Tensor) -> None:
        assert isinstance(part.grad, DTensor)
        gradient, part.grad = part.grad.to_local(), None
        own.grad = gradient if own.grad is None else own.grad.add_(gradient)

    parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return own
