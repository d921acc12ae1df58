"""The recurrent highway network compared with a loop over its equations.

Shapes: B streams, T steps, D input dimensions, H hidden units.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.encoders import highway
from reefknot.nn.encoders.highway import RecurrentHighway

from .reference import IN, STREAMS, Recorder, vectors

HIDDEN, DEPTH = 4, 3


def build(**options: Any) -> RecurrentHighway:
    torch.manual_seed(0)
    return RecurrentHighway(IN, HIDDEN, DEPTH, **options).double()


def highway_loop(encoder: RecurrentHighway, inputs_BTD: Tensor, state_BH: Tensor, mask: Tensor | float = 1.0) -> Tensor:
    """Return the state after the last layer of every step, state_BTH, with separate matrices for candidate and gate."""
    input_candidate, input_gate = encoder.input_weight.chunk(2)
    outputs = []
    for inputs_BD in inputs_BTD.unbind(1):
        for layer in range(DEPTH):
            recurrent_candidate, recurrent_gate = encoder.weight[layer].chunk(2)
            bias_candidate, bias_gate = encoder.bias[layer].chunk(2)
            candidate = (state_BH * mask) @ recurrent_candidate.T + bias_candidate
            gate = (state_BH * mask) @ recurrent_gate.T + bias_gate + encoder.transform_bias
            if layer == 0:
                candidate = candidate + inputs_BD @ input_candidate.T
                gate = gate + inputs_BD @ input_gate.T
            candidate = torch.tanh(candidate)
            gate = torch.sigmoid(gate)
            state_BH = candidate * gate + state_BH * (1 - gate)
        outputs.append(state_BH)
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("transform_bias", [-2.0, 0.0])
def test_values_and_gradients_follow_the_equations(transform_bias: float) -> None:
    encoder = build(transform_bias=transform_bias)
    inputs_BTD = vectors().requires_grad_()
    start = torch.randn(1, STREAMS, HIDDEN, dtype=torch.float64, requires_grad=True)
    encoded = encoder(inputs_BTD, {"h": start})
    expected = highway_loop(encoder, inputs_BTD, start[0])
    torch.testing.assert_close(encoded.output, expected)
    torch.testing.assert_close(encoded.state["h"][0], expected[:, -1])
    inputs = [inputs_BTD, start, *encoder.parameters()]
    gradients = [torch.autograd.grad(output.square().sum(), inputs) for output in (encoded.output, expected)]
    torch.testing.assert_close(*gradients)


def test_gradients_match_finite_differences() -> None:
    encoder = build()
    inputs_BTD = vectors(streams=2, steps=2).requires_grad_()
    start = torch.randn(1, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, h, *_: encoder(x, {"h": h}).output, (inputs_BTD, start, *encoder.parameters())
    )


def test_one_mask_is_used_for_all_steps_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(highway.sample_mask)
    monkeypatch.setattr(highway, "sample_mask", recorder)
    encoder = build(dropout_hidden=0.5)
    start = torch.randn(1, STREAMS, HIDDEN, dtype=torch.float64)
    encoded = encoder(vectors(), {"h": start})
    (mask,) = recorder.returned
    assert mask.shape == (STREAMS, 1, HIDDEN)
    torch.testing.assert_close(encoded.output, highway_loop(encoder, vectors(), start[0], mask[:, 0]))


@pytest.mark.parametrize("rates", [(0.5, 0.0), (0.0, 0.5), (0.5, 0.75)])
def test_dropout_acts_on_inputs_and_outputs(rates: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(highway.locked_dropout)
    monkeypatch.setattr(highway, "locked_dropout", recorder)
    encoder = build(dropout_input=rates[0], dropout_output=rates[1])
    encoded = encoder(vectors(), encoder.initial_state(STREAMS))
    dropped, output = recorder.returned
    start = torch.zeros(STREAMS, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(encoded.raw, highway_loop(encoder, dropped, start))
    assert encoded.output is output
    for rate, before, after in zip(rates, (vectors(), encoded.raw), (dropped, output), strict=True):
        nonzero = after != 0
        assert nonzero.all() == (rate == 0.0)
        torch.testing.assert_close(after[nonzero], before[nonzero] / (1 - rate))
    assert torch.equal(encoded.state["h"][0], encoded.raw[:, -1])


def test_redrawing_all_parameters_keeps_the_transform_bias() -> None:
    """With gates that are nearly closed the state hardly changes."""
    encoder = build(transform_bias=-20.0)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.uniform_(-0.04, 0.04)
    start = torch.randn(1, STREAMS, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(encoder(vectors(), {"h": start}).state["h"], start, rtol=1e-4, atol=1e-6)
    assert not any("offset" in name or "transform" in name for name in encoder.state_dict())


def test_parameter_count_equals_the_formula() -> None:
    """h and t each have an input matrix, and a recurrent matrix and a bias for every layer of a step."""
    encoder = RecurrentHighway(IN, HIDDEN, DEPTH)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 2 * HIDDEN * (IN + DEPTH * (HIDDEN + 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 0}, "RecurrentHighway: depth = 0: must be at least 1"),
        ({"transform_bias": float("nan")}, "RecurrentHighway: transform_bias = nan: must be a finite number"),
        ({"dropout_hidden": 1.0}, "RecurrentHighway: dropout_hidden = 1.0: must be at least 0 and less than 1"),
    ],
)
def test_invalid_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        RecurrentHighway(**{"input_dim": IN, "hidden_dim": HIDDEN, "depth": DEPTH, **arguments})
