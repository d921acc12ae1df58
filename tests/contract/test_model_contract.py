"""Converting, copying and saving a model keep tied tables tied, and every weight is stored once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from reefknot.lab.runs.checkpoints import Checkpoints
from reefknot.lab.training.state import load_weights, named_weights
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.augmented import Augmented
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

from .combinations import VOCABULARY, Case

TOKENS = torch.tensor([[1, 4, 9, 2, 2, 10], [0, 3, 5, 8, 1, 7]])


def loss(model: LanguageModel) -> Tensor:
    return model.eval().loss(TOKENS).sum()


def stored_numbers(path: Path) -> int:
    with safe_open(str(path), framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - not a mapping


def test_every_parameter_gets_a_gradient(case: Case) -> None:
    model = case.build()
    penalties = model.output.penalties()
    torch.stack([loss(model), *penalties.values()]).sum().backward()
    untrained = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert untrained == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tie_survives_a_change_of_dtype(case: Case, dtype: torch.dtype) -> None:
    model = case.build()
    expected = loss(model).detach()
    model = model.to(dtype)
    assert model.tied == case.tied
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(loss(model).detach().float(), expected, rtol=tolerance, atol=0.0)


def test_tie_survives_a_copy(case: Case) -> None:
    model = case.build()
    other = copy.deepcopy(model)
    assert other.tied == case.tied
    assert not {id(parameter) for parameter in model.parameters()} & {id(parameter) for parameter in other.parameters()}
    assert torch.equal(loss(other), loss(model))
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert not torch.equal(loss(other), loss(model))


def test_tie_survives_a_checkpoint(case: Case, tmp_path: Path) -> None:
    model = case.build()
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, named_weights(model), {}, {}, fingerprint="test")
    assert stored_numbers(path / "model.safetensors") == sum(parameter.numel() for parameter in model.parameters())
    other = case.build(seed=1)
    assert not torch.equal(loss(other), loss(model))
    load_weights(other, checkpoints.load(path).weights)
    assert other.tied == case.tied
    assert torch.equal(loss(other), loss(model))


def test_safetensors_save_model_and_load_model_work(case: Case, tmp_path: Path) -> None:
    model, other = case.build(), case.build(seed=1)
    save_model(model, str(tmp_path / "model.safetensors"))
    assert stored_numbers(tmp_path / "model.safetensors") == sum(parameter.numel() for parameter in model.parameters())
    load_model(other, str(tmp_path / "model.safetensors"))
    assert other.tied == case.tied
    assert torch.equal(loss(other), loss(model))


def test_tables_have_one_vector_per_word(case: Case) -> None:
    model = case.build()
    assert model.input.vocab_size == model.output.vocab_size == VOCABULARY
    assert model.input.vectors().shape[0] == model.output.vectors().shape[0] == VOCABULARY


def test_model_builds_on_the_meta_device(case: Case) -> None:
    expected = case.build().parameter_counts()
    with torch.device("meta"):
        model = case.build()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.parameter_counts() == expected


def model_with_soft_targets() -> nn.Module:
    """Return a model with one table for input vectors, class vectors and the soft targets of an augmented loss."""
    table = WordTable(VOCABULARY, 6)
    return LanguageModel(Lookup(table), LSTM(6, 6), Augmented(Plain(table), table, gamma=0.5))


def module_with_three_ends() -> nn.Module:
    """Return a module with one table for source words, target words and classes (Press & Wolf 2017, section 3.2)."""
    table = WordTable(VOCABULARY, 6)
    return nn.ModuleDict({"source": Lookup(table), "target": Lookup(table), "output": Softmax(Plain(table))})


def table_weights(model: nn.Module) -> list[Tensor]:
    """Return the weight of the table from every end that holds it."""
    return [
        parameter for name, parameter in model.named_parameters(remove_duplicate=False) if name.endswith("table.weight")
    ]


@pytest.mark.parametrize("build", [model_with_soft_targets, module_with_three_ends])
def test_three_way_tying_is_one_table(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, other = build(), build()
    other_parameters = sum(
        parameter.numel() for name, parameter in model.named_parameters() if not name.endswith("table.weight")
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == other_parameters + VOCABULARY * 6
    save_model(model, str(tmp_path / "model.safetensors"))
    load_model(other, str(tmp_path / "model.safetensors"))
    assert stored_numbers(tmp_path / "model.safetensors") == other_parameters + VOCABULARY * 6
    restored = build()
    load_weights(restored, named_weights(model))
    for candidate in (model, copy.deepcopy(model), other, restored, copy.deepcopy(model).to(torch.float64)):
        first, second, third = table_weights(candidate)
        assert first is second is third
        assert candidate is model or first is not table_weights(model)[0]
        torch.testing.assert_close(first, table_weights(model)[0], rtol=0.0, atol=0.0, check_dtype=False)
