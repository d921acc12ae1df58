"""Penalties on activations (Merity et al. 2017): hidden states kept small (AR) and slow (TAR).

Shapes: B streams, T steps, D width.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from reefknot.encoders.contract import Encoded
from reefknot.outputs.contract import LossPart
from reefknot.settings import NonNegative, Settings


class RegularisationSettings(Settings):
    """Left out, activations are free."""

    activation: Annotated[
        NonNegative, Field(description="AR: weight of the mean square of the hidden states after dropout; AWD-LSTM: 2")
    ] = 0.0
    temporal_activation: Annotated[
        NonNegative,
        Field(description="TAR: weight of the mean square of the steps between successive hidden states; AWD-LSTM: 1"),
    ] = 0.0


def activation_losses(encoded: Encoded, settings: RegularisationSettings) -> dict[str, LossPart]:
    """AR and TAR as named parts of the loss, where they have a weight: means of squares, times the window's tokens.

    A window has one step fewer than tokens; counting tokens for both lets all parts of a loss share one divisor.
    """
    found = {}
    if settings.activation:
        found["activation"] = _part(encoded.output, encoded, settings.activation)
    if settings.temporal_activation:
        found["temporal_activation"] = _part(encoded.raw.diff(dim=1), encoded, settings.temporal_activation)
    return found


def _part(values: Tensor, encoded: Encoded, weight: float) -> LossPart:
    tokens = encoded.output.shape[0] * encoded.output.shape[1]
    at_least = torch.promote_types(values.dtype, torch.float32)
    mean = values.square().sum(dtype=at_least) / max(values.numel(), 1)
    return LossPart(tokens * mean, tokens, weight)
