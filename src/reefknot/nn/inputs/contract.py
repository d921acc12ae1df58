"""The contract of input ends.

Shapes: B streams, T steps, V words, D dimensions.
"""

from __future__ import annotations

from torch import Tensor, nn

from reefknot.nn.part import PER_WEIGHT, Documented, matrix_weights
from reefknot.nn.tables import WordTable


class InputEnd(nn.Module, Documented):
    """Base class of input ends, which turn word ids into vectors."""

    vocab_size: int
    """Number of words, V."""
    dim: int
    """Dimension of the vectors, D."""
    waits: bool = False
    """Whether `forward` reads a value from the GPU. Such a call cannot be captured in a CUDA graph."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return one vector per token, x_BTD."""
        raise NotImplementedError

    def vectors(self) -> Tensor:
        """Return one vector per word, (V, D), as `forward` computes it in evaluation."""
        raise NotImplementedError

    def tables(self) -> list[WordTable]:
        """Return the tables that this end reads, band by band. An output end that holds one of them is tied to it."""
        return []

    def flops(self, ids_N: Tensor) -> int:
        """Return the floating-point operations of a training step on these tokens (see `nn/part.py`)."""
        return PER_WEIGHT * len(ids_N) * matrix_weights(self)
