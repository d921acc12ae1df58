"""How parameters start, where a paper says so for the whole model, or for its word tables, at once."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from reefknot.settings import Positive, Settings
from reefknot.tables import WordTable


class InitialisationSettings(Settings):
    """Left out, every part starts its own way."""

    uniform: Annotated[
        Positive | None,
        Field(description="draw every parameter, biases too, from [-uniform, uniform] (Zaremba, Inan, Press)"),
    ] = None
    tables: Annotated[
        Positive | None,
        Field(description="draw the word tables alone, at either end, from [-tables, tables] (AWD-LSTM: 0.1)"),
    ] = None


def initialise(model: nn.Module, settings: InitialisationSettings) -> None:
    """Draw the parameters, then the tables where they have a range of their own. A shared tensor is drawn once."""
    with torch.no_grad():
        if settings.uniform is not None:
            for parameter in model.parameters():
                parameter.uniform_(-settings.uniform, settings.uniform)
        if settings.tables is not None:
            for module in model.modules():
                if isinstance(module, WordTable):
                    module.weight.uniform_(-settings.tables, settings.tables)
