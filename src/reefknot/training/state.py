"""Training state as a value: everything that decides what the next step does, and nothing else.

`capture` and `restore` are total: a field added to `Progress` or a buffer added to the model is saved because it is
there, not because somebody remembered it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from reefknot.encoders.contract import State, select_streams
from reefknot.errors import DataError
from reefknot.training import generators
from reefknot.training.averaging import Averages
from reefknot.training.distributed import World


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
    """Targets trained on."""
    logged: dict[str, float] = field(default_factory=dict)
    """Sums of the loss's parts since the last line of metrics: after a resume the line is what it would have been."""
    logged_tokens: int = 0
    metrics_lines: int = 0
    best_nll: float | None = None
    best_step: int = 0
    best_epoch: int = 0
    validated: list[float] = field(default_factory=list)
    """Validation losses that averaging and stopping go by: of each epoch, or of each since averaging began."""
    averaged_from: int = 0
    """The first epoch whose iterates are averaged; 0: there is none."""
    stopped: str = ""
    """Why training ended before its last epoch; empty where it did not."""
    seconds: float = 0.0
    """Time spent training, over all sittings."""
    peak_memory_bytes: int = 0
    """The most that any sitting held."""


@dataclass
class TrainState:
    """The value that a checkpoint holds."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    hidden: State
    """What the encoder carries between windows: of this process's streams."""
    progress: Progress
    averages: Averages | None = None
    """Of the model's parameters, once they are kept."""

    def capture(self, world: World) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """Weights, other tensors, numbers. All processes call it; what comes back holds for all of them.

        The weights are those to use: the averages where there are some, and then the iterate that training goes on from
        is among the other tensors.
        """
        tensors = {f"hidden.{name}": tensor for name, tensor in world.gather_streams(self.hidden).items()}
        for name, tensor in generators.capture(world.device).items():
            for rank, each in enumerate(world.gather(tensor)):
                tensors[f"generator.{rank}.{name}"] = each
        model = weights(self.model)
        if self.averages is not None:
            tensors["average.count"] = self.averages.count
            tensors |= {f"iterate.{name}": model[name] for name in self.averages.means}
            model |= self.averages.means
        saved = self.optimiser.state_dict()
        numbers: dict[str, Any] = {}
        for index, entries in saved["state"].items():
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimiser.{index}.{name}"] = value
                else:
                    numbers[f"{index}.{name}"] = value
        values = {
            "progress": asdict(self.progress),
            "optimiser": {"groups": [_plain(group) for group in saved["param_groups"]], "numbers": numbers},
            "processes": world.size,
        }
        return model, tensors, values

    def restore(
        self, model: dict[str, Tensor], tensors: dict[str, Tensor], values: dict[str, Any], world: World, seed: int
    ) -> None:
        """Become the saved state, whatever number of processes saved it."""
        load_weights(self.model, model)
        groups = _group(tensors)
        self.averages = None
        if "iterate" in groups:
            self.averages = Averages(self.model)
            self.averages.count.copy_(groups["average"]["count"])
            load_weights(self.model, model | groups["iterate"])
        streams = next(iter(self.hidden.values())).shape[1] if self.hidden else 0
        mine = slice(world.rank * streams, (world.rank + 1) * streams)
        whole = {name: tensor.to(world.device) for name, tensor in groups.get("hidden", {}).items()}
        self.hidden = {name: tensor.clone() for name, tensor in select_streams(whole, mine).items()}
        self._restore_optimiser(groups.get("optimiser", {}), values["optimiser"])
        names = {each.name for each in fields(Progress)}
        if set(values["progress"]) != names:
            raise DataError("the checkpoint was written by another version of Reefknot and cannot be resumed")
        self.progress = Progress(**values["progress"])
        if values["processes"] == world.size:
            generators.restore(_group(groups["generator"])[str(world.rank)], world.device)
        else:
            # Other processes hold other streams: their random numbers start anew, but from the step, not from zero.
            generators.seed_everything(seed + self.progress.step, world.rank)

    def _restore_optimiser(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        state: dict[int, dict[str, Any]] = {}
        for key, value in {**tensors, **values["numbers"]}.items():
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = value
        before = [dict(group) for group in self.optimiser.param_groups]
        self.optimiser.load_state_dict({"state": state, "param_groups": values["groups"]})
        for group, old in zip(self.optimiser.param_groups, before, strict=True):
            # A captured step reads its rate where it lies, so it stays there. How torch runs the optimiser is the
            # device's matter, and that may be another one now.
            group |= {key: place.fill_(group[key]) for key, place in old.items() if isinstance(place, Tensor)}
            group |= {key: old[key] for key in ("fused", "foreach") if key in old}


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
    kept = {name: parameter.detach() for name, parameter in model.named_parameters()}
    lasting = model.state_dict(keep_vars=True)
    kept.update({name: buffer for name, buffer in model.named_buffers() if name in lasting})
    return kept


def load_weights(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy saved weights into the model; ties stay as they are because the tensors do."""
    own = weights(model)
    if own.keys() != saved.keys() or any(own[name].shape != saved[name].shape for name in own):
        wrong = sorted(own.keys() ^ saved.keys()) or [n for n in own if own[n].shape != saved[n].shape]
        raise DataError(f"the checkpoint holds another model: {', '.join(wrong[:5])} do not fit")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
