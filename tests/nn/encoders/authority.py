"""What the LSTM forms are measured against: torch's own layers, and the equations as a plain loop.

Shapes: B streams, T steps, D width, H units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reefknot.nn.encoders.stacked import Recurrent

IN, HIDDEN, STREAMS, STEPS = 5, 7, 3, 4


def vectors(streams: int = STREAMS, steps: int = STEPS, width: int = IN) -> Tensor:
    return torch.randn(streams, steps, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def same_as_torch(encoder: Recurrent) -> None:
    """Values and gradients of every parameter, against torch's layers with the same weights and any missing bias 0."""
    x_BTD = vectors()
    found = encoder(x_BTD, encoder.initial_state(STREAMS))
    theirs, expected = [], x_BTD
    for layer in encoder.layers:
        assert isinstance(layer, nn.LSTM | nn.GRU | nn.RNN)
        twin = type(layer)(layer.input_size, layer.hidden_size, batch_first=True).double()
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter.copy_(getattr(layer, name))
        expected, _ = twin(expected)
        theirs.append(twin)
    torch.testing.assert_close(found.output, expected)
    assert torch.equal(found.output, found.raw)
    found.output.square().sum().backward()
    expected.square().sum().backward()
    for ours, twin in zip(encoder.layers, theirs, strict=True):
        for name, parameter in ours.named_parameters():
            torch.testing.assert_close(parameter.grad, getattr(twin, name).grad)


def plain_loop(
    layer: Any, x_BTD: Tensor, h_BH: Tensor, c_BH: Tensor, input_masks: list[Tensor], state_masks: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The equations of an LSTM, with a mask for each of the gates i, f, g, o: all states h_BTH, and the last cell."""
    gates = list(zip(layer.weight_ih_l0.chunk(4), layer.weight_hh_l0.chunk(4), layer.bias_ih_l0.chunk(4), strict=True))
    outputs = []
    for x_BD in x_BTD.unbind(1):
        i, f, g, o = (
            (x_BD * below) @ w.T + (h_BH * before) @ u.T + b
            for (w, u, b), below, before in zip(gates, input_masks, state_masks, strict=True)
        )
        c_BH = torch.sigmoid(f) * c_BH + torch.sigmoid(i) * torch.tanh(g)
        h_BH = torch.sigmoid(o) * torch.tanh(c_BH)
        outputs.append(h_BH)
    return torch.stack(outputs, dim=1), c_BH


class Recorder:
    """Stands in for a function that draws, and keeps what it drew."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.drawn: list[Any] = []

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.drawn.append(self.draw(*args, **options))
        return self.drawn[-1]
