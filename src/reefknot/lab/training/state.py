"""The state of training that checkpoints save: everything that determines the next step, and nothing else.

    captured = state.capture(world)             # the state as tensors and JSON values
    state.restore(*captured, world, seed)

`TrainState` holds the model, the optimiser, the hidden state, the weight averages and `Progress` (plain counters). A
saved state depends neither on the number of processes nor on sharding, so a run can be resumed with a different number
of processes. `capture` and `restore` need no change for a new field of `Progress` or a new buffer of the model.

`named_weights` and `load_weights`, at the end, save and load only the weights of a model.

Terms: a window is the part of the text that one update reads. A stream is a contiguous part of the text; each process
reads some of the streams. An iterate is the value of the weights after one update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from reefknot.errors import DataError
from reefknot.lab.config.upgrade import upgrade_weight_names
from reefknot.lab.training import generators
from reefknot.lab.training.averaging import WeightAverages
from reefknot.lab.training.distributed import ParallelModel, World
from reefknot.nn.encoders.contract import State, select_streams


@dataclass
class Progress:
    """The progress of training as plain values, which are saved in state.json."""

    step: int = 0
    """Number of updates so far."""
    epoch: int = 1
    """The current epoch. After training it is one more than the last epoch."""
    window: int = 0
    """Index of the next training window in this epoch. In skip-gram training, the position of the next word."""
    tokens: int = 0
    """Number of targets read so far, including the targets of updates that float16 skipped."""
    logged: dict[str, float] = field(default_factory=dict)
    """Sums of the parts of the loss since the last line of metrics, so that a resumed run writes the same next line."""
    logged_tokens: int = 0
    """Number of targets in these sums."""
    metrics_lines: int = 0
    """Number of lines of metrics.jsonl that were written before the checkpoint."""
    best_nll: float | None = None
    """Best validation loss so far."""
    best_step: int = 0
    """The step of the best validation loss."""
    best_epoch: float = 0
    """Number of passes over the text at that step."""
    validated: list[float] = field(default_factory=list)
    """Validation losses for the averaging and stopping rules. The list starts again when averaging starts."""
    averaged_from: int = 0
    """The first epoch whose iterates are averaged, or 0 if there is none."""
    stopped: str = ""
    """Why training was stopped early; empty if it was not."""
    skipped: int = 0
    """Number of updates that were skipped because float16 overflowed."""
    skipped_in_a_row: int = 0
    """Number of skipped updates since the last applied update."""
    seconds: float = 0.0
    """Time spent training, over all sessions."""
    peak_memory_bytes: int = 0
    """Largest peak memory of any session."""

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "the checkpoint") -> Progress:
        """Return saved progress. Raise an error that names `source` if another version of Reefknot has saved it."""
        if set(values) != {field.name for field in fields(cls)}:
            raise DataError(
                f"{source} was written by another version of Reefknot and cannot be resumed; use another --out"
            )
        return cls(**values)


class CapturedState(NamedTuple):
    """A training state as a checkpoint saves it."""

    weights: dict[str, Tensor]
    """The weights to evaluate. With averaging, they are the averages, and `tensors` includes the last iterate."""
    tensors: dict[str, Tensor]
    """The other tensors. Their names begin with `hidden`, `generator`, `average`, `iterate` or `optimiser`."""
    values: dict[str, Any]
    """Everything that is not a tensor, as plain JSON."""


@dataclass
class TrainState:
    """The state that a checkpoint holds."""

    parallel: ParallelModel
    """The model, or this process's share of it."""
    optimiser: torch.optim.Optimizer
    """Optimiser of the parameters of `parallel`."""
    hidden: State
    """The hidden state that the encoder carries between windows, for the streams of this process."""
    progress: Progress
    averages: WeightAverages | None = None
    """Averages of the same parameters, once averaging has started."""
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))
    """Loss scaler for float16."""

    def capture(self, world: World) -> CapturedState:
        """Return the state as tensors and plain values.

        All processes must call this together. The result is complete in the first process only.
        """
        # The hidden state and the random generators of all processes.
        tensors: dict[str, Tensor] = {}
        for name, tensor in world.gather_streams(self.hidden).items():
            tensors[f"hidden.{name}"] = tensor
        for name, tensor in generators.capture_states(world.device).items():
            for rank, rank_tensor in enumerate(world.gather(tensor)):
                tensors[f"generator.{rank}.{name}"] = rank_tensor

        # The weights, and with averaging both the averages and the last iterate.
        parameters = self._gather_full(self.parallel.parameters)
        weights = parameters | _persistent_buffers(self.parallel.model)
        if self.averages is not None:
            tensors["average.count"] = self.averages.count
            for name, parameter in parameters.items():
                tensors[f"iterate.{name}"] = parameter
            weights |= self._gather_full(self.averages.means)

        optimiser_tensors, optimiser_values = self._capture_optimiser()
        tensors |= optimiser_tensors
        values = {
            "progress": asdict(self.progress),
            "optimiser": optimiser_values,
            "scaler": self.scaler.state_dict(),
            "processes": world.size,
        }
        return CapturedState(weights, tensors, values)

    def restore(
        self, weights: dict[str, Tensor], tensors: dict[str, Tensor], values: dict[str, Any], world: World, seed: int
    ) -> None:
        """Restore a saved state, which any number of processes may have saved.

        Args:
            weights: The saved weights.
            tensors: The other saved tensors.
            values: The saved plain values.
            world: The processes that train together now.
            seed: Seed of the run, for generators that cannot be restored.
        """
        weights = upgrade_weight_names(weights)
        tensors_by_prefix = _group_by_prefix(upgrade_weight_names(tensors))
        self._restore_weights(weights, tensors_by_prefix)
        self._restore_hidden(tensors_by_prefix.get("hidden", {}), world)
        self._restore_optimiser(tensors_by_prefix.get("optimiser", {}), values["optimiser"])

        self.progress = Progress.from_values(values["progress"])
        self.scaler.load_state_dict(values["scaler"])

        if values["processes"] == world.size:
            states_by_rank = _group_by_prefix(tensors_by_prefix["generator"])
            generators.restore_states(states_by_rank[str(world.rank)], world.device)
        else:
            # The saved states belong to another number of processes. The new seed depends on the step, so that the run
            # does not repeat its random numbers.
            generators.seed_everything(seed + self.progress.step, world.rank)

    # -- weights and averages --------------------------------------------------------------------------------------

    def _restore_weights(
        self, weights: dict[str, Tensor], tensors_by_prefix: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Restore the parameters. If averaging had started, `weights` are the averages, which are restored too."""
        self._load_weights(weights)
        self.averages = None
        if "iterate" in tensors_by_prefix:
            # The averages start as a copy of the weights just loaded, which are the saved means.
            self.averages = WeightAverages(self.parallel.parameters)
            self.averages.count.copy_(tensors_by_prefix["average"]["count"])
            self._load_weights({**weights, **tensors_by_prefix["iterate"]})

    def _gather_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return full tensors to save. In processes other than the first, the result may be empty."""
        full_tensors: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            full_tensor = self.parallel.gather_full(name, tensor)
            if full_tensor is not None:
                full_tensors[name] = full_tensor
        return full_tensors

    def _load_weights(self, saved_weights: dict[str, Tensor]) -> None:
        """Copy saved weights into the parameters and buffers of the model."""
        parameters = {name: parameter.detach() for name, parameter in self.parallel.parameters.items()}
        model_tensors = parameters | _persistent_buffers(self.parallel.model)
        local_weights = {name: self.parallel.local_shard(name, weight) for name, weight in saved_weights.items()}
        _copy_by_name(source=local_weights, target=model_tensors)

    # -- hidden state ----------------------------------------------------------------------------------------------

    def _restore_hidden(self, saved_hidden: State, world: World) -> None:
        """Restore the hidden state of this process's streams from the state of all streams."""
        num_streams = 0
        if self.hidden:
            num_streams = next(iter(self.hidden.values())).shape[1]
        first_stream = world.rank * num_streams
        local_streams = slice(first_stream, first_stream + num_streams)

        all_hidden = {name: tensor.to(world.device) for name, tensor in saved_hidden.items()}
        local_hidden = select_streams(all_hidden, local_streams)
        self.hidden = {name: tensor.clone() for name, tensor in local_hidden.items()}

    # -- optimiser -------------------------------------------------------------------------------------------------

    def _capture_optimiser(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors of the optimiser, and its other values as plain JSON.

        The values are `groups`, the settings of the parameter groups, and `numbers`, the state that is not a tensor. A
        name such as `0.momentum_buffer` starts with the index of the parameter.
        """
        state_dict = self.optimiser.state_dict()
        parameter_names = self._optimised_names()
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Any] = {}
        # All processes must gather in the same order. After a resume, the order of the entries may differ.
        for index, entries in sorted(state_dict["state"].items()):
            for name, value in sorted(entries.items()):
                if not isinstance(value, Tensor):
                    numbers[f"{index}.{name}"] = value
                    continue
                full_tensor = self.parallel.gather_full(parameter_names[index], value)
                if full_tensor is not None:
                    tensors[f"optimiser.{index}.{name}"] = full_tensor
        groups = [_plain_group(group) for group in state_dict["param_groups"]]
        return tensors, {"groups": groups, "numbers": numbers}

    def _restore_optimiser(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore what `_capture_optimiser` returned. The keys of tensors and numbers are `index.name`."""
        # The state of each parameter, by the index of the parameter.
        state: dict[int, dict[str, Any]] = {}
        parameter_names = self._optimised_names()
        for key, value in {**tensors, **values["numbers"]}.items():
            index_text, _, name = key.partition(".")
            index = int(index_text)
            if isinstance(value, Tensor):
                value = self.parallel.local_shard(parameter_names[index], value)
            state.setdefault(index, {})[name] = value

        # The settings of the parameter groups.
        old_groups = [dict(group) for group in self.optimiser.param_groups]
        new_groups = []
        for saved_group, old_group in zip(values["groups"], old_groups, strict=True):
            # The checkpoint may come from another device, so keep the options that choose kernels for this device.
            options = {key: old_group[key] for key in ("fused", "foreach", "capturable") if key in old_group}
            new_groups.append(saved_group | options)
        self.optimiser.load_state_dict({"state": state, "param_groups": new_groups})

        # A captured CUDA graph reads the learning rate from a tensor, so fill this tensor instead of replacing it.
        for group, old_group in zip(self.optimiser.param_groups, old_groups, strict=True):
            for key, old_value in old_group.items():
                if isinstance(old_value, Tensor):
                    group[key] = old_value.fill_(group[key])

    def _optimised_names(self) -> list[str]:
        """Return the names of the parameters in the order in which the optimiser numbers them."""
        names_by_id = {id(parameter): name for name, parameter in self.parallel.parameters.items()}
        optimised_names = []
        for group in self.optimiser.param_groups:
            optimised_names += [names_by_id[id(parameter)] for parameter in group["params"]]
        return optimised_names


def _plain_group(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group with its tensors, such as the learning rate, converted to numbers for JSON."""
    plain_group = dict(group)
    for key, value in group.items():
        if isinstance(value, Tensor):
            plain_group[key] = value.item()
    return plain_group


def _group_by_prefix(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group tensors by the first part of their names: `a.b` becomes [`a`][`b`]."""
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        prefix, _, name = key.partition(".")
        groups.setdefault(prefix, {})[name] = tensor
    return groups


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model, with a tied table only under its first name."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | _persistent_buffers(model)


def load_weights(model: nn.Module, saved_weights: dict[str, Tensor]) -> None:
    """Copy saved weights into the tensors of a model. Tied tables stay tied."""
    _copy_by_name(source=upgrade_weight_names(saved_weights), target=named_weights(model))


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict includes. Other buffers are computed again from the settings."""
    persistent_names = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent_names}


def _copy_by_name(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Copy each source tensor into the target tensor of the same name."""
    mismatched_names = sorted(target.keys() ^ source.keys())
    if not mismatched_names:
        mismatched_names = [name for name in target if target[name].shape != source[name].shape]
    if mismatched_names:
        raise DataError(f"the checkpoint holds a different model: {', '.join(mismatched_names[:5])} do not match")
    with torch.no_grad():
        for name, tensor in target.items():
            tensor.copy_(source[name])
