"""Stacked recurrent layers, computed by torch and cuDNN: `LSTM`, `GRU` and `RNN`.

`LSTM` is the LSTM of Zaremba et al. (2014), with dropout before, between and after the layers, never from step to step.
`GRU` and `RNN` are the same with other layers. Start reading at `Stacked.forward`. `Recurrent` is the base class of
these encoders and of the variants with dropout from step to step.

Shapes: B streams (rows of a batch), T steps, D dimensions of the input, H units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Dim, Layers, Probability, check_rates, check_sizes
from reefknot.nn.encoders.contract import Encoded, Encoder, State, to_state_dtype

LayerState = tuple[Tensor, ...]
"""The state of one layer: h_BH, and c_BH if the layer is an LSTM."""

Biases = Literal[1, 2]
"""Number of bias vectors per gate."""

_FUNCTION_OF_MODE: dict[str, Any] = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh}


class Recurrent(Encoder):
    """Base class of stacks of torch's recurrent layers: the layers and their state. Subclasses add dropout.

    Args:
        input_dim: Dimension of the input vectors.
        hidden_dim: Number of units of every layer.
        layers: Number of layers.
        biases: Number of bias vectors per gate, 1 or 2.
        output_dim: Number of units of the last layer, if it differs.
    """

    layer_class: ClassVar[Callable[..., nn.RNNBase]] = nn.LSTM
    """The torch module of one layer."""
    state_names: ClassVar[tuple[str, ...]] = ("h", "c")
    """Names of the tensors of the state."""

    def __init__(
        self, input_dim: int, hidden_dim: int, layers: int, biases: int, output_dim: int | None = None
    ) -> None:
        super().__init__()
        self.input_dim = input_dim
        self.dim = hidden_dim if output_dim is None else output_dim
        module = type(self).__name__
        check_sizes(module, input_dim=input_dim, hidden_dim=hidden_dim, layers=layers, output_dim=self.dim)
        if biases not in (1, 2):
            raise SettingsError(f"{module}: biases = {biases}: must be 1 or 2")
        self.layer_dims = [hidden_dim] * (layers - 1) + [self.dim]
        # One module per layer, because the dropout between the layers of a stacked nn.LSTM on a GPU draws from a
        # generator inside cuDNN whose state cannot be saved: a resumed run would drop other units.
        self.layers = nn.ModuleList()
        for input_size, hidden_size in pairwise([input_dim, *self.layer_dims]):
            layer = self.layer_class(input_size=input_size, hidden_size=hidden_size, batch_first=True)
            if biases == 1:
                _freeze_second_bias(layer)
            self.layers.append(layer)

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """Return zeros, with shape (layers, B, H): `h` and, for an LSTM, `c`.

        Args:
            streams: Number of streams, B.
            device: Device of the state.
        """
        shape = (len(self.layers), streams, self.dim)
        return {name: torch.zeros(shape, device=device) for name in self.state_names}

    def split_state(self, state: State, dtype: torch.dtype) -> Iterator[LayerState]:
        """Split a state into one state per layer, in the given type."""
        layers_by_name = [state[name].to(dtype).unbind() for name in self.state_names]
        return zip(*layers_by_name, strict=True)

    def join_states(self, states: Sequence[LayerState]) -> State:
        """Join the states of all layers into one state."""
        layers_by_name = zip(self.state_names, zip(*states, strict=True), strict=True)
        return {name: to_state_dtype(torch.stack(layers)) for name, layers in layers_by_name}


class Stacked(Recurrent):
    """Base class of `LSTM`, `GRU` and `RNN`, whose arguments are the same."""

    def __init__(
        self,
        input_dim: int,
        hidden_dim: Dim,
        layers: Layers = 2,
        dropout: Probability = 0.0,
        biases: Biases = 1,
    ) -> None:
        check_rates(type(self).__name__, dropout=dropout)
        super().__init__(input_dim, hidden_dim, layers, biases)
        self.dropout = dropout

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        raw_BTD, dropped_BTD = x_BTD, F.dropout(x_BTD, self.dropout, self.training)
        states: list[LayerState] = []
        for layer, layer_state in zip(self.layers, self.split_state(state, x_BTD.dtype), strict=True):
            raw_BTD, next_layer_state = run_layer(layer, dropped_BTD, layer_state)
            dropped_BTD = F.dropout(raw_BTD, self.dropout, self.training)
            states.append(next_layer_state)
        return Encoded(dropped_BTD, raw_BTD, self.join_states(states))


class LSTM(Stacked):
    """Stacked LSTM with dropout before, between and after the layers (Zaremba et al. 2014).

    Args:
        input_dim: Dimension of the input vectors.
        hidden_dim: Number of units of every layer, H.
        layers: Number of layers.
        dropout: Dropout rate before, between and after the layers.
        biases: Number of bias vectors per gate: 1 as in the papers' equations, or 2 as in torch and cuDNN.
    """


class GRU(Stacked):
    """Stacked gated recurrent units with dropout before, between and after the layers (Cho et al. 2014).

    Args:
        input_dim: Dimension of the input vectors.
        hidden_dim: Number of units of every layer, H.
        layers: Number of layers.
        dropout: Dropout rate before, between and after the layers.
        biases: Number of bias vectors per gate: 1 as in the papers' equations, or 2 as in torch and cuDNN.
    """

    layer_class = nn.GRU
    state_names = ("h",)


class RNN(Stacked):
    """Stacked tanh layers without gates, with dropout before, between and after the layers (Elman 1990).

    Args:
        input_dim: Dimension of the input vectors.
        hidden_dim: Number of units of every layer, H.
        layers: Number of layers.
        dropout: Dropout rate before, between and after the layers.
        biases: Number of bias vectors per layer: 1 as in the papers' equations, or 2 as in torch and cuDNN.
    """

    layer_class = nn.RNN
    state_names = ("h",)


def get_weights(layer: Any) -> list[Tensor]:
    """Return the weights of a layer in cuDNN's order: input matrix, recurrent matrix, and their biases."""
    return [layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0]


def run_layer(
    layer: Any, x_BTD: Tensor, state: LayerState, weights: list[Tensor] | None = None
) -> tuple[Tensor, LayerState]:
    """Run one layer over a window. Return the outputs h_BTH and the state after the window.

    Args:
        layer: A recurrent layer of torch.
        x_BTD: Inputs of the window.
        state: The state of the layer before the window.
        weights: Weights to use instead of the layer's own, in the order of `get_weights`.
    """
    initial_states = tuple(tensor[None].contiguous() for tensor in state)
    # The layer's own `forward` cannot be used, for two reasons. The weights may be others. And gradients may be needed
    # in evaluation mode, but cuDNN computes them in training mode only. Training mode does not change the values here,
    # because the dropout rate is 0.
    options = {"dropout": 0.0, "train": torch.is_grad_enabled(), "bidirectional": False, "batch_first": True}
    with _without_unsupported_onednn(x_BTD):
        output_BTH, *final_states = _FUNCTION_OF_MODE[layer.mode](
            x_BTD,
            initial_states if len(initial_states) > 1 else initial_states[0],
            get_weights(layer) if weights is None else weights,
            has_biases=True,
            num_layers=1,
            **options,
        )
    return output_BTH, tuple(tensor[0] for tensor in final_states)


@contextmanager
def _without_unsupported_onednn(x_BTD: Tensor) -> Iterator[None]:
    """Disable oneDNN inside the context if it does not support bfloat16 on this CPU.

    Without AVX-512, oneDNN does not support recurrent layers in bfloat16, and torch raises an error instead of using
    its own implementation.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x_BTD.dtype
    if x_BTD.device.type != "cpu" or dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield
        return
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


def _freeze_second_bias(layer: Any) -> None:
    """Replace the second bias vector, which cuDNN requires although one is enough, by a buffer of zeros."""
    zeros = torch.zeros_like(layer.bias_hh_l0)
    del layer.bias_hh_l0
    layer.register_buffer("bias_hh_l0", zeros, persistent=False)
    # The list of weights that torch lays out for cuDNN still has the deleted parameter.
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
    layer.flatten_parameters()
