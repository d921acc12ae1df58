"""The variational LSTM of Inan et al. (2017): one mask per layer, in time and upward.

A layer's hidden state is dropped by the same mask where it recurs and where it is read from above, by the next layer or
the output end: tied further than in Gal & Ghahramani (2016), which `bayesian_lstm.py` has. A mask holds for one example
and one window; what is carried to the next window is the state itself, undropped.

Shapes: L layers, B streams, T steps, D width.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from reefknot.lab.config.settings import Probability, check_rates
from reefknot.nn.encoders.contract import Encoded, State, at_rest
from reefknot.nn.encoders.masks import locked_dropout, masked, run_stack_masked, window_mask
from reefknot.nn.encoders.stacked import Biases, HiddenDim, LayerCount, LayerState, Recurrent, run


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
        dropped_BTD = locked_dropout(x_BTD, self.dropout_input, self.training)
        masks = [window_mask(x_BTD, self.dim, self.dropout, self.training) for _ in self.layers]
        drawn = [mask_B1D for mask_B1D in masks if mask_B1D is not None]
        if drawn:
            carried = state["h"], state["c"]
            raw_BTD, (h_LBD, c_LBD) = run_stack_masked(self.layers, dropped_BTD, carried, torch.stack(drawn))
            return Encoded(masked(raw_BTD, drawn[-1]), raw_BTD, {"h": at_rest(h_LBD), "c": at_rest(c_LBD)})
        ends: list[LayerState] = []
        for layer, start in zip(self.layers, self.starts(state, x_BTD.dtype), strict=True):
            dropped_BTD, end = run(layer, dropped_BTD, start)
            ends.append(end)
        return Encoded(dropped_BTD, dropped_BTD, self.ends(ends))
