"""Models whose vocabulary is divided among the processes (`training.shard = "vocabulary"`).

Every process holds some rows of the tables and biases of the output end, and a copy of all other parameters, which DDP
keeps equal. The processes exchange hidden states instead of table rows (`kernels/parallel_rows.py`), so no process has
a whole table, its gradient or its optimiser state while it trains. The first process gathers the tables to validate. A
tied input end looks its vectors up in the same shards.

Every process's objective is multiplied by the number of processes, because DDP averages gradients. The gradient of a
shard is already the sum over the processes, so it is divided by their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from reefknot.errors import SettingsError, describe_type
from reefknot.kernels.parallel import ClassShard
from reefknot.lab.training.distributed import ParallelModel, World
from reefknot.lab.training.row_shards import RowShards
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.tables import WordTable


class VocabularyParallelModel(ParallelModel):
    """A model whose tables and biases of the output end are divided among several processes."""

    def __init__(self, model: LanguageModel, world: World) -> None:
        check_vocabulary_can_be_divided(model)
        self._holders = _find_holders(model)
        self._tables = [module for module in model.output.modules() if isinstance(module, WordTable)]
        full_shapes = {name: holder.get_parameter(kind).shape for name, (holder, kind) in self._holders.items()}
        self._shards = RowShards(full_shapes, world)
        # The collective operations of the tables must not mix with those of DDP.
        self._group = dist.new_group()
        for table in self._tables:
            self._divide_table(table)
        for name, (holder, kind) in self._holders.items():
            self._divide_parameter(name, holder, kind)
        super().__init__(model, world)

    def _divide_table(self, table: WordTable) -> None:
        rows = self._shards.local_rows(table.weight.shape)
        num_words = len(table.weight)
        last_rank_rows = num_words - (self._shards.world.size - 1) * math.ceil(num_words / self._shards.world.size)
        if last_rank_rows < 1:
            raise SettingsError(
                f"training.shard = vocabulary: a table of {num_words} words cannot be divided among "
                f"{self._shards.world.size} processes; use fewer processes"
            )
        table.shard = ClassShard(self._group, rows.start, num_words, sum_of_weights=0.0)

    def _divide_parameter(self, name: str, holder: nn.Module, kind: str) -> None:
        """Replace a parameter by this process's rows of it."""
        parameter = holder.get_parameter(kind)
        rows = self._shards.local_shard(name, parameter.detach())
        shard = nn.Parameter(rows, requires_grad=parameter.requires_grad)
        if shard.requires_grad:
            num_processes = self._shards.world.size
            shard.register_hook(lambda gradient: gradient / num_processes)  # type: ignore[no-untyped-call]
        setattr(holder, kind, shard)

    def _wrap(self, loss_module: nn.Module) -> nn.Module:
        ignored_names = [f"model.{name}" for name in self._holders]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            loss_module, ignored_names
        )
        return super()._wrap(loss_module)

    def clip_gradients(self, max_norm: float | None) -> Tensor:
        if max_norm is None:
            max_norm = math.inf
        divided: list[Tensor] = []
        copied: list[Tensor] = []
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                (divided if name in self._holders else copied).append(parameter.grad)
        squared_norm = nn.utils.get_total_norm(divided).double().square()
        dist.all_reduce(squared_norm)
        squared_norm += nn.utils.get_total_norm(copied).double().square()
        norm = squared_norm.sqrt().to((copied or divided)[0].dtype)
        nn.utils.clip_grads_with_norm_(self.parameters.values(), max_norm, norm)
        return norm

    def build_scaler(self, enabled: bool) -> GradScaler:
        if not enabled:
            return super().build_scaler(enabled)
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(self.world.device.type)

    def run_validation(self, validate: Callable[[], float]) -> float:
        with self._whole_tables():
            return super().run_validation(validate)

    @contextmanager
    def _whole_tables(self) -> Iterator[None]:
        """Give the first process whole tables and biases inside the `with` block."""
        shards = {name: holder.get_parameter(kind) for name, (holder, kind) in self._holders.items()}
        class_shards = [table.shard for table in self._tables]
        for name, (holder, kind) in self._holders.items():
            full = self._shards.gather_full(name, shards[name])
            if full is not None:
                setattr(holder, kind, nn.Parameter(full.to(self.world.device), requires_grad=False))
        if self.world.is_first:
            for table in self._tables:
                table.shard = None
        try:
            yield
        finally:
            for name, (holder, kind) in self._holders.items():
                setattr(holder, kind, shards[name])
            for table, class_shard in zip(self._tables, class_shards, strict=True):
                table.shard = class_shard

    def gather_full(self, name: str, tensor: Tensor) -> Tensor | None:
        if name not in self._holders or tensor.shape != self.parameters[name].shape:
            return tensor.detach()
        return self._shards.gather_full(name, tensor)

    def local_shard(self, name: str, full: Tensor) -> Tensor:
        return self._shards.local_shard(name, full)


def check_vocabulary_can_be_divided(model: LanguageModel) -> None:
    """Raise a `SettingsError` unless the loss of the output end works with a divided vocabulary."""
    if not model.output.divides_classes:
        raise SettingsError(
            f"training.shard = vocabulary: the words of {describe_type(model.output)} cannot be divided among "
            "processes; use softmax, augmented or adaptive, or training.shard = true"
        )
    for module in model.output.modules():
        if isinstance(module, Classifier) and type(module).encode is not Classifier.encode:
            raise SettingsError(
                f"training.shard = vocabulary: the classifier {type(module).__name__} computes its class vectors from "
                "the table; use a plain, bilinear or projected classifier, or training.shard = true"
            )


def _find_holders(model: LanguageModel) -> dict[str, tuple[nn.Module, str]]:
    """Return the parameters to divide, by name: the module that holds each parameter, and its name in this module."""
    wanted: dict[int, tuple[nn.Module, str]] = {}
    for module in model.output.modules():
        if isinstance(module, WordTable):
            wanted[id(module.weight)] = module, "weight"
        elif isinstance(module, Classifier) and module.bias is not None:
            wanted[id(module.bias)] = module, "bias"
    return {name: wanted[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in wanted}
