"""A word goes in as its row of a table."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from reefknot.inputs.contract import InputEnd
from reefknot.tables import NamedTable


class Lookup(InputEnd):
    """Rows of a word table."""

    def __init__(self, table: NamedTable) -> None:
        super().__init__()
        self.table = table
        self.vocab_size = table.vocab_size
        self.dim = table.dim

    def forward(self, ids_BT: Tensor) -> Tensor:
        return F.embedding(ids_BT, self.table.weight)

    def vectors(self) -> Tensor:
        return self.table.vectors()
