"""Training state: everything it holds is saved and restored, and new fields cannot be forgotten silently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from reefknot.errors import DataError
from reefknot.lab.runs.checkpoints import Checkpoints
from reefknot.lab.training.averaging import WeightAverages
from reefknot.lab.training.distributed import World
from reefknot.lab.training.state import Progress, TrainState, load_weights, named_weights
from reefknot.nn.models.language_model import LanguageModel


class Model(nn.Module):
    """A model with a tied weight, a persistent buffer and a non-persistent buffer."""

    scale: Tensor
    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.rand(2))
        self.register_buffer("scratch", torch.rand(2), persistent=False)


def new_state(streams: int = 2) -> TrainState:
    model = Model()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.1)  # its state has tensors and numbers
    parallel = World().wrap_model(cast(LanguageModel, model))
    hidden = {"h": torch.zeros(1, streams, 3)}
    return TrainState(parallel, optimiser, hidden, Progress(), scaler=parallel.build_scaler(enabled=True))


def used_state() -> TrainState:
    state = new_state()
    for _ in range(3):
        state.optimiser.zero_grad()
        cast(Model, state.parallel.model).first(torch.rand(4, 3)).sum().backward()
        state.optimiser.step()
    state.averages = WeightAverages(state.parallel.parameters)
    for _ in range(2):
        state.optimiser.step()
        state.averages.update(torch.tensor(1.0))
    state.optimiser.param_groups[0]["lr"] = 0.025
    state.scaler.scale(torch.ones(()))
    state.scaler.update(1024.0)
    state.hidden = {"h": torch.rand(1, 2, 3)}
    return state


def save_and_load(folder: Path, state: TrainState, world: World) -> tuple[Any, Any, Any]:
    weights, tensors, values = state.capture(world)
    path = Checkpoints(folder).save(1, weights, tensors, values, fingerprint="f")
    checkpoint = Checkpoints(folder).load(path)
    return checkpoint.weights, checkpoint.state_tensors, checkpoint.state_values


def flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield key
            yield from flatten(value[key])
    elif isinstance(value, Tensor):
        yield from flatten(value.tolist())
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)
    else:
        yield value


@pytest.mark.parametrize("field", [field.name for field in fields(Progress)])
def test_every_field_of_progress_is_restored(tmp_path: Path, field: str) -> None:
    state = used_state()
    default = getattr(state.progress, field)
    setattr(state.progress, field, 0.125 if default is None or isinstance(default, float) else 17)
    assert getattr(state.progress, field) != default
    restored = new_state()
    restored.restore(*save_and_load(tmp_path, state, World()), World(), 0)
    assert asdict(restored.progress) == asdict(state.progress)


def test_every_part_of_the_state_is_restored(tmp_path: Path) -> None:
    state, restored = used_state(), new_state()
    saved = save_and_load(tmp_path, state, World())
    after = torch.rand(3)
    torch.manual_seed(99)
    restored.restore(*saved, World(), 0)
    assert torch.equal(torch.rand(3), after)
    assert list(flatten(named_weights(restored.parallel.model))) == list(flatten(named_weights(state.parallel.model)))
    assert list(flatten(restored.optimiser.state_dict())) == list(flatten(state.optimiser.state_dict()))
    assert torch.equal(restored.hidden["h"], state.hidden["h"])
    assert restored.averages is not None
    assert state.averages is not None
    assert restored.averages.count.item() == 2
    assert list(flatten(restored.averages.means)) == list(flatten(state.averages.means))
    assert restored.scaler.state_dict() == state.scaler.state_dict()
    compared = {"parallel", "optimiser", "hidden", "progress", "averages", "scaler"}
    assert {field.name for field in fields(TrainState)} == compared, (
        "a field was added: save it in capture, restore it in restore, and compare it here"
    )


def test_weights_of_a_checkpoint_are_the_averages(tmp_path: Path) -> None:
    state = used_state()
    model, _, _ = save_and_load(tmp_path, state, World())
    assert state.averages is not None
    assert torch.equal(model["first.weight"], state.averages.means["first.weight"])
    assert not torch.equal(model["first.weight"], named_weights(state.parallel.model)["first.weight"])
    assert torch.equal(model["scale"], named_weights(state.parallel.model)["scale"])


def test_restoring_fills_the_learning_rate_tensor_in_place(tmp_path: Path) -> None:
    state, restored = used_state(), new_state()
    state.optimiser.param_groups[0]["lr"] = torch.tensor(0.125)
    rate = restored.optimiser.param_groups[0]["lr"] = torch.tensor(0.5)
    restored.restore(*save_and_load(tmp_path, state, World()), World(), 0)
    assert restored.optimiser.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125


def test_restored_optimiser_keeps_the_options_of_its_device(tmp_path: Path) -> None:
    """A state saved on a GPU has `capturable` optimisers, which torch rejects on a CPU."""
    state, restored = used_state(), new_state()
    state.optimiser.param_groups[0] |= {"capturable": True, "fused": True}
    restored.restore(*save_and_load(tmp_path, state, World()), World(), 0)
    assert not restored.optimiser.param_groups[0]["capturable"]
    assert not restored.optimiser.param_groups[0]["fused"]
    cast(Model, restored.parallel.model).first(torch.rand(4, 3)).sum().backward()
    restored.optimiser.step()


def test_checkpoint_with_a_missing_field_is_rejected(tmp_path: Path) -> None:
    model, tensors, values = save_and_load(tmp_path, used_state(), World())
    del values["progress"]["best_nll"]
    with pytest.raises(DataError, match="another version of Reefknot"):
        new_state().restore(model, tensors, values, World(), 0)


def test_weights_hold_tied_tables_once_and_no_temporary_buffers(tmp_path: Path) -> None:
    model = Model()
    assert named_weights(model).keys() == {"first.weight", "first.bias", "scale"}
    loaded = Model()
    load_weights(loaded, named_weights(model))
    assert loaded.second.weight is loaded.first.weight
    assert torch.equal(loaded.second.weight, model.first.weight)
    assert not torch.equal(loaded.scratch, model.scratch)


def test_weights_of_a_different_model_are_rejected() -> None:
    with pytest.raises(DataError, match=r"a different model: scale do not match"):
        load_weights(Model(), {**named_weights(Model()), "scale": torch.zeros(3)})
    saved = named_weights(Model())
    saved["extra"] = saved.pop("scale")
    with pytest.raises(DataError, match=r"a different model: extra, scale do not match"):
        load_weights(Model(), saved)


def test_streams_are_redistributed_over_processes(tmp_path: Path) -> None:
    state = used_state()
    saved = save_and_load(tmp_path, state, World())
    for rank in range(2):
        restored = new_state(streams=1)
        restored.restore(*saved, World(rank=rank, size=2), 0)
        assert torch.equal(restored.hidden["h"], state.hidden["h"][:, rank : rank + 1])
