"""Stacked recurrent layers, computed by torch and cuDNN: `LSTM`, `GRU` and `RNN`.

    encoder = LSTM(input_dim=200, hidden_dim=650, layers=2, dropout=0.5)
    encoded = encoder(vectors_BTD, encoder.initial_state(20))

`LSTM` is the LSTM of Zaremba et al. (2014), with dropout before, between and after the layers, but not on the recurrent
state. `GRU` and `RNN` are the same with other layers. Start reading at `LayerDropoutEncoder.forward`, which all three
share. Its base class `RecurrentEncoder` creates the layers and handles their state. The LSTMs with dropout on the
recurrent state (`awd_lstm.py`, `bayesian_lstm.py`, `variational_lstm.py`) extend it too.

Shapes: L layers, B streams (rows of a batch), T steps, D dimensions of the input, H units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import ArgumentError, SettingsError
from reefknot.nn.bounds import Dim, Layers, Probability, check_rates, check_sizes
from reefknot.nn.encoders.contract import Encoded, Encoder, State, to_state_dtype

LayerState = tuple[Tensor, ...]
"""The state of one layer: (hidden_BH, cell_BH) for an LSTM, and (hidden_BH,) for the other layers."""

Biases = Literal[1, 2]
"""Number of bias vectors per gate."""

_TORCH_FUNCTIONS: dict[str, Any] = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh}
"""The functions that torch's layers call in their `forward`, by the layer's `mode`."""


class RecurrentEncoder(Encoder):
    """Base class of stacks of torch's recurrent layers: the layers and their state. Subclasses add dropout.

    Args:
        input_dim: Dimension of the input vectors.
        hidden_dim: Number of units of every layer.
        num_layers: Number of layers.
        num_biases: Number of bias vectors per gate, 1 or 2.
        output_dim: Number of units of the last layer, if it differs.
    """

    layer_class: ClassVar[Callable[..., nn.RNNBase]] = nn.LSTM
    """The torch module of one layer."""
    state_names: ClassVar[tuple[str, ...]] = ("h", "c")
    """Names of the tensors of the state."""

    def __init__(
        self, input_dim: int, hidden_dim: int, num_layers: int, num_biases: int, output_dim: int | None = None
    ) -> None:
        super().__init__()
        self.input_dim = input_dim
        self.dim = hidden_dim if output_dim is None else output_dim
        module = type(self).__name__
        check_sizes(module, input_dim=input_dim, hidden_dim=hidden_dim, layers=num_layers, output_dim=self.dim)
        if num_biases not in (1, 2):
            raise SettingsError(f"{module}: biases = {num_biases}: must be 1 or 2")
        self.layer_dims = [hidden_dim] * (num_layers - 1) + [self.dim]
        # One module per layer, because the dropout between the layers of a stacked nn.LSTM on a GPU draws from a
        # generator inside cuDNN whose state cannot be saved: a resumed run would drop other units.
        self.layers = nn.ModuleList()
        for input_size, hidden_size in pairwise([input_dim, *self.layer_dims]):
            layer = self.layer_class(input_size=input_size, hidden_size=hidden_size, batch_first=True)
            if num_biases == 1:
                _freeze_second_bias(layer)
            self.layers.append(layer)

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """Return zeros, with shape (L, B, H): `h` and, for an LSTM, `c`.

        Args:
            streams: Number of streams, B.
            device: Device of the state.
        """
        shape = (len(self.layers), streams, self.dim)
        return {name: torch.zeros(shape, device=device) for name in self.state_names}

    def split_state(self, state: State, dtype: torch.dtype) -> Iterator[LayerState]:
        """Split a state into one state per layer, in the given type.

        For an LSTM of two layers, {"h": hidden_LBH, "c": cell_LBH} becomes (hidden_BH, cell_BH), (hidden_BH, cell_BH).
        """
        layer_tensors_by_name = [state[name].to(dtype).unbind() for name in self.state_names]
        return zip(*layer_tensors_by_name, strict=True)

    def join_states(self, layer_states: Sequence[LayerState]) -> State:
        """Join the states of all layers into one state. This is the inverse of `split_state`."""
        joined = {}
        for index, name in enumerate(self.state_names):
            layer_tensors = [layer_state[index] for layer_state in layer_states]
            joined[name] = to_state_dtype(torch.stack(layer_tensors))
        return joined


class LayerDropoutEncoder(RecurrentEncoder):
    """Base class of `LSTM`, `GRU` and `RNN`: recurrent layers with dropout before, between and after them.

    Args:
        input_dim: Dimension of the input vectors.
        hidden_dim: Number of units of every layer, H.
        layers: Number of layers.
        dropout: Dropout rate before, between and after the layers.
        biases: Number of bias vectors: 1 as in the papers' equations, or 2 as in torch and cuDNN.
    """

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

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        # `raw` has the vectors before dropout and `dropped` after it: (B, T, D) for the inputs, (B, T, H) for a layer.
        raw = inputs_BTD
        dropped = F.dropout(raw, self.dropout, self.training)
        next_states: list[LayerState] = []
        for layer, layer_state in zip(self.layers, self.split_state(state, inputs_BTD.dtype), strict=True):
            raw, next_layer_state = run_layer(layer, dropped, layer_state)
            dropped = F.dropout(raw, self.dropout, self.training)
            next_states.append(next_layer_state)
        return Encoded(output=dropped, raw=raw, state=self.join_states(next_states))


class LSTM(LayerDropoutEncoder):
    """Stacked LSTM with dropout before, between and after the layers (Zaremba et al. 2014)."""


class GRU(LayerDropoutEncoder):
    """Stacked gated recurrent units with dropout before, between and after the layers (Cho et al. 2014)."""

    layer_class = nn.GRU
    state_names = ("h",)


class RNN(LayerDropoutEncoder):
    """Stacked tanh layers without gates, with dropout before, between and after the layers (Elman 1990)."""

    layer_class = nn.RNN
    state_names = ("h",)


# -- running torch's layers ----------------------------------------------------------------------------------------


def run_layer(
    layer: Any, inputs_BTD: Tensor, state: LayerState, weights: list[Tensor] | None = None
) -> tuple[Tensor, LayerState]:
    """Run one layer over a window (T steps). Return the outputs hidden_BTH and the state after the window.

    Args:
        layer: A recurrent layer of torch.
        inputs_BTD: Inputs of the window.
        state: The state of the layer before the window.
        weights: Weights to use instead of the layer's own, in the order of `get_weights`.
    """
    if weights is None:
        weights = get_weights(layer)
    check_shapes(inputs_BTD, state, layer.input_size, layer.hidden_size)
    # Torch expects a dimension of layers, (1, B, H), and a tuple only if the state has several tensors.
    initial_states = tuple(tensor[None].contiguous() for tensor in state)
    torch_state = initial_states if len(initial_states) > 1 else initial_states[0]

    # This calls the function behind the layer's `forward`, because `forward` itself does not work here. It always uses
    # the layer's own weights. And gradients may be needed in evaluation mode, but cuDNN computes them in training mode
    # only. Training mode does not change the values here, because the dropout rate is 0.
    torch_function = _TORCH_FUNCTIONS[layer.mode]
    with _without_unsupported_onednn(inputs_BTD):
        output_BTH, *final_states = torch_function(
            inputs_BTD,
            torch_state,
            weights,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=torch.is_grad_enabled(),
            bidirectional=False,
            batch_first=True,
        )
    return output_BTH, tuple(tensor[0] for tensor in final_states)


def check_shapes(inputs_BTD: Tensor, state: Iterable[Tensor], input_dim: int, units: int) -> None:
    """Raise an error if inputs or state have a wrong shape, because kernels then read memory beyond the tensors.

    Args:
        inputs_BTD: Inputs of the window.
        state: The tensors of the state, with shape (B, H) each.
        input_dim: Dimension of the inputs that the layer reads, D.
        units: Number of units of the layer, H.
    """
    shape = tuple(inputs_BTD.shape)
    if len(shape) != 3 or shape[2] != input_dim:
        raise ArgumentError(
            f"the inputs of the encoder are {shape}; they must be (streams, steps, dimension), and the layer reads "
            f"vectors of dimension {input_dim}"
        )
    for tensor in state:
        if tuple(tensor.shape) != (shape[0], units):
            raise ArgumentError(
                f"the state of a layer is {tuple(tensor.shape)}, but {shape[0]} streams and {units} units "
                f"need {(shape[0], units)}; pass the state after the previous window of the same streams, "
                f"or initial_state({shape[0]}) at the start of a text"
            )


def get_weights(layer: Any) -> list[Tensor]:
    """Return the weights of a layer in cuDNN's order: input matrix, recurrent matrix, and their biases."""
    return [layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, _get_second_bias(layer)]


def _get_second_bias(layer: Any) -> Tensor:
    """Return the second bias vector of a layer. If `_freeze_second_bias` made it a buffer, it is zero."""
    bias: Tensor = layer.bias_hh_l0
    if "bias_hh_l0" not in layer._buffers:
        return bias
    # The values of the buffer are never trusted, because `to_empty` leaves them unset and no checkpoint has them. With
    # `load_state_dict(assign=True)` or mixed precision, even its device or type may differ from the parameters.
    first_bias: Tensor = layer.bias_ih_l0
    is_usable = bias.device == first_bias.device and bias.dtype == first_bias.dtype
    if not is_usable or torch.compiler.is_compiling():
        return torch.zeros_like(first_bias)
    # Writing through `.data` does not count as a change for autograd, which may have saved the same zeros for the
    # backward pass of an earlier window.
    bias.data.zero_()
    return bias


@contextmanager
def _without_unsupported_onednn(inputs_BTD: Tensor) -> Iterator[None]:
    """Disable oneDNN inside the `with` block if it does not support bfloat16 on this CPU.

    oneDNN is the library that torch uses for layers on CPUs; torch's code has its old name, mkldnn. Without AVX-512,
    it does not support recurrent layers in bfloat16, and torch raises an error instead of using its own implementation.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else inputs_BTD.dtype
    is_cpu_bfloat16 = inputs_BTD.device.type == "cpu" and dtype == torch.bfloat16
    if not is_cpu_bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield
        return

    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


def _freeze_second_bias(layer: Any) -> None:
    """Replace the second bias vector of a layer by a buffer of zeros, so that only the first is trained.

    The equations of the papers have one bias per gate. cuDNN, and so torch, adds two. Only their sum matters, except in
    the candidate state of a GRU, where the reset gate scales the second bias.

    The buffer only reserves memory: cuDNN would otherwise copy all weights of the layer into one block at every call.
    `_get_second_bias` writes the zeros where they are used.
    """
    zeros = torch.zeros_like(layer.bias_hh_l0)
    del layer.bias_hh_l0
    layer.register_buffer("bias_hh_l0", zeros, persistent=False)
    # `_flat_weights` is torch's list of the weights that it passes to cuDNN. It still has the deleted parameter.
    # `flatten_parameters` then moves the new list into one block of memory, as cuDNN expects it.
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
    layer.flatten_parameters()
