"""The contract of every translator with every input and output end: gradients, ties, padding and decoding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from reefknot.kernels.scores import IGNORE
from reefknot.nn.models.translator import PAD, Translator, split_sides

from .combinations import Case

SOURCE = torch.tensor([[4, 9, 1], [5, 1, PAD]])
INPUTS = torch.tensor([[1, 2, 6, 10], [1, 3, 0, 0]])
TARGETS = torch.tensor([[2, 6, 10, 1], [3, 1, IGNORE, IGNORE]])
PAIRS = torch.cat([SOURCE, INPUTS], dim=1)
BIAS_WITHOUT_GRADIENT = "encoder.score.bias"
"""A bias that is added to all attention scores and has no gradient; the authors' program has it too."""


def build(case: Case) -> Translator:
    return cast(Translator, case.build()).double().eval()


def log_probs(model: Translator) -> Tensor:
    return model.target_log_probs(PAIRS, TARGETS)[0]


def test_every_parameter_gets_a_gradient(translating_case: Case) -> None:
    model = build(translating_case)
    penalties = model.output.penalties()
    torch.stack([model.loss(PAIRS, TARGETS).sum(), *penalties.values()]).sum().backward()
    untrained = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert untrained in ([], [BIAS_WITHOUT_GRADIENT])


def test_ends_share_one_table_after_saving_and_loading(translating_case: Case, tmp_path: Path) -> None:
    model = build(translating_case)
    has_table = bool(model.source.tables())
    assert (model.tied, model.three_way) == (translating_case.tied, translating_case.tied and has_table)
    expected = log_probs(model).detach()
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    save_model(model, str(tmp_path / "model.safetensors"))
    load_model(other, tmp_path / "model.safetensors")
    assert (other.tied, other.three_way) == (model.tied, model.three_way)
    assert {id(table.weight) for table in other.source.tables()} <= {id(parameter) for parameter in other.parameters()}
    assert torch.equal(log_probs(other), expected)


def test_padding_does_not_change_log_probs(translating_case: Case) -> None:
    model = build(translating_case)
    alone, _ = model.target_log_probs(torch.cat([SOURCE[1:, :2], INPUTS[1:, :2]], dim=1), TARGETS[1:, :2])
    assert torch.allclose(log_probs(model)[1, :2], alone[0], atol=1e-10)


def test_decoding_step_by_step_gives_the_same_log_probs(translating_case: Case) -> None:
    model = build(translating_case)
    source_BS, inputs_BT = split_sides(PAIRS, TARGETS)
    state = model.start_decoding(source_BS)
    step_log_probs = []
    for step in range(4):
        encoded = model(inputs_BT[:, step : step + 1], state)
        state = encoded.state
        step_log_probs.append(model.output.target_log_probs(encoded.output[:, 0], TARGETS[:, step]))
    assert torch.allclose(torch.stack(step_log_probs, dim=1), log_probs(model), atol=1e-10)
