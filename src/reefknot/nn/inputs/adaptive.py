"""Adaptive input embeddings (Baevski & Auli 2019, section 3): the vectors of rare words have fewer dimensions.

    table = BandedTable(267_744, 1024, sizes=[20_000, 40_000])
    input = AdaptiveLookup(table, BandProjections(table, 1024))
    vectors_BTD = input(ids_BT)

The table is cut into bands: groups of words of similar frequency. `AdaptiveLookup` looks up every word in its band, and
projects its vector to the dimension of the model. `nn/outputs/adaptive.py` is the output counterpart.

Shapes: B streams (rows of a batch), T steps, V words, D dimensions of the model, N tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Positive, Probability
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.inputs.lookup import check_scale_and_dropout
from reefknot.nn.part import FLOPS_PER_WEIGHT, count_by_band
from reefknot.nn.tables import BandedTable, BandProjections, WordTable, check_banded


class AdaptiveLookup(InputEnd):
    """An input end that looks up the rows of a banded table and projects each band to the dimension of the model.

    As in the paper, the first band is projected even if it has the dimension of the model. The order of operations is:
    row, projection, scale, dropout.

    Args:
        table: The banded table to look words up in.
        projections: The matrices of the bands, including the first. An adaptive softmax may share them.
        scale: Factor of every vector, often the square root of the model's dimension.
        dropout: Dropout rate of the elements of the resulting vectors.
    """

    def __init__(
        self,
        table: BandedTable,
        projections: BandProjections,
        scale: Positive = 1.0,
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__()
        check_scale_and_dropout("adaptive lookup", scale, dropout)
        check_banded(table, "adaptive lookup")
        table_dims = tuple(band.dim for band in table.tables)
        if projections.band_dims != table_dims:
            raise SettingsError(
                f"adaptive lookup: the projections read bands of the dimensions {list(projections.band_dims)} but the "
                f"table has {list(table_dims)}; make them from this table"
            )
        if not projections.has_head:
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
        vectors_BTD = self.scale * self.table.compute_by_band(ids_BT, self._project_band)
        return F.dropout(vectors_BTD, self.dropout, self.training)

    def vectors(self) -> Tensor:
        """Return one vector per word, (V, D), projected and scaled."""
        num_bands = len(self.table.sizes)
        vectors_VD = torch.cat([self._project_band(band) for band in range(num_bands)])
        return self.scale * vectors_VD

    def tables(self) -> list[WordTable]:
        """Return the bands of the table. An output end that uses one of them is tied to this input end."""
        return self.table.tables

    def flops(self, ids_N: Tensor) -> int:
        # Each vector is multiplied by the matrix of its band.
        counts = count_by_band(ids_N, self.table.bounds)
        products = 0
        for count, band_dim in zip(counts, self.projections.band_dims, strict=True):
            products += count * band_dim * self.dim
        return FLOPS_PER_WEIGHT * products

    def _project_band(self, band: int, band_ids: Tensor | None = None) -> Tensor:
        """Return the projected vectors of some or all words of a band.

        If `band_ids` is empty, the result still has a gradient function, so that every parameter takes part in the
        backward pass.

        Args:
            band: Index of the band, from 0.
            band_ids: Ids counted from the first id of the band. By default all words of the band.
        """
        band_vectors = self.table.tables[band].vectors(band_ids)
        return self.projections.to_model_dim(band, band_vectors)
