"""The variational LSTM of Inan et al. (2017): one mask per layer, in time and upward.

A layer's hidden state is dropped by the same mask where it recurs and where it is read from above, by the next layer or
the output end: tied further than in Gal & Ghahramani (2016), which `bayesian_lstm.py` has. A mask holds for one example
and one window; what is carried to the next window is the state itself, undropped.

Shapes: B streams, T steps, D width.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from reefknot.encoders.contract import Encoded, State
from reefknot.encoders.masks import locked_dropout, masked, run_masked, window_mask
from reefknot.encoders.stacked import Biases, HiddenDim, LayerCount, LayerState, Recurrent
from reefknot.settings import Probability, check_rates


class VariationalLSTM(Recurrent):
    """Stacked LSTM with one dropout mask per layer and window, on its state in time and upward (Inan et al. 2017)."""

    def __init__(
        self,
        input_dim: int,
        hidden_dim: HiddenDim,
        layers: LayerCount = 2,
        dropout: Annotated[Probability, Field(description="drop rate on the hidden states of every layer")] = 0.0,
        dropout_input: Annotated[
            Probability, Field(description="drop rate on the vectors that go in; Inan et al. drop none")
        ] = 0.0,
        biases: Biases = 1,
    ) -> None:
        check_rates("VariationalLSTM", dropout=dropout, dropout_input=dropout_input)
        super().__init__(input_dim, hidden_dim, layers, biases)
        self.dropout = dropout
        self.dropout_input = dropout_input

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        raw_BTD, dropped_BTD = x_BTD, locked_dropout(x_BTD, self.dropout_input, self.training)
        ends: list[LayerState] = []
        for layer, start in zip(self.layers, self.starts(state, x_BTD.dtype), strict=True):
            mask_B1D = window_mask(x_BTD, self.dim, self.dropout, self.training)
            raw_BTD, end = run_masked(layer, dropped_BTD, start, None, mask_B1D)
            dropped_BTD = masked(raw_BTD, mask_B1D)
            ends.append(end)
        return Encoded(dropped_BTD, raw_BTD, self.ends(ends))
