"""The interface of input ends: the first stage of a language model, which turns word ids into vectors.

    vectors_BTD = input_end(ids_BT)

`lookup.py` is the simplest implementation: it looks up the rows of a word table (the matrix of embeddings).

Shapes: B streams (rows of a batch), T steps, N tokens, V words, D dimensions.
"""

from __future__ import annotations

from torch import Tensor, nn

from reefknot.nn.part import FLOPS_PER_WEIGHT, InheritsDocstrings, count_matrix_weights
from reefknot.nn.tables import WordTable


class InputEnd(nn.Module, InheritsDocstrings):
    """Base class of input ends, which turn word ids into vectors."""

    vocab_size: int
    """Number of words, V."""
    dim: int
    """Dimension of the vectors, D."""
    synchronizes: bool = False
    """Whether `forward` reads a value from the GPU. Such a call cannot be captured in a CUDA graph."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return one vector per token, with shape (B, T, D).

        Args:
            ids_BT: Token ids, with shape (B, T).
        """
        raise NotImplementedError

    def vectors(self) -> Tensor:
        """Return one vector per word, with shape (V, D), as `forward` computes it in evaluation mode."""
        raise NotImplementedError

    def tables(self) -> list[WordTable]:
        """Return the word tables that this end reads. An output end that holds one of them is tied to this end.

        A table in bands (groups of words of similar frequency) is returned band by band.
        """
        return []

    def flops(self, ids_N: Tensor) -> int:
        """Return the number of floating-point operations of a training step on these tokens (see `nn/part.py`).

        Args:
            ids_N: Token ids, with shape (N,).
        """
        return FLOPS_PER_WEIGHT * len(ids_N) * count_matrix_weights(self)
