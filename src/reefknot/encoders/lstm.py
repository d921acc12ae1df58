"""The LSTM of Zaremba et al. (2014): dropout on what goes in, between layers and on what comes out, never in time."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.encoders.contract import Encoded, Encoder, State
from reefknot.settings import Dim, Layers, Probability


class LSTM(Encoder):
    """Stacked LSTM with dropout around and between its layers."""

    def __init__(
        self,
        input_dim: int,
        hidden_dim: Annotated[Dim, Field(description="units of every layer")],
        layers: Annotated[Layers, Field(description="number of layers")] = 2,
        dropout: Annotated[Probability, Field(description="drop rate before, between and after the layers")] = 0.0,
        biases: Annotated[
            Literal[1, 2],
            Field(description="bias vectors per gate: 1 as in the papers' equations, 2 as torch and cuDNN have it"),
        ] = 1,
    ) -> None:
        super().__init__()
        self.dim = hidden_dim
        self.layers = layers
        self.dropout = dropout
        self.lstm = nn.LSTM(input_dim, hidden_dim, layers, dropout=dropout if layers > 1 else 0.0, batch_first=True)
        if biases == 1:
            self._freeze_second_biases()

    def _freeze_second_biases(self) -> None:
        """cuDNN wants two bias vectors; two that are always added are one, so the second becomes a zero buffer."""
        for layer in range(self.layers):
            name = f"bias_hh_l{layer}"
            zeros = torch.zeros_like(getattr(self.lstm, name))
            delattr(self.lstm, name)
            self.lstm.register_buffer(name, zeros, persistent=False)
        # The list of weights that nn.LSTM hands to the kernel still holds the deleted parameters.
        self.lstm._flat_weights = [getattr(self.lstm, name) for name in self.lstm._flat_weights_names]
        self.lstm.flatten_parameters()

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        shape = (self.layers, streams, self.dim)
        return {"h": torch.zeros(shape, device=device), "c": torch.zeros(shape, device=device)}

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        x_BTD = F.dropout(x_BTD, self.dropout, self.training)
        h, c = (state[name].to(x_BTD.dtype).contiguous() for name in ("h", "c"))
        raw_BTD, (h, c) = self.lstm(x_BTD, (h, c))
        output_BTD = F.dropout(raw_BTD, self.dropout, self.training)
        # Carried in float32 at least, whatever the precision inside: a window's rounding must not depend on its
        # neighbours.
        carried = torch.promote_types(h.dtype, torch.float32)
        return Encoded(output_BTD, raw_BTD, {"h": h.to(carried), "c": c.to(carried)})
