"""The LSTM of Zaremba et al. (2014): dropout on what goes in, between layers and on what comes out, never in time."""

from __future__ import annotations

from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.encoders.contract import Encoded, Encoder, State
from reefknot.errors import SettingsError
from reefknot.settings import Dim, Layers, Probability, check_rates


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
        # A recipe is checked against the annotations; a call from Python is not.
        if layers < 1:
            raise SettingsError(f"LSTM: layers = {layers}: must be at least 1")
        check_rates("LSTM", dropout=dropout)
        if biases not in (1, 2):
            raise SettingsError(f"LSTM: biases = {biases}: must be 1 or 2")
        self.input_dim = input_dim
        self.dim = hidden_dim
        self.dropout = dropout
        # One module per layer, because the dropout between the layers of a stacked nn.LSTM draws, on a GPU, from a
        # generator inside cuDNN that nobody can save: a resumed run would drop other units.
        widths = [input_dim] + [hidden_dim] * (layers - 1)
        self.layers = nn.ModuleList(nn.LSTM(width, hidden_dim, batch_first=True) for width in widths)
        if biases == 1:
            for layer in self.layers:
                _freeze_second_bias(cast(nn.LSTM, layer))

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        shape = (len(self.layers), streams, self.dim)
        return {"h": torch.zeros(shape, device=device), "c": torch.zeros(shape, device=device)}

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        raw_BTD, dropped_BTD = x_BTD, F.dropout(x_BTD, self.dropout, self.training)
        ends: list[tuple[Tensor, Tensor]] = []
        starts = (state[name].to(x_BTD.dtype) for name in ("h", "c"))
        for layer, h, c in zip(self.layers, *starts, strict=True):
            raw_BTD, end = layer(dropped_BTD, (h[None].contiguous(), c[None].contiguous()))
            dropped_BTD = F.dropout(raw_BTD, self.dropout, self.training)
            ends.append(end)
        h, c = (torch.cat(parts) for parts in zip(*ends, strict=True))
        # Carried in float32 at least, whatever the precision inside: a window's rounding must not depend on its
        # neighbours.
        carried = torch.promote_types(h.dtype, torch.float32)
        return Encoded(dropped_BTD, raw_BTD, {"h": h.to(carried), "c": c.to(carried)})


def _freeze_second_bias(layer: nn.LSTM) -> None:
    """cuDNN wants two bias vectors; two that are always added are one, so the second becomes a zero buffer."""
    zeros = torch.zeros_like(cast(Tensor, layer.bias_hh_l0))
    del layer.bias_hh_l0
    layer.register_buffer("bias_hh_l0", zeros, persistent=False)
    # The list of weights that nn.LSTM hands to the kernel still holds the deleted parameter.
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
    layer.flatten_parameters()
