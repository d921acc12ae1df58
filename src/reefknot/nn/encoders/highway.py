"""The recurrent highway network of Zilly et al. (2017): each time step is several layers deep.

Start reading at `RecurrentHighway.forward`. A step starts from s_0, the state after the previous step. Its layers
l = 1 ... L compute from the state s_(l-1) before them

    h_l = tanh(W_H x [l = 1] + R_Hl s_(l-1) + b_Hl)                           the candidate state
    t_l = sigmoid(W_T x [l = 1] + R_Tl s_(l-1) + b_Tl + transform_bias)       the transform gate
    s_l = h_l t_l + s_(l-1) (1 - t_l)                                         the next state

[l = 1] means that only the first layer reads the input x. The last term is the carried part of the state.

Shapes: B streams (rows of a batch), T steps, D input dimensions, H units, L layers of a step, G = 2H: candidate and
gate.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Dim, Ge, Layers, Le, Probability, check_rates, check_sizes
from reefknot.nn.encoders.contract import Encoded, Encoder, State, to_state_dtype
from reefknot.nn.encoders.masks import apply_mask, locked_dropout, sample_mask
from reefknot.nn.part import FLOPS_PER_WEIGHT

TransformBias = Annotated[float, Ge(-100.0), Le(100.0)]


class RecurrentHighway(Encoder):
    """Recurrent highway network with dropout masks per window (Zilly et al. 2017).

    Dropout masks are constant over one window, the T steps that are computed at once (Gal & Ghahramani 2016). They
    apply to the input, to the state where a matrix multiplies it, and to the output, but never to the carried part.

    Args:
        input_dim: Dimension of the input vectors.
        hidden_dim: Number of units of the state.
        depth: Number of layers of every time step.
        transform_bias: Added to the pre-activation of the transform gates. With a value below 0, most of the state is
            carried at first.
        dropout_input: Dropout rate of the input vectors.
        dropout_hidden: Dropout rate of the state where a recurrent matrix multiplies it.
        dropout_output: Dropout rate of the output.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_dim: Dim,
        depth: Layers,
        transform_bias: TransformBias = -2.0,
        dropout_input: Probability = 0.0,
        dropout_hidden: Probability = 0.0,
        dropout_output: Probability = 0.0,
    ) -> None:
        super().__init__()
        check_sizes("RecurrentHighway", input_dim=input_dim, hidden_dim=hidden_dim, depth=depth)
        if not math.isfinite(transform_bias):
            raise SettingsError(f"RecurrentHighway: transform_bias = {transform_bias}: must be a finite number")
        rates = {"dropout_input": dropout_input, "dropout_hidden": dropout_hidden, "dropout_output": dropout_output}
        check_rates("RecurrentHighway", **rates)
        self.input_dim = input_dim
        self.dim = hidden_dim
        # A constant in addition to the learned bias, so that initialising all parameters does not erase it.
        self.transform_bias = transform_bias
        self.dropout_input = dropout_input
        self.dropout_hidden = dropout_hidden
        self.dropout_output = dropout_output
        self.input_weight = nn.Parameter(torch.empty(2 * hidden_dim, input_dim))
        self.weight = nn.Parameter(torch.empty(depth, 2 * hidden_dim, hidden_dim))
        self.bias = nn.Parameter(torch.empty(depth, 2 * hidden_dim))
        init_range = hidden_dim**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -init_range, init_range)

    def initial_state(self, streams: int, device: torch.device | None = None) -> State:
        """Return zeros, with shape (1, B, H).

        Args:
            streams: Number of streams, B.
            device: Device of the state.
        """
        return {"h": torch.zeros((1, streams, self.dim), device=device)}

    def forward(self, inputs_BTD: Tensor, state: State) -> Encoded:
        # The contribution of the input to the first layer of every step, and the mask of the state.
        dropped_BTD = locked_dropout(inputs_BTD, self.dropout_input, self.training)
        inputs_BTG = F.linear(dropped_BTD, self.input_weight)
        mask_B1H = sample_mask(inputs_BTD, self.dim, self.dropout_hidden, self.training)
        mask_BH = None if mask_B1H is None else mask_B1H[:, 0]

        # The weights of each layer. `transform_bias` is added to the second half, the biases of the gates.
        transform_bias_H = self.bias.new_full((self.dim,), self.transform_bias)
        bias_LG = self.bias + F.pad(transform_bias_H, (self.dim, 0))
        layers = list(zip(self.weight.unbind(), bias_LG.unbind(), strict=True))

        state_BH = state["h"][0].to(self.weight.dtype)
        states = []
        for inputs_BG in inputs_BTG.unbind(1):
            for index, (weight_GH, bias_G) in enumerate(layers):
                preactivations_BG = F.linear(apply_mask(state_BH, mask_BH), weight_GH, bias_G)
                if index == 0:
                    preactivations_BG = preactivations_BG + inputs_BG
                candidate_BH, gate_BH = preactivations_BG.chunk(2, dim=-1)
                state_BH = state_BH + torch.sigmoid(gate_BH) * (torch.tanh(candidate_BH) - state_BH)
            states.append(state_BH)

        raw_BTH = torch.stack(states, dim=1)
        output_BTH = locked_dropout(raw_BTH, self.dropout_output, self.training)
        return Encoded(output_BTH, raw_BTH, {"h": to_state_dtype(state_BH[None])})

    def flops(self, lengths_B: Tensor) -> int:
        num_steps = int(lengths_B.sum())
        weights_per_step = self.input_weight.numel() + self.weight.numel()
        return FLOPS_PER_WEIGHT * num_steps * weights_per_step
