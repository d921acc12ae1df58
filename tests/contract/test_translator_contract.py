"""Every output end, input end and label on every translator: it learns, keeps its ties, and neither padding nor the
number of steps at once changes what it says."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from reefknot.kernels.scores import IGNORE
from reefknot.nn.models.translator import PAD, Translator, sides

from .combinations import Case

SOURCE = torch.tensor([[4, 9, 1], [5, 1, PAD]])
INPUTS = torch.tensor([[1, 2, 6, 10], [1, 3, 0, 0]])
TARGETS = torch.tensor([[2, 6, 10, 1], [3, 1, IGNORE, IGNORE]])
WINDOW = torch.cat([SOURCE, INPUTS], dim=1)
ADDED_TO_ALL = "encoder.score.bias"
"""Raises the scores of all positions of a source alike, which no softmax sees: the authors' program has it."""


def build(case: Case) -> Translator:
    return cast(Translator, case.build()).double().eval()


def log_probs(model: Translator) -> Tensor:
    return model.target_log_probs(WINDOW, TARGETS)[0]


def test_every_parameter_learns(translating_case: Case) -> None:
    model = build(translating_case)
    penalties = model.output.penalties()
    torch.stack([model.loss(WINDOW, TARGETS).sum(), *penalties.values()]).sum().backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert still in ([], [ADDED_TO_ALL])


def test_a_table_of_all_ends_is_one(translating_case: Case, tmp_path: Path) -> None:
    model = build(translating_case)
    holds = bool(model.source.tables())
    assert (model.tied, model.three_way) == (translating_case.tied, translating_case.tied and holds)
    expected = log_probs(model).detach()
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    save_model(model, str(tmp_path / "model.safetensors"))
    load_model(other, tmp_path / "model.safetensors")
    assert (other.tied, other.three_way) == (model.tied, model.three_way)
    assert {id(table.weight) for table in other.source.tables()} <= {id(p) for p in other.parameters()}
    assert torch.equal(log_probs(other), expected)


def test_padding_changes_nothing(translating_case: Case) -> None:
    model = build(translating_case)
    alone, _ = model.target_log_probs(torch.cat([SOURCE[1:, :2], INPUTS[1:, :2]], dim=1), TARGETS[1:, :2])
    assert torch.allclose(log_probs(model)[1, :2], alone[0], atol=1e-10)


def test_step_by_step_gives_the_same_words(translating_case: Case) -> None:
    model = build(translating_case)
    source_BS, x_BT = sides(WINDOW, TARGETS)
    state, found = model.begin(source_BS), []
    for step in range(4):
        encoded = model(x_BT[:, step : step + 1], state)
        state = encoded.state
        found.append(model.output.target_log_probs(encoded.output[:, 0], TARGETS[:, step]))
    assert torch.allclose(torch.stack(found, dim=1), log_probs(model), atol=1e-10)
