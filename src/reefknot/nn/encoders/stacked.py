"""Recurrent layers on top of each other, as torch and cuDNN have them.

`LSTM` is that of Zaremba et al. (2014): dropout on what goes in, between layers and on what comes out, never in time;
`GRU` and `RNN` are the same with other layers. `Recurrent` is what these and the forms that drop in time share.

Shapes: B streams, T steps, D width, H units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Dim, Layers, Probability, check_rates
from reefknot.nn.encoders.contract import Encoded, Encoder, State, at_rest, check_sizes

LayerState = tuple[Tensor, ...]
"""The state of one layer: h_BH, and c_BH where there are cells."""

HiddenDim = Annotated[Dim, Field(description="units of every layer")]
LayerCount = Annotated[Layers, Field(description="number of layers")]
Biases = Annotated[
    Literal[1, 2],
    Field(description="bias vectors per gate: 1 as in the papers' equations, 2 as torch and cuDNN have it"),
]

_FUNCTIONS: dict[str, Any] = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh}


class Recurrent(Encoder):
    """Layers of torch's and the state they carry; each form says how it drops."""

    cell: ClassVar[Callable[..., nn.RNNBase]] = nn.LSTM
    names: ClassVar[tuple[str, ...]] = ("h", "c")

    def __init__(
        self, input_dim: int, hidden_dim: int, layers: int, biases: int, output_dim: int | None = None
    ) -> None:
        super().__init__()
        self.input_dim = input_dim
        self.dim = hidden_dim if output_dim is None else output_dim
        who = type(self).__name__
        check_sizes(who, input_dim=input_dim, hidden_dim=hidden_dim, layers=layers, output_dim=self.dim)
        if biases not in (1, 2):
            raise SettingsError(f"{who}: biases = {biases}: must be 1 or 2")
        self.widths = [hidden_dim] * (layers - 1) + [self.dim]
        # One module per layer, because the dropout between the layers of a stacked nn.LSTM draws, on a GPU, from a
        # generator inside cuDNN that nobody can save: a resumed run would drop other units.
        self.layers = nn.ModuleList()
        for below, width in pairwise([input_dim, *self.widths]):
            layer = self.cell(input_size=below, hidden_size=width, batch_first=True)
            if biases == 1:
                _freeze_second_bias(layer)
            self.layers.append(layer)

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        shape = (len(self.layers), streams, self.dim)
        return {name: torch.zeros(shape, device=device) for name in self.names}

    def starts(self, state: State, dtype: torch.dtype) -> Iterator[LayerState]:
        """The carried state, layer by layer."""
        return zip(*(state[name].to(dtype).unbind() for name in self.names), strict=True)

    def ends(self, states: Sequence[LayerState]) -> State:
        """The states of the layers, as they are carried."""
        parts = zip(*states, strict=True)
        return {name: at_rest(torch.stack(part)) for name, part in zip(self.names, parts, strict=True)}


class Stacked(Recurrent):
    """Dropout before, between and after the layers."""

    def __init__(
        self,
        input_dim: int,
        hidden_dim: HiddenDim,
        layers: LayerCount = 2,
        dropout: Annotated[Probability, Field(description="drop rate before, between and after the layers")] = 0.0,
        biases: Biases = 1,
    ) -> None:
        check_rates(type(self).__name__, dropout=dropout)
        super().__init__(input_dim, hidden_dim, layers, biases)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        raw_BTD, dropped_BTD = x_BTD, F.dropout(x_BTD, self.dropout, self.training)
        ends: list[LayerState] = []
        for layer, start in zip(self.layers, self.starts(state, x_BTD.dtype), strict=True):
            raw_BTD, end = run(layer, dropped_BTD, start)
            dropped_BTD = F.dropout(raw_BTD, self.dropout, self.training)
            ends.append(end)
        return Encoded(dropped_BTD, raw_BTD, self.ends(ends))


class LSTM(Stacked):
    """Stacked LSTM with dropout around and between its layers."""


class GRU(Stacked):
    """Stacked gated recurrent units (Cho et al. 2014) with dropout around and between the layers."""

    cell = nn.GRU
    names = ("h",)


class RNN(Stacked):
    """Stacked tanh layers without gates (Elman 1990) with dropout around and between them."""

    cell = nn.RNN
    names = ("h",)


def weights_of(layer: Any) -> list[Tensor]:
    """The four weights in cuDNN's order: input matrix, recurrent matrix, and the biases beside them."""
    return [layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0]


def run(layer: Any, x_BTD: Tensor, start: LayerState, weights: list[Tensor] | None = None) -> tuple[Tensor, LayerState]:
    """One layer over a window: the outputs h_BTH and the state after it, with the layer's weights or with others."""
    starts = tuple(each[None].contiguous() for each in start)
    # Not the layer's own forward: the weights may be others, and gradients may be wanted in evaluation mode, though
    # cuDNN gives them in its training mode only. That changes no value, for it has nothing to drop.
    options = {"dropout": 0.0, "train": torch.is_grad_enabled(), "bidirectional": False, "batch_first": True}
    output_BTH, *ends = _FUNCTIONS[layer.mode](
        x_BTD,
        starts if len(starts) > 1 else starts[0],
        weights_of(layer) if weights is None else weights,
        has_biases=True,
        num_layers=1,
        **options,
    )
    return output_BTH, tuple(end[0] for end in ends)


def _freeze_second_bias(layer: Any) -> None:
    """cuDNN wants two bias vectors where one will do, so the second becomes a zero buffer."""
    zeros = torch.zeros_like(layer.bias_hh_l0)
    del layer.bias_hh_l0
    layer.register_buffer("bias_hh_l0", zeros, persistent=False)
    # The list of weights that torch lays out for cuDNN still holds the deleted parameter.
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
    layer.flatten_parameters()
