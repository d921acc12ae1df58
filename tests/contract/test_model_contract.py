"""What joining, converting, copying and storing a model must keep: every weight once, and the tie."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch import Tensor

from reefknot.models.language_model import LanguageModel
from reefknot.runs.checkpoints import Checkpoints
from reefknot.training.state import load_weights, weights

from .combinations import VOCABULARY, Case

TOKENS = torch.tensor([[1, 4, 9, 2, 2, 10], [0, 3, 5, 8, 1, 7]])


def loss(model: LanguageModel) -> Tensor:
    return model.eval().loss(TOKENS).sum()


def stored_numbers(path: Path) -> int:
    with safe_open(str(path), framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - no mapping


def test_every_parameter_learns(case: Case) -> None:
    model = case.build()
    penalties = model.output.penalties()
    torch.stack([loss(model), *penalties.values()]).sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tie_survives_a_change_of_type(case: Case, dtype: torch.dtype) -> None:
    model = case.build()
    expected = loss(model).detach()
    model = model.to(dtype)
    assert model.tied == case.tied
    assert {p.dtype for p in model.parameters()} == {dtype}
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(loss(model).detach().float(), expected, rtol=tolerance, atol=0.0)


def test_tie_survives_a_copy(case: Case) -> None:
    model = case.build()
    other = copy.deepcopy(model)
    assert other.tied == case.tied
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    assert torch.equal(loss(other), loss(model))
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert not torch.equal(loss(other), loss(model))


def test_tie_survives_a_checkpoint(case: Case, tmp_path: Path) -> None:
    model = case.build()
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, weights(model), {}, {}, fingerprint="test")
    assert stored_numbers(path / "model.safetensors") == sum(p.numel() for p in model.parameters())
    other = case.build(seed=1)
    assert not torch.equal(loss(other), loss(model))
    load_weights(other, checkpoints.load(path).model)
    assert other.tied == case.tied
    assert torch.equal(loss(other), loss(model))


def test_safetensors_own_functions_work(case: Case, tmp_path: Path) -> None:
    model, other = case.build(), case.build(seed=1)
    save_model(model, str(tmp_path / "model.safetensors"))
    assert stored_numbers(tmp_path / "model.safetensors") == sum(p.numel() for p in model.parameters())
    load_model(other, str(tmp_path / "model.safetensors"))
    assert other.tied == case.tied
    assert torch.equal(loss(other), loss(model))


def test_tables_have_a_vector_per_word(case: Case) -> None:
    model = case.build()
    assert model.input.vocab_size == model.output.vocab_size == VOCABULARY
    assert model.input.vectors().shape[0] == model.output.vectors().shape[0] == VOCABULARY


def test_builds_on_the_meta_device(case: Case) -> None:
    real = case.build().parameter_counts()
    with torch.device("meta"):
        model = case.build()
    assert all(p.is_meta for p in model.parameters())
    assert model.parameter_counts() == real
