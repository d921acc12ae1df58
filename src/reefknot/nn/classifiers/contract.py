"""The contract of classifiers: score(y | h) = weight()[y] . context(h) + bias[y].

Shapes: N rows (tokens), V classes, D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.classifiers.weight_cache import WeightCache
from reefknot.nn.docstrings import Documented
from reefknot.nn.flops import PER_WEIGHT, matrix_weights
from reefknot.nn.messages import KEPT_IN_BANDS, NOTHING_TO_TIE
from reefknot.nn.tables import BandedTable, WordTable

C = TypeVar("C", bound=WeightCache)


class Classifier(nn.Module, Documented):
    """Base class of classifiers: class vectors from a table, a map of the hidden state, and a bias per class.

    Args:
        table: The word table from which the class vectors are made.
        context_dim: Dimension of the hidden states that `context` reads.
        bias: Add a learned bias per class.
        dim: Dimension of the class vectors, if it is not that of the table.
    """

    vocab_size: int
    """Number of classes, V."""
    context_dim: int
    """Dimension of the hidden states that `context` reads."""
    dim: int
    """Dimension of the class vectors and of the output of `context`."""
    bias: nn.Parameter | None
    """One number per class, or None."""
    _cache: WeightCache | None = None

    def __init__(self, table: WordTable, context_dim: int, bias: bool, dim: int | None = None) -> None:
        super().__init__()
        if not isinstance(table, WordTable):
            raise SettingsError(KEPT_IN_BANDS if isinstance(table, BandedTable) else NOTHING_TO_TIE)
        self.table = table
        self.vocab_size = table.vocab_size
        self.context_dim = context_dim
        self.dim = dim or table.dim
        self.register_parameter("bias", nn.Parameter(torch.zeros(table.vocab_size)) if bias else None)

    def weight(self, ids: Tensor | None = None) -> Tensor:
        """Return the vectors of these classes, (*ids.shape, D), or of all classes, w_VD.

        While the classifier has a cache, the vectors of all classes come from it.
        """
        return self.encode(ids) if ids is not None or self._cache is None else self._cache.weight(self.encode)

    def encode(self, ids: Tensor | None = None) -> Tensor:
        """Compute what `weight` returns. A classifier that transforms the vectors of the table overrides this."""
        return self.table.vectors(ids)

    @contextmanager
    def caching(self, cache: C) -> Iterator[C]:
        """Take the vectors of all classes from `cache` inside the context."""
        previous, self._cache = self._cache, cache
        try:
            yield cache
        finally:
            self._cache = previous

    def context(self, h_ND: Tensor) -> Tensor:
        """Map the hidden states to the space of the class vectors.

        A matrix costs N x D x D operations here, and V x D x D if `encode` applies it to the class vectors.
        """
        return h_ND

    def flops(self, rows: int, classes: int | None = None) -> int:
        """Return the floating-point operations of a training step (see `nn/flops.py`).

        Args:
            rows: Number of hidden states, N.
            classes: Number of classes to score; by default all.
        """
        classes = self.vocab_size if classes is None else classes
        return PER_WEIGHT * rows * (matrix_weights(self) + self.dim * classes)

    def penalties(self) -> dict[str, Tensor]:
        """Return named penalties on the parameters of the classifier, as sums (see `OutputEnd.penalties`)."""
        return {}
