"""What is learned per word. Two ends that hold the same table object are tied; there is no flag for it."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from reefknot.registry import Shared
from reefknot.settings import Dim


class WordTable(nn.Module):
    """One vector of the same width for every word of the vocabulary."""

    def __init__(self, vocab_size: int, dim: Annotated[Dim, Field(description="width of a word's vector")]) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.dim = dim
        # Rows of unit expected norm: a tied classifier then starts with logits of the size of the context.
        self.weight = nn.Parameter(torch.empty(vocab_size, dim).normal_(std=dim**-0.5))

    def vectors(self) -> Tensor:
        return self.weight

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.dim}"


NamedTable = Annotated[WordTable, Shared("tables")]
"""A table in a constructor's signature: in a recipe, the name of an entry of [tables]."""
