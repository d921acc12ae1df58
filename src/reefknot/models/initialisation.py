"""How parameters start, where a paper says so for the whole model, or for its word tables, at once."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from torch import nn

from reefknot.inputs.contract import InputEnd
from reefknot.outputs.adaptive import AdaptiveSoftmax
from reefknot.settings import Positive, Settings
from reefknot.tables import BandProjections, WordTable


def _as_one(raw: object, check: ValidatorFunctionWrapHandler) -> object:
    """One complaint where a number and a word would each have theirs."""
    try:
        return check(raw)
    except ValidationError:
        raise ValueError("must be a number greater than 0, or 'normal'") from None


class InitialisationSettings(Settings):
    """Left out, every part starts its own way."""

    uniform: Annotated[
        Positive | None,
        Field(description="draw every parameter, biases too, from [-uniform, uniform] (Zaremba, Inan, Press)"),
    ] = None
    tables: Annotated[
        Positive | Literal["normal"] | None,
        Field(
            description="draw the word tables alone, at either end, from [-tables, tables] (AWD-LSTM: 0.1), or normal: "
            "with the deviation width^-0.5; Xavier-uniform the matrices and clusters of bands, and the tables that an "
            "adaptive softmax does not share with the input (Baevski)"
        ),
        WrapValidator(_as_one),
    ] = None


def initialise(model: nn.Module, settings: InitialisationSettings) -> None:
    """Draw the parameters, then the tables where they have a start of their own. A shared tensor is drawn once."""
    with torch.no_grad():
        if settings.uniform is not None:
            for parameter in model.parameters():
                parameter.uniform_(-settings.uniform, settings.uniform)
        untied = _untied(model)
        for module in model.modules():
            if settings.tables == "normal":
                _normal_tables(module, untied)
            elif settings.tables is not None and isinstance(module, WordTable):
                module.weight.uniform_(-settings.tables, settings.tables)


def _untied(model: nn.Module) -> set[WordTable]:
    """The bands of an adaptive softmax that no input end reads."""
    ends = list(model.modules())
    read = {table for end in ends if isinstance(end, InputEnd) for table in end.tables()}
    return {table for end in ends if isinstance(end, AdaptiveSoftmax) for table in end.tables()} - read


def _normal_tables(module: nn.Module, untied: set[WordTable]) -> None:
    """The start of a table, or of what stands between its bands and the model, in the program of Baevski & Auli. There
    an adaptive softmax is made of linear layers, and only takes over an input end's tables as they are."""
    if isinstance(module, WordTable):
        if module in untied:
            nn.init.xavier_uniform_(module.weight)
        else:
            module.weight.normal_(std=module.dim**-0.5)
    elif isinstance(module, BandProjections):
        for matrix in module.bands:
            nn.init.xavier_uniform_(matrix)
    elif isinstance(module, AdaptiveSoftmax) and module.clusters is not None:
        nn.init.xavier_uniform_(module.clusters)
