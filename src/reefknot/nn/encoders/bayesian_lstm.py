"""The Bayesian LSTM of Gal & Ghahramani (2016), as Press & Wolf (2017) train it.

`BayesianLSTM` is an LSTM with dropout masks that are constant over a window (the T steps that are computed at once).
There are three kinds of masks:

    input     on the input of every layer
    hidden    on the recurrent state of every layer
    output    on the output of the last layer

A layer has one mask for all four gates or one mask for each gate. Gal & Ghahramani call these variants "tied weights"
and "untied weights"; the argument `gates` calls them `tied` and `separate`. Their fourth kind of dropout, word dropout,
is a setting of the embedding lookup (`Lookup`).

Shapes: B streams (rows of a batch), T steps, D dimensions.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Dim, Layers, Probability, check_rates
from reefknot.nn.encoders.contract import Encoded, State
from reefknot.nn.encoders.masks import NUM_GATES, locked_dropout, run_masked_layer, sample_mask
from reefknot.nn.encoders.stacked import Biases, LayerState, RecurrentEncoder


class BayesianLSTM(RecurrentEncoder):
    """A stacked LSTM whose dropout masks on inputs and states stay the same for a whole training window.

    This is the model of Gal & Ghahramani (2016).

    Args:
        input_dim: Dimension of the input vectors.
        hidden_dim: Number of units of every layer.
        layers: Number of layers.
        dropout_input: Dropout rate of the input of every layer.
        dropout_hidden: Dropout rate of the recurrent state of every layer.
        dropout_output: Dropout rate of the output of the last layer.
        gates: One mask for each of the four gates (`separate`), or one for all of them (`tied`).
        biases: Number of bias vectors per gate: 1 as in the papers' equations, or 2 as in torch and cuDNN.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_dim: Dim,
        layers: Layers = 2,
        dropout_input: Probability = 0.0,
        dropout_hidden: Probability = 0.0,
        dropout_output: Probability = 0.0,
        gates: Literal["separate", "tied"] = "separate",
        biases: Biases = 1,
    ) -> None:
        rates = {"dropout_input": dropout_input, "dropout_hidden": dropout_hidden, "dropout_output": dropout_output}
        check_rates("BayesianLSTM", **rates)
        if gates not in ("separate", "tied"):
            raise SettingsError(f"BayesianLSTM: gates = {gates!r}: must be separate or tied")
        super().__init__(input_dim, hidden_dim, layers, biases)
        self.dropout_input = dropout_input
        self.dropout_hidden = dropout_hidden
        self.dropout_output = dropout_output
        self.num_gate_masks = NUM_GATES if gates == "separate" else 1

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        hidden_BTD = inputs_BTD
        next_states: list[LayerState] = []
        for layer, layer_state in zip(self.layers, self.split_state(state, inputs_BTD.dtype), strict=True):
            input_dim = hidden_BTD.shape[-1]
            input_mask = sample_mask(hidden_BTD, input_dim, self.dropout_input, self.training, self.num_gate_masks)
            state_mask = sample_mask(hidden_BTD, self.dim, self.dropout_hidden, self.training, self.num_gate_masks)
            hidden_BTD, next_layer_state = run_masked_layer(layer, hidden_BTD, layer_state, input_mask, state_mask)
            next_states.append(next_layer_state)

        output_BTD = locked_dropout(hidden_BTD, self.dropout_output, self.training)
        return Encoded(output_BTD, raw=hidden_BTD, state=self.join_states(next_states))
