"""The weight-dropped LSTM of Merity et al. (2017), the encoder of Pappas & Henderson (2019).

No state is dropped in time but numbers of each layer's recurrent matrix are, once per window, which leaves the layer to
cuDNN, or to our own recurrence where that is faster. Around and between the layers the same units are dropped at every
step of a window. The last layer is as wide as the words' vectors, so that the ends can share them.

Shapes: B streams, T steps, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.kernels.recurrence import outruns_cudnn
from reefknot.lab.config.settings import Dim, Probability, check_rates
from reefknot.nn.encoders.contract import Encoded, State, at_rest
from reefknot.nn.encoders.masks import locked_dropout, scan
from reefknot.nn.encoders.stacked import Biases, LayerCount, LayerState, Recurrent, run, weights_of


class AWDLSTM(Recurrent):
    """Stacked LSTM with dropped recurrent weights and the same units dropped at every step (Merity et al. 2017)."""

    def __init__(
        self,
        input_dim: int,
        hidden_dim: Annotated[Dim, Field(description="units of every layer but the last")],
        layers: LayerCount = 3,
        output_dim: Annotated[
            Dim | None, Field(description="units of the last layer; left out, as wide as its input vectors")
        ] = None,
        dropout_input: Annotated[Probability, Field(description="drop rate on the vectors that go in")] = 0.0,
        dropout_hidden: Annotated[Probability, Field(description="drop rate between the layers")] = 0.0,
        dropout_output: Annotated[Probability, Field(description="drop rate on what the last layer gives")] = 0.0,
        weight_drop: Annotated[Probability, Field(description="drop rate on the recurrent matrices")] = 0.0,
        biases: Biases = 2,
    ) -> None:
        rates = {"dropout_input": dropout_input, "dropout_hidden": dropout_hidden, "dropout_output": dropout_output}
        check_rates("AWDLSTM", **rates, weight_drop=weight_drop)
        super().__init__(input_dim, hidden_dim, layers, biases, input_dim if output_dim is None else output_dim)
        self.dropouts = [dropout_hidden] * (layers - 1) + [dropout_output]
        self.dropout_input = dropout_input
        self.weight_drop = weight_drop

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """The layers' states side by side, for their widths differ."""
        shape = (1, streams, sum(self.widths))
        return {name: torch.zeros(shape, device=device) for name in self.names}

    def starts(self, state: State, dtype: torch.dtype) -> Iterator[LayerState]:
        return zip(
            *(state[name][0].to(dtype).split_with_sizes(self.widths, dim=-1) for name in self.names), strict=True
        )

    def ends(self, states: Sequence[LayerState]) -> State:
        parts = zip(*states, strict=True)
        return {name: at_rest(torch.cat(part, dim=-1)[None]) for name, part in zip(self.names, parts, strict=True)}

    def forward(self, x_BTD: Tensor, state: State) -> Encoded:
        raw_BTD, dropped_BTD = x_BTD, locked_dropout(x_BTD, self.dropout_input, self.training)
        ends: list[LayerState] = []
        for layer, rate, start in zip(self.layers, self.dropouts, self.starts(state, x_BTD.dtype), strict=True):
            raw_BTD, end = self._run(layer, dropped_BTD, start)
            dropped_BTD = locked_dropout(raw_BTD, rate, self.training)
            ends.append(end)
        return Encoded(dropped_BTD, raw_BTD, self.ends(ends))

    def _run(self, layer: nn.Module, x_BTD: Tensor, start: LayerState) -> tuple[Tensor, LayerState]:
        """One layer over a window, with its weights for this window."""
        weights = weights_of(layer)
        dropped = self.training and self.weight_drop > 0.0
        if dropped:
            weights[1] = F.dropout(weights[1], self.weight_drop)
        if outruns_cudnn(x_BTD, weights[1]):
            return scan(weights, x_BTD, start)
        return run(layer, x_BTD, start, _in_one_piece(weights) if dropped else weights)


def _in_one_piece(weights: Sequence[Tensor]) -> list[Tensor]:
    """cuDNN reads the weights of a layer from one piece of memory; it would copy others into one, with a warning."""
    flat = torch.cat([weight.flatten() for weight in weights])
    parts = flat.split_with_sizes([weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
