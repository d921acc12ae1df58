"""What every input end promises."""

from __future__ import annotations

from torch import Tensor, nn

from reefknot.nn.tables import WordTable


class InputEnd(nn.Module):
    """Ids to vectors."""

    vocab_size: int
    dim: int
    """Width of the vectors."""
    waits: bool = False
    """Whether its forward asks a GPU for a number, which a step that is captured must not."""

    def forward(self, ids_BT: Tensor) -> Tensor:
        """x_BTD: one vector per token."""
        raise NotImplementedError

    def vectors(self) -> Tensor:
        """One vector per word, for looking at."""
        raise NotImplementedError

    def tables(self) -> list[WordTable]:
        """The tables it reads, band by band: an output end that holds one of them is tied to this end."""
        return []
