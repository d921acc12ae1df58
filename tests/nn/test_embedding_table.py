"""`WordTable.from_embedding` ties an end to the caller's own layer, and the tie stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import reefknot as rk
from reefknot.errors import ArgumentError, SettingsError
from reefknot.nn.outputs.contract import OutputLoss

V, D = 11, 8
IDS = torch.tensor([[3, 0, 7, 10], [3, 9, 2, 1]])

Change = Callable[["Model"], "Model"]


class Model(nn.Module):
    """A model of a user: an embedding, a layer, and an output end that holds the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layer = nn.Linear(D, D)
        self.end = rk.Softmax(rk.Plain(rk.WordTable.from_embedding(self.embedding)))

    def forward(self, ids: Tensor) -> OutputLoss:
        result: OutputLoss = self.end(torch.tanh(self.layer(self.embedding(ids[:, :-1]))), ids[:, 1:])
        return result


def assert_tied(model: Model) -> None:
    """Check that there is one weight, with the gradients of both ends."""
    assert model.end.classifier.table.weight is model.embedding.weight
    assert len([name for name, _ in model.named_parameters() if "weight" in name]) == 2
    ids = IDS.to(model.embedding.weight.device)
    model.zero_grad()
    model(ids).loss.backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None

    # An untied copy gives the two gradients separately.
    weight = model.embedding.weight.detach().clone().requires_grad_()
    classes = weight.detach().clone().requires_grad_()
    hidden = torch.tanh(model.layer(nn.functional.embedding(ids[:, :-1], weight)))
    scores = nn.functional.linear(hidden, classes, model.end.classifier.bias)
    nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert weight.grad is not None
    assert classes.grad is not None
    torch.testing.assert_close(gradient, weight.grad + classes.grad)


def empty_from_meta(model: Model) -> Model:
    with torch.device("meta"):
        built = Model()
    built = built.to_empty(device="cpu")
    built.load_state_dict(model.state_dict())
    return built


def assigned(model: Model) -> Model:
    with torch.device("meta"):
        built = Model()
    built.load_state_dict(model.state_dict(), assign=True)
    return built


CHANGES: dict[str, Change] = {
    "none": lambda model: model,
    "to": lambda model: model.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "to_empty": empty_from_meta,
    "assign": assigned,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_tie_stays(change: Change) -> None:
    torch.manual_seed(0)
    model = Model()
    changed = change(model)
    assert_tied(changed)
    torch.testing.assert_close(changed.embedding.weight, model.embedding.weight, check_dtype=False)


def test_state_dict_can_be_saved_with_safetensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = Model(), Model()
    save_model(model, str(tmp_path / "model.safetensors"))
    load_model(other, str(tmp_path / "model.safetensors"))
    torch.testing.assert_close(other(IDS).loss, model(IDS).loss, rtol=0, atol=0)
    assert_tied(other)


def test_linear_layer_is_held(tmp_path: Path) -> None:
    head = nn.Linear(D, V, bias=False)
    table = rk.WordTable.from_embedding(head)
    assert (table.vocab_size, table.dim) == (V, D)
    assert table.weight is head.weight
    end = rk.Softmax(rk.Plain(table, bias=False))
    hidden, targets = torch.randn(2, 3, D), torch.randint(V, (2, 3))
    expected = nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(end(hidden, targets).loss, expected)
    head.requires_grad_(False)
    assert table.frozen


def test_tied_language_model_holds_one_layer() -> None:
    table = rk.WordTable.from_embedding(nn.Embedding(V, D))
    model = rk.LanguageModel(rk.Lookup(table), rk.LSTM(D, D), rk.Softmax(rk.Plain(table)))
    assert model.tied
    model.loss(IDS).mean().backward()
    assert table.weight.grad is not None


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Embedding(V, D, sparse=True), "sparse = True, .*; make it with sparse=False"),
        (nn.Embedding(V, D, max_norm=1.0), "max_norm = 1.0, .*; make it with max_norm=None"),
        (nn.Linear(D, V), r"the Linear has a bias, .* bias=False\), .* Plain\(table, bias=True\)"),
        (nn.LazyLinear(V, bias=False), "the LazyLinear has no shape yet; call it once"),
        (nn.EmbeddingBag(V, D), "needs an nn.Embedding or an nn.Linear; an EmbeddingBag is not one"),
        (nn.Embedding(V, D).weight, "a Parameter is not one"),
    ],
)
def test_unsuitable_layers_are_rejected(module: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rk.WordTable.from_embedding(module)


@pytest.mark.parametrize(
    "build",
    [
        rk.Plain,
        rk.Drill,
        rk.Lookup,
        lambda layer: rk.Projected(layer, D),
        lambda layer: rk.Bilinear(layer, D),
        lambda layer: rk.Dual(layer, D),
        rk.Softmax,
        lambda layer: rk.Augmented(rk.Plain(rk.WordTable(V, D)), layer, gamma=0.5),
    ],
)
def test_torch_layer_in_place_of_a_table_is_reported(build: Callable[[Any], Any]) -> None:
    with pytest.raises(SettingsError, match=r"an Embedding is not one; pass .*WordTable.from_embedding\(embedding\)"):
        build(nn.Embedding(V, D))


def test_other_objects_in_place_of_a_table_are_reported() -> None:
    projections = rk.BandProjections(rk.BandedTable(V, D, sizes=[4]), D)
    with pytest.raises(SettingsError, match="Plain: needs a word table; an int is not one"):
        rk.Plain(5)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="needs a banded table or a list of classifiers; an Embedding is not one"):
        rk.AdaptiveSoftmax(nn.Embedding(V, D), projections)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="needs a table with bands; an Embedding is not one; pass a BandedTable"):
        rk.BandProjections(nn.Embedding(V, D), D)  # type: ignore[arg-type]


@pytest.fixture
def one_process(tmp_path: Path) -> Any:
    """Start a process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_tie_stays_in_distributed_data_parallel(one_process: None) -> None:
    torch.manual_seed(0)
    model = Model()
    expected = model(IDS).loss
    parallel = DistributedDataParallel(model)
    loss = parallel(IDS).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert_tied(model)


def test_tie_stays_in_fully_sharded_data_parallel(one_process: None) -> None:
    torch.manual_seed(0)
    plain = Model()
    sharded = copy.deepcopy(plain)
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(sharded.layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (plain, sharded)]
    for _ in range(3):
        losses = [model(IDS).loss for model in (plain, sharded)]
        torch.testing.assert_close(losses[0], losses[1])
        for loss, optimiser in zip(losses, optimisers, strict=True):
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    assert sharded.end.classifier.table.weight is sharded.embedding.weight
    assert len(list(sharded.parameters())) == len(list(plain.parameters()))
    torch.testing.assert_close(sharded.embedding.weight.full_tensor(), plain.embedding.weight)  # type: ignore[operator]
