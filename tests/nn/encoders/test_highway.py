"""The recurrent highway network against its equations, written out once more.

Shapes: B streams, T steps, D width, H units.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.encoders import highway
from reefknot.nn.encoders.highway import RecurrentHighway

from .authority import IN, STREAMS, Recorder, vectors

HIDDEN, DEPTH = 4, 3


def build(**options: Any) -> RecurrentHighway:
    torch.manual_seed(0)
    return RecurrentHighway(IN, HIDDEN, DEPTH, **options).double()


def equations(encoder: RecurrentHighway, x_BTD: Tensor, s: Tensor, mask: Tensor | float = 1.0) -> Tensor:
    """s_L of every step, s_BTH, with the matrices of h and t apart."""
    input_h, input_t = encoder.input_weight.chunk(2)
    outputs = []
    for x in x_BTD.unbind(1):
        for layer in range(DEPTH):
            recurrent_h, recurrent_t = encoder.weight[layer].chunk(2)
            bias_h, bias_t = encoder.bias[layer].chunk(2)
            h = (s * mask) @ recurrent_h.T + bias_h
            t = (s * mask) @ recurrent_t.T + bias_t + encoder.transform_bias
            if layer == 0:
                h, t = h + x @ input_h.T, t + x @ input_t.T
            h, t = torch.tanh(h), torch.sigmoid(t)
            s = h * t + s * (1 - t)
        outputs.append(s)
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("transform_bias", [-2.0, 0.0])
def test_values_and_gradients_follow_the_equations(transform_bias: float) -> None:
    encoder = build(transform_bias=transform_bias)
    x_BTD = vectors().requires_grad_()
    start = torch.randn(1, STREAMS, HIDDEN, dtype=torch.float64, requires_grad=True)
    found = encoder(x_BTD, {"h": start})
    expected = equations(encoder, x_BTD, start[0])
    torch.testing.assert_close(found.output, expected)
    torch.testing.assert_close(found.state["h"][0], expected[:, -1])
    inputs = [x_BTD, start, *encoder.parameters()]
    gradients = [torch.autograd.grad(output.square().sum(), inputs) for output in (found.output, expected)]
    torch.testing.assert_close(*gradients)


def test_gradients_are_those_of_differences() -> None:
    encoder = build()
    x_BTD = vectors(streams=2, steps=2).requires_grad_()
    start = torch.randn(1, 2, HIDDEN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, h, *_: encoder(x, {"h": h}).output, (x_BTD, start, *encoder.parameters()))


def test_one_mask_holds_for_the_window_and_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(highway.window_mask)
    monkeypatch.setattr(highway, "window_mask", recorder)
    encoder = build(dropout_hidden=0.5)
    start = torch.randn(1, STREAMS, HIDDEN, dtype=torch.float64)
    found = encoder(vectors(), {"h": start})
    (mask,) = recorder.drawn
    assert mask.shape == (STREAMS, 1, HIDDEN)
    torch.testing.assert_close(found.output, equations(encoder, vectors(), start[0], mask[:, 0]))


@pytest.mark.parametrize("rates", [(0.5, 0.0), (0.0, 0.5), (0.5, 0.75)])
def test_masks_on_what_goes_in_and_comes_out(rates: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(highway.locked_dropout)
    monkeypatch.setattr(highway, "locked_dropout", recorder)
    encoder = build(dropout_input=rates[0], dropout_output=rates[1])
    found = encoder(vectors(), encoder.initial_state(STREAMS))
    dropped, output = recorder.drawn
    start = torch.zeros(STREAMS, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(found.raw, equations(encoder, dropped, start))
    assert found.output is output
    for rate, before, after in zip(rates, (vectors(), found.raw), (dropped, output), strict=True):
        kept = after != 0
        assert kept.all() == (rate == 0.0)
        torch.testing.assert_close(after[kept], before[kept] / (1 - rate))
    assert torch.equal(found.state["h"][0], found.raw[:, -1])


def test_drawing_all_parameters_anew_keeps_the_transform_bias() -> None:
    """Gates that are nearly shut keep the state nearly as it is."""
    encoder = build(transform_bias=-20.0)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.uniform_(-0.04, 0.04)
    start = torch.randn(1, STREAMS, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(encoder(vectors(), {"h": start}).state["h"], start, rtol=1e-4, atol=1e-6)
    assert not any("offset" in name or "transform" in name for name in encoder.state_dict())


def test_parameters_are_counted_exactly() -> None:
    """Two gates, each with a matrix for the input, and with a matrix and a bias for every layer of a step."""
    encoder = RecurrentHighway(IN, HIDDEN, DEPTH)
    assert sum(p.numel() for p in encoder.parameters()) == 2 * HIDDEN * (IN + DEPTH * (HIDDEN + 1))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"depth": 0}, "RecurrentHighway: depth = 0: must be at least 1"),
        ({"transform_bias": float("nan")}, "RecurrentHighway: transform_bias = nan: must be a finite number"),
        ({"dropout_hidden": 1.0}, "RecurrentHighway: dropout_hidden = 1.0: must be at least 0 and less than 1"),
    ],
)
def test_wrong_arguments_are_sentences(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        RecurrentHighway(**{"input_dim": IN, "hidden_dim": HIDDEN, "depth": DEPTH, **wrong})
