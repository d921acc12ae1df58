"""Strict settings: the base class of everything a recipe can say, and the number types they share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Unknown keys, wrong types, NaN and infinities are errors; values never change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# The upper bounds are far above anything that trains; they turn a slip of the keyboard into a sentence.
Count = Annotated[int, Field(ge=1, le=10**9)]
Dim = Annotated[int, Field(ge=1, le=65_536)]
Layers = Annotated[int, Field(ge=1, le=256)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e9)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e9)]
