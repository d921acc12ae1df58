"""How parameters start, where a paper says so for the whole model at once."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from reefknot.settings import Positive, Settings


class InitialisationSettings(Settings):
    """Left out, every part starts its own way."""

    uniform: Annotated[
        Positive | None,
        Field(description="draw every parameter, biases too, from [-uniform, uniform] (Zaremba, Inan, Press)"),
    ] = None


def initialise(model: nn.Module, settings: InitialisationSettings) -> None:
    """Draw the parameters. A shared tensor is drawn once."""
    if settings.uniform is None:
        return
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-settings.uniform, settings.uniform)
