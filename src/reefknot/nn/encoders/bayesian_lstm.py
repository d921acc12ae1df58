"""The Bayesian LSTM of Gal & Ghahramani (2016), as Press & Wolf (2017) train it.

Masks hold for one example and one window. Every layer has its own, on its input and on its state where that recurs: one
for all four gates ("tied") or one for each ("separate", Gal's untied weights). One more is on what the last layer
gives. Word dropout, the fourth of Gal's rates, is the input end's (`lookup`).

Shapes: B streams, T steps, D width.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Probability, check_rates
from reefknot.nn.encoders.contract import Encoded, State
from reefknot.nn.encoders.masks import GATES, locked_dropout, run_masked, window_mask
from reefknot.nn.encoders.stacked import Biases, HiddenDim, LayerCount, LayerState, Recurrent


class BayesianLSTM(Recurrent):
    """Stacked LSTM with dropout masks per gate and window on inputs and states (Gal & Ghahramani 2016)."""

    def __init__(
        self,
        input_dim: int,
        hidden_dim: HiddenDim,
        layers: LayerCount = 2,
        dropout_input: Annotated[Probability, Field(description="drop rate on the input of every layer")] = 0.0,
        dropout_hidden: Annotated[
            Probability, Field(description="drop rate on the state of every layer where it recurs")
        ] = 0.0,
        dropout_output: Annotated[Probability, Field(description="drop rate on what the last layer gives")] = 0.0,
        gates: Annotated[
            Literal["separate", "tied"], Field(description="one mask for each of the four gates, or one for all")
        ] = "separate",
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
        self.masks = GATES if gates == "separate" else 1

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        raw_BTD = x_BTD
        ends: list[LayerState] = []
        for layer, start in zip(self.layers, self.starts(state, x_BTD.dtype), strict=True):
            input_mask = window_mask(raw_BTD, raw_BTD.shape[-1], self.dropout_input, self.training, self.masks)
            state_mask = window_mask(raw_BTD, self.dim, self.dropout_hidden, self.training, self.masks)
            raw_BTD, end = run_masked(layer, raw_BTD, start, input_mask, state_mask)
            ends.append(end)
        return Encoded(locked_dropout(raw_BTD, self.dropout_output, self.training), raw_BTD, self.ends(ends))
