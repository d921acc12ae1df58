"""What labels promise to a normaliser: score(y | h) = weight()[y] . context(h) + bias[y]."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor, nn

from reefknot.parts import LABELS


class Labels(nn.Module):
    """One vector per class from a table, a map of the context, and the bias per class."""

    vocab_size: int
    context_dim: int
    """Width of the hidden states that `context` accepts."""
    bias: nn.Parameter | None

    def __init__(self, vocab_size: int, context_dim: int, bias: bool) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.context_dim = context_dim
        self.register_parameter("bias", nn.Parameter(torch.zeros(vocab_size)) if bias else None)

    def weight(self) -> Tensor:
        """w_VD: one vector per class."""
        raise NotImplementedError

    def context(self, h_ND: Tensor) -> Tensor:
        """The hidden state as the class vectors meet it. A matrix here costs N x D x D, on the weights V x D x D."""
        return h_ND

    def penalties(self) -> dict[str, Tensor]:
        """Penalties on the labels' own parameters, as sums (see `OutputEnd.penalties`)."""
        return {}


NestedLabels = Annotated[Labels, LABELS]
"""Labels in a normaliser's signature: in a recipe, a table of their own with a `kind`."""
