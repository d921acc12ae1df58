"""Adaptive ends for transformers models, whose token ids are not sorted by frequency.

    table = EmbeddingBands(model.get_input_embeddings(), token_counts, sizes=[2_000, 8_000])
    end = AdaptiveSoftmax(table, BandProjections(table, dim, head=False))

The classes of an adaptive softmax are ranks: class 0 is the most frequent token. `TokenOrder` translates token ids to
ranks. `EmbeddingBands` is a banded table whose vectors are rows of the embedding of the model, in the order of ranks.
An end with this table is tied to the embedding.

Shapes: V tokens, D dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import ArgumentError, describe_type
from reefknot.nn.bounds import Count
from reefknot.nn.tables import BandedTable, EmbeddingTable, compute_bounds


class TokenOrder(nn.Module):
    """The order of tokens by frequency. A model saves it once, as the buffer `ranks`.

    Args:
        vocab_size: Number of tokens, V. Until `ranks` is set, the ids are the ranks.
    """

    ranks: Tensor
    """The rank of each token, with shape (V,)."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("ranks", torch.arange(vocab_size))

    @classmethod
    def from_counts(cls, token_counts: Tensor, vocab_size: int) -> TokenOrder:
        """Return the order of tokens by decreasing count. Tokens with equal counts stay in the order of their ids.

        Args:
            token_counts: The number of occurrences of each token in a text, with shape (V,).
            vocab_size: Number of tokens, V.
        """
        if not isinstance(token_counts, Tensor) or token_counts.shape != (vocab_size,):
            shape = tuple(token_counts.shape) if isinstance(token_counts, Tensor) else type(token_counts).__name__
            raise ArgumentError(
                f"token_counts is {shape}; it must be a tensor with one count per token, ({vocab_size},)"
            )
        is_count = token_counts.isfinite() & (token_counts >= 0)
        if not is_count.all():
            token = int(is_count.int().argmin())
            raise ArgumentError(
                f"token_counts: the count of token {token} is {token_counts[token].item()}; counts must be numbers of "
                "at least 0"
            )
        order = cls(vocab_size)
        ids_by_rank = token_counts.detach().cpu().argsort(descending=True, stable=True)
        order.ranks[ids_by_rank] = torch.arange(vocab_size)
        return order

    def ids_by_rank(self) -> Tensor:
        """Return the id of each rank, with shape (V,)."""
        ids = torch.empty_like(self.ranks)
        return ids.scatter_(0, self.ranks, torch.arange(len(ids), device=ids.device))

    def to_ranks(self, targets: Tensor) -> Tensor:
        """Return the ranks of tokens. Numbers that are not token ids, such as -100, stay as they are.

        Args:
            targets: Token ids, with any shape.
        """
        last_id = len(self.ranks) - 1
        is_token = (targets >= 0) & (targets <= last_id)
        return torch.where(is_token, self.ranks[targets.clamp(0, last_id)], targets)

    def to_ids(self, log_probs: Tensor) -> Tensor:
        """Return log-probabilities in the order of token ids.

        Args:
            log_probs: Log-probabilities in the order of ranks, with shape (..., V).
        """
        return log_probs.index_select(-1, self.ranks)


class EmbeddingBands(BandedTable):
    """A banded table whose bands are rows of a model's embedding. All bands have the dimension of the embedding.

    Args:
        embedding: The input embedding of the model.
        token_counts: The number of occurrences of each token in a text, with shape (V,). A `TokenOrder` is shared.
        sizes: Number of words of every band except the last, which has all remaining words.
        cutoffs: Instead of `sizes`: the first ranks of the second and later bands.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        token_counts: Tensor | TokenOrder | None,
        sizes: Sequence[Count] | None = None,
        cutoffs: Sequence[Count] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if not isinstance(embedding, nn.Embedding):
            raise ArgumentError(
                f"EmbeddingBands: embedding is {describe_type(embedding)}; pass the input embedding of the model, "
                "model.get_input_embeddings()"
            )
        self.vocab_size, self.dim = embedding.weight.shape
        self.factor = 1
        self.bounds = compute_bounds(self.vocab_size, sizes, cutoffs)
        order = token_counts
        if not isinstance(order, TokenOrder):
            order = TokenOrder.from_counts(order, self.vocab_size)  # type: ignore[arg-type]
        self.bands = nn.ModuleList(
            EmbeddingBand(embedding, order, first_rank, end_rank) for first_rank, end_rank in pairwise(self.bounds)
        )

    @property
    def order(self) -> TokenOrder:
        """The order of the tokens by frequency."""
        return cast(EmbeddingBand, self.bands[0]).order


class EmbeddingBand(EmbeddingTable):
    """The rows of an embedding that belong to one band.

    Args:
        embedding: The input embedding of the model.
        order: The order of the tokens by frequency.
        first_rank: Rank of the first word of the band.
        end_rank: Rank of the last word of the band plus one.
    """

    order: TokenOrder
    """The order of the tokens by frequency."""

    def __init__(self, embedding: nn.Embedding, order: TokenOrder, first_rank: int, end_rank: int) -> None:
        super().__init__(embedding)
        self.vocab_size = end_rank - first_rank
        self.first_rank = first_rank
        # The model owns the order. It is not registered here, so that it is saved once.
        object.__setattr__(self, "order", order)

    def vectors(self, ids: Tensor | None = None) -> Tensor:
        """Return the vectors of some or all words of the band.

        Args:
            ids: Word ids, counted from the first rank of the band, with any shape. By default all words.
        """
        rows = self.order.ids_by_rank()[self.first_rank : self.first_rank + self.vocab_size]
        return F.embedding(rows if ids is None else rows[ids], self.weight)
