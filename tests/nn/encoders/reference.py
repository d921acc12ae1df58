"""References for recurrent encoders: torch's layers, and the LSTM equations as a loop.

Shapes: B streams, T steps, D input dimensions, H hidden units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reefknot.nn.encoders.stacked import RecurrentEncoder

IN, HIDDEN, STREAMS, STEPS = 5, 7, 3, 4


def vectors(streams: int = STREAMS, steps: int = STEPS, dim: int = IN) -> Tensor:
    return torch.randn(streams, steps, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_same_as_torch(encoder: RecurrentEncoder) -> None:
    """Assert that outputs and parameter gradients equal those of torch's layers with the same weights.

    A bias that the encoder does not have is 0.
    """
    inputs_BTD = vectors()
    encoded = encoder(inputs_BTD, encoder.initial_state(STREAMS))
    torch_layers, expected = [], inputs_BTD
    for layer in encoder.layers:
        assert isinstance(layer, nn.LSTM | nn.GRU | nn.RNN)
        torch_layer = type(layer)(layer.input_size, layer.hidden_size, batch_first=True).double()
        with torch.no_grad():
            for name, parameter in torch_layer.named_parameters():
                parameter.copy_(getattr(layer, name))
        expected, _ = torch_layer(expected)
        torch_layers.append(torch_layer)
    torch.testing.assert_close(encoded.output, expected)
    assert torch.equal(encoded.output, encoded.raw)
    encoded.output.square().sum().backward()
    expected.square().sum().backward()
    for layer, torch_layer in zip(encoder.layers, torch_layers, strict=True):
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(parameter.grad, getattr(torch_layer, name).grad)


def lstm_loop(
    layer: Any,
    inputs_BTD: Tensor,
    hidden_BH: Tensor,
    cell_BH: Tensor,
    input_masks: list[Tensor],
    state_masks: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return all hidden states hidden_BTH and the last cell state of an LSTM.

    The masks are those of the gates: input, forget, cell, output.
    """
    input_weights = layer.weight_ih_l0.chunk(4)
    recurrent_weights = layer.weight_hh_l0.chunk(4)
    biases = layer.bias_ih_l0.chunk(4)
    outputs = []
    for inputs_BD in inputs_BTD.unbind(1):
        gates = []
        for gate in range(4):
            from_input = (inputs_BD * input_masks[gate]) @ input_weights[gate].T
            from_state = (hidden_BH * state_masks[gate]) @ recurrent_weights[gate].T
            gates.append(from_input + from_state + biases[gate])
        input_gate, forget_gate, cell_gate, output_gate = gates
        cell_BH = torch.sigmoid(forget_gate) * cell_BH + torch.sigmoid(input_gate) * torch.tanh(cell_gate)
        hidden_BH = torch.sigmoid(output_gate) * torch.tanh(cell_BH)
        outputs.append(hidden_BH)
    return torch.stack(outputs, dim=1), cell_BH


class Recorder:
    """A wrapper that calls a function and records the values it returns."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.returned: list[Any] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.returned.append(self.function(*args, **options))
        return self.returned[-1]
