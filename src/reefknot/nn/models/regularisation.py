"""Penalties on activations (Merity et al. 2017), which keep hidden states small (AR) and slowly changing (TAR).

    AR  = mean square of the hidden states h_t, after dropout
    TAR = mean square of the differences h_t - h_(t-1), before dropout

`activation_losses` returns both as parts of the loss of a window (the T steps that are computed at once), with the
weights of `RegularisationSettings`.

Shapes: B streams (rows of a batch), T steps, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.bounds import NonNegative
from reefknot.nn.encoders.contract import Encoded
from reefknot.nn.outputs.contract import LossPart


@dataclass(frozen=True)
class RegularisationSettings:
    """Weights of the penalties on activations. By default there are none.

    Args:
        activation: AR: weight of the mean square of the hidden states after dropout. AWD-LSTM uses 2.
        temporal_activation: TAR: weight of the mean square of the differences between successive hidden states.
            AWD-LSTM uses 1.
    """

    activation: NonNegative = 0.0
    temporal_activation: NonNegative = 0.0

    def __post_init__(self) -> None:
        for name, weight in vars(self).items():
            if not weight >= 0:
                raise SettingsError(f"regularisation: {name} = {weight}: must be 0 or greater")


def activation_losses(
    encoded: Encoded, settings: RegularisationSettings, mask_BT: Tensor | None = None, count: int = 0
) -> dict[str, LossPart]:
    """Return the penalties AR and TAR as named parts of the loss. A penalty with weight 0 is left out.

    Each sum is the mean square times the number of tokens of the window. A stream has one difference less than tokens,
    but both penalties use the number of tokens, so that all parts of a loss have the same divisor.

    Args:
        encoded: Hidden states of the window.
        settings: Weights of the penalties.
        mask_BT: For a window with padding, a mask with shape (B, T): True for tokens and False for padding.
        count: For a window with padding, the number of tokens without the padding.
    """
    loss_parts = {}
    if settings.activation:
        loss_parts["activation"] = _mean_square_part(encoded.output, encoded, mask_BT, count, settings.activation)
    if settings.temporal_activation:
        differences = encoded.raw.diff(dim=1)
        weight = settings.temporal_activation
        loss_parts["temporal_activation"] = _mean_square_part(differences, encoded, mask_BT, count, weight)
    return loss_parts


def _mean_square_part(
    values_BTD: Tensor, encoded: Encoded, mask_BT: Tensor | None, count: int, weight: float
) -> LossPart:
    """Return the mean square of the values, times the number of tokens of the window, as a part of the loss.

    The values are those of all T steps or, for differences, of the last T - 1 steps.
    """
    streams, steps = encoded.output.shape[:2]
    num_tokens = streams * steps
    if mask_BT is None:
        count = num_tokens
    else:
        # Padding is on the right, so a difference that ends at a token starts at a token.
        first_step = steps - values_BTD.shape[1]
        values_BTD = values_BTD * mask_BT[:, first_step:, None]

    dtype = torch.promote_types(values_BTD.dtype, torch.float32)
    mean_square = values_BTD.square().sum(dtype=dtype) / max(values_BTD.numel(), 1)
    return LossPart(num_tokens * mean_square, count, weight)
