"""What a classifier promises to a normaliser: score(y | h) = weight()[y] . context(h) + bias[y]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TypeVar

import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import CLASSIFIERS, KEPT_IN_BANDS, NOTHING_TO_TIE
from reefknot.nn.classifiers.held import Held
from reefknot.nn.tables import BandedTable, WordTable

H = TypeVar("H", bound=Held)


class Classifier(nn.Module):
    """One vector per class from a table, a map of the context, and the bias per class."""

    vocab_size: int
    context_dim: int
    """Width of the hidden states that `context` accepts."""
    dim: int
    """Width of the class vectors, and of what `context` gives."""
    bias: nn.Parameter | None
    _held: Held | None = None

    def __init__(self, table: WordTable, context_dim: int, bias: bool, dim: int | None = None) -> None:
        """`dim` only where the class vectors are not as wide as the table's."""
        super().__init__()
        if not isinstance(table, WordTable):
            raise SettingsError(KEPT_IN_BANDS if isinstance(table, BandedTable) else NOTHING_TO_TIE)
        self.table = table
        self.vocab_size = table.vocab_size
        self.context_dim = context_dim
        self.dim = dim or table.dim
        self.register_parameter("bias", nn.Parameter(torch.zeros(table.vocab_size)) if bias else None)

    def weight(self, ids: Tensor | None = None) -> Tensor:
        """The vectors of these classes, or of all: w_VD. Those of all are computed once while they are held."""
        return self.encode(ids) if ids is not None or self._held is None else self._held.weight(self.encode)

    def encode(self, ids: Tensor | None = None) -> Tensor:
        """Compute what `weight` gives: a classifier that changes the table's vectors overrides this."""
        return self.table.vectors(ids)

    @contextmanager
    def holding(self, held: H) -> Iterator[H]:
        """The vectors of all classes come from `held` until the context leaves."""
        before, self._held = self._held, held
        try:
            yield held
        finally:
            self._held = before

    def context(self, h_ND: Tensor) -> Tensor:
        """The hidden state as the class vectors meet it. A matrix here costs N x D x D, on the weights V x D x D."""
        return h_ND

    def penalties(self) -> dict[str, Tensor]:
        """Penalties on the classifier's own parameters, as sums (see `OutputEnd.penalties`)."""
        return {}


NestedClassifier = Annotated[Classifier, CLASSIFIERS]
"""A classifier in a normaliser's signature: in a recipe, a table of its own with a `kind`."""
