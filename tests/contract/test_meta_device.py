"""A model that is built on the meta device and then loaded computes the same outputs, to the bit.

The meta device creates tensors without values. Values that are neither in the state dict nor computed where they are
used would stay unset.
"""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import ENCODERS, INPUTS
from reefknot.nn.inputs.char_cnn import CharCNN
from reefknot.nn.inputs.spelling import spell
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.translator import Translator

from .combinations import TRANSLATOR_ENCODERS, Case

TOKENS = torch.tensor([[1, 4, 9, 2, 2], [0, 3, 5, 8, 1]])
TARGETS = torch.tensor([[4, 9, 2, 2, 10], [3, 5, 8, 1, 7]])
GARBAGE = 1e3


def build(input_kind: str, encoder_kind: str) -> LanguageModel:
    return Case(input_kind, encoder_kind, "softmax", "plain", tied=False).build()


def build_on_meta(input_kind: str, encoder_kind: str) -> LanguageModel:
    with torch.device("meta"):
        return build(input_kind, encoder_kind)


def fill_with_garbage(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(GARBAGE if tensor.is_floating_point() else 1)


def compute(model: LanguageModel) -> dict[str, Tensor]:
    """Return log-probabilities, hidden states and gradients of a window."""
    tokens_BT = TOKENS
    if isinstance(model, Translator):
        tokens_BT = torch.cat([TOKENS[:, :3], TOKENS], dim=1)  # a source of three tokens, then the target
    results: dict[str, Tensor] = {"log_probs": model.eval().target_log_probs(tokens_BT, TARGETS)[0].detach()}
    results["vectors"] = model.input.vectors().detach()
    model.zero_grad()
    torch.manual_seed(0)  # for dropout
    model.train().loss(tokens_BT, TARGETS).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[name] = parameter.grad.clone()
    return results


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("kind", list(ENCODERS))
@pytest.mark.parametrize("input_kind", list(INPUTS))
def test_loading_after_to_empty_gives_equal_outputs(input_kind: str, kind: str) -> None:
    model = build(input_kind, kind)
    expected = compute(model)
    other = build_on_meta(input_kind, kind).to_empty(device="cpu")
    fill_with_garbage(other)
    other.load_state_dict(model.state_dict())
    assert_equal(compute(other), expected)


@pytest.mark.parametrize("kind", list(ENCODERS))
@pytest.mark.parametrize("input_kind", list(INPUTS))
def test_loading_by_assignment_gives_equal_outputs(input_kind: str, kind: str) -> None:
    model = build(input_kind, kind)
    expected = compute(model)
    other = build_on_meta(input_kind, kind)
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert_equal(compute(other), expected)


@pytest.mark.parametrize("kind", list(ENCODERS))
def test_copying_each_parameter_gives_equal_outputs(kind: str) -> None:
    """Copying the parameters one by one calls no hook of `load_state_dict`."""
    model = build("char_cnn", kind)
    expected = compute(model)
    other = build_on_meta("char_cnn", kind).to_empty(device="cpu")
    fill_with_garbage(other)
    with torch.no_grad():
        for parameter, value in zip(other.parameters(), model.parameters(), strict=True):
            parameter.copy_(value)
    assert_equal(compute(other), expected)


def test_every_source_encoder_is_tested_as_a_translator() -> None:
    for encoder_kind in TRANSLATOR_ENCODERS:
        assert isinstance(build("lookup", encoder_kind), Translator)


def test_two_windows_before_one_backward_pass(encoder_kind: str) -> None:
    """The zeros of a second bias are written at every use, which must not look like a change to autograd."""
    model = build("lookup", encoder_kind)
    first = model.loss(TOKENS, TARGETS)
    second = model.loss(TOKENS, TARGETS, state=first.state)
    (first.sum() + second.sum()).backward()
    expected = [cast(Tensor, parameter.grad) for parameter in model.parameters()]
    model.zero_grad()
    first = model.loss(TOKENS, TARGETS)
    first.sum().backward()
    model.loss(TOKENS, TARGETS, state=first.state).sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_spellings_without_values_are_rejected() -> None:
    with pytest.raises(SettingsError, match="spellings are on the meta device"):
        CharCNN(spell(["the", "a"]).to("meta"), 6)
