"""Adaptive input (Baevski & Auli 2019, section 3): frequent words have wide vectors, rare words narrow ones.

Shapes: B streams, T steps, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.inputs.lookup import Dropout, Scale, check_scale_and_dropout
from reefknot.nn.tables import NamedBands, NamedProjections, WordTable, check_banded


class AdaptiveLookup(InputEnd):
    """Rows of a banded table, each band brought to one width by its own matrix.

    The first band has a matrix too, as in the paper, even where it is as wide as the model. In this order: the row, its
    projection, the scale, dropout.
    """

    def __init__(
        self,
        table: NamedBands,
        projections: NamedProjections,
        scale: Scale = 1.0,
        dropout: Dropout = 0.0,
    ) -> None:
        super().__init__()
        check_scale_and_dropout("adaptive lookup", scale, dropout)
        check_banded(table, "adaptive lookup")
        widths = tuple(band.dim for band in table.tables)
        if projections.widths != widths:
            raise SettingsError(
                f"adaptive lookup: the projections read bands of the widths {list(projections.widths)} but the table "
                f"has {list(widths)}; make them from this table"
            )
        if not projections.head:
            raise SettingsError(
                "adaptive lookup: the first band is projected too, but these projections have no matrix for it; "
                "set head = true in them, or give the input end projections of its own"
            )
        self.table = table
        self.projections = projections
        self.vocab_size = table.vocab_size
        self.dim = projections.dim
        self.scale = scale
        self.dropout = dropout

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.scale * self.table.by_band(ids_BT, self._projected)
        return F.dropout(x_BTD, self.dropout, self.training)

    def vectors(self) -> Tensor:
        return self.scale * torch.cat([self._projected(band) for band in range(len(self.table.sizes))])

    def tables(self) -> list[WordTable]:
        return self.table.tables

    def _projected(self, band: int, words: Tensor | None = None) -> Tensor:
        """Vectors of these words of a band, or of all. Without words the result is empty, but has a gradient."""
        return self.projections.up(band, self.table.tables[band].vectors(words))
