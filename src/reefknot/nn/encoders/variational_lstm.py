"""The variational LSTM of Inan et al. (2017): one dropout mask per layer, used in time and between layers.

The hidden state of a layer has the same mask in the recurrence and where the next layer or the softmax reads it. In Gal
& Ghahramani (2016) these masks differ; their LSTM is in `bayesian_lstm.py`. A mask is constant over one window (the T
steps that are computed at once). The state that is carried to the next window is not masked.

Shapes: L layers, B streams (rows of a batch), T steps, D dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.nn.bounds import Dim, Layers, Probability, check_rates
from reefknot.nn.encoders.contract import Encoded, State, to_state_dtype
from reefknot.nn.encoders.masks import apply_mask, locked_dropout, run_masked_stack, sample_mask
from reefknot.nn.encoders.stacked import Biases, LayerState, RecurrentEncoder, run_layer


class VariationalLSTM(RecurrentEncoder):
    """Stacked LSTM with one dropout mask per layer and window, in time and between layers (Inan et al. 2017).

    Args:
        input_dim: Dimension of the input vectors.
        hidden_dim: Number of units of every layer.
        layers: Number of layers.
        dropout: Dropout rate of the hidden states of every layer.
        dropout_input: Dropout rate of the input vectors. Inan et al. do not drop them.
        biases: Number of bias vectors per gate: 1 as in the papers' equations, or 2 as in torch and cuDNN.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_dim: Dim,
        layers: Layers = 2,
        dropout: Probability = 0.0,
        dropout_input: Probability = 0.0,
        biases: Biases = 1,
    ) -> None:
        check_rates("VariationalLSTM", dropout=dropout, dropout_input=dropout_input)
        super().__init__(input_dim, hidden_dim, layers, biases)
        self.dropout = dropout
        self.dropout_input = dropout_input

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        dropped_BTD = locked_dropout(inputs_BTD, self.dropout_input, self.training)
        masks = self._sample_masks(inputs_BTD)
        if not masks:
            return self._run_without_masks(dropped_BTD, state)

        stack_state = (state["h"], state["c"])
        raw_BTD, (hidden_LBD, cell_LBD) = run_masked_stack(self.layers, dropped_BTD, stack_state, torch.stack(masks))
        next_state = {"h": to_state_dtype(hidden_LBD), "c": to_state_dtype(cell_LBD)}
        output_BTD = apply_mask(raw_BTD, masks[-1])
        return Encoded(output_BTD, raw_BTD, next_state)

    def _sample_masks(self, inputs_BTD: Tensor) -> list[Tensor]:
        """Draw one mask per layer, (B, 1, D) each. Return an empty list if nothing is dropped."""
        masks = []
        for _ in self.layers:
            mask_B1D = sample_mask(inputs_BTD, self.dim, self.dropout, self.training)
            if mask_B1D is not None:
                masks.append(mask_B1D)
        return masks

    def _run_without_masks(self, inputs_BTD: Tensor, state: State) -> Encoded:
        """Run torch's own layers one after the other."""
        hidden_BTD = inputs_BTD
        next_states: list[LayerState] = []
        for layer, layer_state in zip(self.layers, self.split_state(state, inputs_BTD.dtype), strict=True):
            hidden_BTD, next_layer_state = run_layer(layer, hidden_BTD, layer_state)
            next_states.append(next_layer_state)
        return Encoded(hidden_BTD, hidden_BTD, self.join_states(next_states))
