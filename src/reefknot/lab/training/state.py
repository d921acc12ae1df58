"""Training state as a value: everything that decides what the next step does, and nothing else.

`capture` and `restore` are total: a field added to `Progress` or a buffer added to the model is saved because it is
there, not because somebody remembered it. What is saved does not show how many processes there were, nor whether each
held the whole model: any others can go on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from reefknot.errors import DataError
from reefknot.lab.config.upgrade import upgrade_weight_names
from reefknot.lab.training import generators
from reefknot.lab.training.averaging import Averages
from reefknot.lab.training.distributed import Parallel, World
from reefknot.nn.encoders.contract import State, select_streams


@dataclass
class Progress:
    """Where training stands. Plain numbers under names: this is what state.json holds."""

    step: int = 0
    """Updates done."""
    epoch: int = 1
    """The epoch we are in; beyond the last one when training is done."""
    window: int = 0
    """The next window of this epoch: the cursor into the text."""
    tokens: int = 0
    """Targets read, also those of updates that float16 left out."""
    logged: dict[str, float] = field(default_factory=dict)
    """Sums of the loss's parts since the last line of metrics: after a resume the line is what it would have been."""
    logged_tokens: int = 0
    metrics_lines: int = 0
    best_nll: float | None = None
    best_step: int = 0
    best_epoch: float = 0
    validated: list[float] = field(default_factory=list)
    """Validation losses that averaging and stopping go by: all, or those since averaging began."""
    averaged_from: int = 0
    """The first epoch whose iterates are averaged; 0: there is none."""
    stopped: str = ""
    """Why training ended before its last epoch or update; empty where it did not."""
    skipped: int = 0
    """Updates that were left out because float16 overflowed."""
    skipped_in_a_row: int = 0
    """Of them, those since the last one that was made."""
    seconds: float = 0.0
    """Time spent training, over all sittings."""
    peak_memory_bytes: int = 0
    """The most that any sitting held."""


@dataclass
class TrainState:
    """The value that a checkpoint holds."""

    parallel: Parallel
    optimiser: torch.optim.Optimizer
    """Of the parameters of `parallel`."""
    hidden: State
    """What the encoder carries between windows: of this process's streams."""
    progress: Progress
    averages: Averages | None = None
    """Of the same parameters, once they are kept."""
    scaler: GradScaler = field(default_factory=lambda: GradScaler(enabled=False))
    """Of the loss, in float16."""

    def capture(self, world: World) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """Weights, other tensors, numbers. All processes call it; what comes back is complete in the first.

        The weights are those to use: the averages where there are some, and then the iterate that training goes on from
        is among the other tensors.
        """
        tensors = {f"hidden.{name}": tensor for name, tensor in world.gather_streams(self.hidden).items()}
        for name, tensor in generators.capture(world.device).items():
            for rank, each in enumerate(world.gather(tensor)):
                tensors[f"generator.{rank}.{name}"] = each
        iterate = self._whole(self.parallel.parameters)
        model = iterate | _lasting_buffers(self.parallel.model)
        if self.averages is not None:
            tensors["average.count"] = self.averages.count
            tensors |= {f"iterate.{name}": tensor for name, tensor in iterate.items()}
            model |= self._whole(self.averages.means)
        saved = self.optimiser.state_dict()
        parameters = self._optimised()
        numbers: dict[str, Any] = {}
        # Sorted: what came from a file has another order in every process, and they gather one by one.
        for index, entries in sorted(saved["state"].items()):
            for name, value in sorted(entries.items()):
                if not isinstance(value, Tensor):
                    numbers[f"{index}.{name}"] = value
                elif (whole := self.parallel.whole(parameters[index], value)) is not None:
                    tensors[f"optimiser.{index}.{name}"] = whole
        values = {
            "progress": asdict(self.progress),
            "optimiser": {"groups": [_plain(group) for group in saved["param_groups"]], "numbers": numbers},
            "scaler": self.scaler.state_dict(),
            "processes": world.size,
        }
        return model, tensors, values

    def restore(
        self, model: dict[str, Tensor], tensors: dict[str, Tensor], values: dict[str, Any], world: World, seed: int
    ) -> None:
        """Become the saved state, whatever number of processes saved it."""
        model, tensors = upgrade_weight_names(model), upgrade_weight_names(tensors)
        self._load(model)
        groups = _group(tensors)
        self.averages = None
        if "iterate" in groups:
            self.averages = Averages(self.parallel.parameters)
            self.averages.count.copy_(groups["average"]["count"])
            self._load(model | groups["iterate"])
        streams = next(iter(self.hidden.values())).shape[1] if self.hidden else 0
        mine = slice(world.rank * streams, (world.rank + 1) * streams)
        whole = {name: tensor.to(world.device) for name, tensor in groups.get("hidden", {}).items()}
        self.hidden = {name: tensor.clone() for name, tensor in select_streams(whole, mine).items()}
        self._restore_optimiser(groups.get("optimiser", {}), values["optimiser"])
        names = {each.name for each in fields(Progress)}
        if set(values["progress"]) != names:
            raise DataError("the checkpoint was written by another version of Reefknot and cannot be resumed")
        self.progress = Progress(**values["progress"])
        self.scaler.load_state_dict(values["scaler"])
        if values["processes"] == world.size:
            generators.restore(_group(groups["generator"])[str(world.rank)], world.device)
        else:
            # Other processes hold other streams: their random numbers start anew, but from the step, not from zero.
            generators.seed_everything(seed + self.progress.step, world.rank)

    def _whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the parameters' shapes as they are saved; in other processes than the first there may be none."""
        found = {name: self.parallel.whole(name, tensor) for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _load(self, saved: dict[str, Tensor]) -> None:
        own = {name: each.detach() for name, each in self.parallel.parameters.items()}
        _copy(
            own | _lasting_buffers(self.parallel.model),
            {name: self.parallel.own(name, tensor) for name, tensor in saved.items()},
        )

    def _optimised(self) -> list[str]:
        """The names of the parameters, in the order in which the optimiser counts them."""
        names = {id(parameter): name for name, parameter in self.parallel.parameters.items()}
        return [names[id(parameter)] for group in self.optimiser.param_groups for parameter in group["params"]]

    def _restore_optimiser(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        state: dict[int, dict[str, Any]] = {}
        parameters = self._optimised()
        for key, value in {**tensors, **values["numbers"]}.items():
            index, _, name = key.partition(".")
            own = self.parallel.own(parameters[int(index)], value) if isinstance(value, Tensor) else value
            state.setdefault(int(index), {})[name] = own
        before = [dict(group) for group in self.optimiser.param_groups]
        # How torch runs the optimiser and where it keeps its counts is the device's matter: it may be another one now.
        ways = [{key: old[key] for key in ("fused", "foreach", "capturable") if key in old} for old in before]
        groups = [group | way for group, way in zip(values["groups"], ways, strict=True)]
        self.optimiser.load_state_dict({"state": state, "param_groups": groups})
        for group, old in zip(self.optimiser.param_groups, before, strict=True):
            # A captured step reads its rate where it lies, so it stays there.
            group |= {key: place.fill_(group[key]) for key, place in old.items() if isinstance(place, Tensor)}


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """An optimiser's group for JSON: a rate may lie on the device."""
    return {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}


def _group(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """`a.b` -> [`a`][`b`]."""
    groups: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        head, _, rest = key.partition(".")
        groups.setdefault(head, {})[rest] = tensor
    return groups


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and lasting buffers, each stored once: a tied table under its first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()} | _lasting_buffers(model)


def _lasting_buffers(model: nn.Module) -> dict[str, Tensor]:
    lasting = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in lasting}


def load_weights(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy saved weights into the model; ties stay as they are because the tensors do."""
    _copy(weights(model), upgrade_weight_names(saved))


def _copy(own: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Give tensors the values that were saved under their names."""
    if own.keys() != saved.keys() or any(own[name].shape != saved[name].shape for name in own):
        wrong = sorted(own.keys() ^ saved.keys()) or [n for n in own if own[n].shape != saved[n].shape]
        raise DataError(f"the checkpoint holds another model: {', '.join(wrong[:5])} do not fit")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
