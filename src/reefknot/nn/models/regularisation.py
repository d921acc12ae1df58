"""Penalties on activations (Merity et al. 2017): hidden states kept small (AR) and slow (TAR).

Shapes: B streams, T steps, D width, N = B x T places, M of them with a target.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from reefknot.lab.config.settings import NonNegative, Settings
from reefknot.nn.encoders.contract import Encoded
from reefknot.nn.outputs.contract import LossPart


class RegularisationSettings(Settings):
    """Left out, activations are free."""

    activation: Annotated[
        NonNegative, Field(description="AR: weight of the mean square of the hidden states after dropout; AWD-LSTM: 2")
    ] = 0.0
    temporal_activation: Annotated[
        NonNegative,
        Field(description="TAR: weight of the mean square of the steps between successive hidden states; AWD-LSTM: 1"),
    ] = 0.0


def activation_losses(
    encoded: Encoded, settings: RegularisationSettings, there_BT: Tensor | None = None, count: int = 0
) -> dict[str, LossPart]:
    """AR and TAR as named parts of the loss, where they have a weight: means of squares, times the window's tokens.

    A window has one step fewer than tokens; counting tokens for both lets all parts of a loss share one divisor. Where
    there is padding, `there_BT` tells the tokens from it, `count` of them: nothing else adds to the sums.
    """
    found = {}
    if settings.activation:
        found["activation"] = _part(encoded.output, encoded, there_BT, count, settings.activation)
    if settings.temporal_activation:
        steps = encoded.raw.diff(dim=1)
        found["temporal_activation"] = _part(steps, encoded, there_BT, count, settings.temporal_activation)
    return found


def _part(values_BTD: Tensor, encoded: Encoded, there_BT: Tensor | None, count: int, weight: float) -> LossPart:
    streams, steps = encoded.output.shape[:2]
    tokens = streams * steps
    if there_BT is not None:
        # Padding is at the right, so a step that ends in a token begins in one.
        values_BTD = values_BTD * there_BT[:, steps - values_BTD.shape[1] :, None]
    at_least = torch.promote_types(values_BTD.dtype, torch.float32)
    mean = values_BTD.square().sum(dtype=at_least) / max(values_BTD.numel(), 1)
    return LossPart(tokens * mean, tokens if there_BT is None else count, weight)
