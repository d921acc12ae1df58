"""Optimisers: torch's own, with the settings that the papers state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from reefknot.settings import NonNegative, Positive, Probability

LearningRate = Annotated[Positive, Field(description="rate of the first epoch; the schedule multiplies it")]


def sgd(
    parameters: Iterable[nn.Parameter],
    learning_rate: LearningRate,
    momentum: Annotated[Probability, Field(description="0 in the recurrent papers")] = 0.0,
    weight_decay: Annotated[NonNegative, Field(description="added to the gradient as weight_decay * p")] = 0.0,
) -> torch.optim.Optimizer:
    """Stochastic gradient descent."""
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)
