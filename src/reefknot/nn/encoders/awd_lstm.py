"""AWD-LSTM, the weight-dropped LSTM of Merity et al. (2017) and the encoder of Pappas & Henderson (2019).

Start reading at `AWDLSTM.forward`. There are two kinds of dropout. Both are drawn once per window (the T steps that are
computed at once):

    weight drop       drops weights of each layer's recurrent matrix, instead of units of the recurrent state
    locked dropout    drops the same units at every step, before, between and after the layers

The last layer has as many units as the word vectors have dimensions, so that input and output embeddings can be tied.

Shapes: B streams (rows of a batch), T steps, D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.kernels.recurrence import is_faster_than_cudnn
from reefknot.nn.bounds import Dim, Layers, Probability, check_rates
from reefknot.nn.encoders.contract import Encoded, State, to_state_dtype
from reefknot.nn.encoders.masks import locked_dropout, scan_layer
from reefknot.nn.encoders.stacked import Biases, LayerState, RecurrentEncoder, get_weights, run_layer


class AWDLSTM(RecurrentEncoder):
    """Stacked LSTM with dropped recurrent weights and locked dropout between layers (Merity et al. 2017).

    Args:
        input_dim: Dimension of the input vectors.
        hidden_dim: Number of units of every layer except the last.
        layers: Number of layers.
        output_dim: Number of units of the last layer. The default is the dimension of the input vectors.
        dropout_input: Dropout rate of the input vectors.
        dropout_hidden: Dropout rate between the layers.
        dropout_output: Dropout rate of the output of the last layer.
        weight_drop: Dropout rate of the weights of the recurrent matrices.
        biases: Number of bias vectors per gate: 1 as in the papers' equations, or 2 as in torch and cuDNN.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_dim: Dim,
        layers: Layers = 3,
        output_dim: Dim | None = None,
        dropout_input: Probability = 0.0,
        dropout_hidden: Probability = 0.0,
        dropout_output: Probability = 0.0,
        weight_drop: Probability = 0.0,
        biases: Biases = 2,
    ) -> None:
        rates = {"dropout_input": dropout_input, "dropout_hidden": dropout_hidden, "dropout_output": dropout_output}
        check_rates("AWDLSTM", **rates, weight_drop=weight_drop)
        if output_dim is None:
            output_dim = input_dim
        super().__init__(input_dim, hidden_dim, layers, biases, output_dim)
        self.layer_dropouts = [dropout_hidden] * (layers - 1) + [dropout_output]
        self.dropout_input = dropout_input
        self.weight_drop = weight_drop

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """Return zeros, with shape (1, B, sum of all layers' units): the states of the layers are concatenated.

        Args:
            streams: Number of streams, B.
            device: Device of the state.
        """
        shape = (1, streams, sum(self.layer_dims))
        return {name: torch.zeros(shape, device=device) for name in self.state_names}

    def split_state(self, state: State, dtype: torch.dtype) -> Iterator[LayerState]:
        layer_tensors_by_name = []
        for name in self.state_names:
            concatenated = state[name][0].to(dtype)
            layer_tensors_by_name.append(concatenated.split_with_sizes(self.layer_dims, dim=-1))
        return zip(*layer_tensors_by_name, strict=True)

    def join_states(self, layer_states: Sequence[LayerState]) -> State:
        joined = {}
        for index, name in enumerate(self.state_names):
            layer_tensors = [layer_state[index] for layer_state in layer_states]
            joined[name] = to_state_dtype(torch.cat(layer_tensors, dim=-1)[None])
        return joined

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        # `raw_BTD` has the vectors before dropout and `dropped_BTD` after it.
        raw_BTD = inputs_BTD
        dropped_BTD = locked_dropout(raw_BTD, self.dropout_input, self.training)
        layer_states = self.split_state(state, inputs_BTD.dtype)
        next_states: list[LayerState] = []
        for layer, dropout_rate, layer_state in zip(self.layers, self.layer_dropouts, layer_states, strict=True):
            raw_BTD, next_layer_state = self._run_layer(layer, dropped_BTD, layer_state)
            dropped_BTD = locked_dropout(raw_BTD, dropout_rate, self.training)
            next_states.append(next_layer_state)
        return Encoded(output=dropped_BTD, raw=raw_BTD, state=self.join_states(next_states))

    def _run_layer(self, layer: nn.Module, inputs_BTD: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Run one layer over a window, with dropped recurrent weights in training.

        Return the outputs and the state after the window. Because the state itself is not dropped, the layer can run in
        cuDNN, or in our own recurrence kernel where that is faster.
        """
        input_weight, recurrent_weight, *biases = get_weights(layer)
        drops_weights = self.training and self.weight_drop > 0.0
        if drops_weights:
            recurrent_weight = F.dropout(recurrent_weight, self.weight_drop)

        weights = [input_weight, recurrent_weight, *biases]
        if is_faster_than_cudnn(inputs_BTD, recurrent_weight):
            return scan_layer(weights, inputs_BTD, state)
        if drops_weights:
            weights = _make_contiguous(weights)
        return run_layer(layer, inputs_BTD, state, weights)


def _make_contiguous(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the weights as views of one tensor. cuDNN would copy separate weights into one tensor, with a warning."""
    joined = torch.cat([weight.flatten() for weight in weights])
    chunks = joined.split_with_sizes([weight.numel() for weight in weights])
    return [chunk.view_as(weight) for chunk, weight in zip(chunks, weights, strict=True)]
