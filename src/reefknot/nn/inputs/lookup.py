"""Embedding lookup: the input end (first stage, word ids to vectors) of most language models.

    vectors_BTD = Lookup(WordTable(10_000, 200))(ids_BT)

`Lookup` looks up the rows of a word table.

Shapes: B streams (rows of a batch), T steps, V words, D dimensions.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError, describe_type
from reefknot.nn.bounds import Dim, Positive, Probability, check_rates
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.tables import BandedTable, WordTable, build_projection, hint_for_torch_layer

WordDropoutBy = Literal["type", "stream", "token"]


class Lookup(InputEnd):
    """An input end that looks up the rows of a table. The bands of a banded table must have the same dimension.

    The order of operations is: row, word dropout, scale, projection, dropout. Word dropout drops a word at all its
    positions or at none: in the whole batch (AWD-LSTM; Pappas & Henderson 2019) or in a stream (Gal & Ghahramani 2016).
    The code of Press & Wolf (2017) drops single tokens, because it compares words in a way that never finds equal ones.
    Word dropout acts on the rows that are looked up and not on the table, so an output end with the same table is not
    affected. The option to scale vectors to unit length belongs to the table (`unit_norm`), not to `Lookup`, so that a
    tied output end and the augmented loss see the same vectors.

    Args:
        table: The table to look words up in.
        scale: Factor by which every vector is multiplied, often the square root of the model's dimension.
        dropout: Dropout rate of the elements of the resulting vectors.
        word_dropout: Share of the word types whose vectors are dropped, drawn again for every training step.
        project_to: Map the vectors to this dimension, by a matrix without bias. By default they are not mapped.
        word_dropout_by: What word dropout draws: word types of the whole batch (`type`), word types of each stream
            (`stream`), or single tokens (`token`).
    """

    def __init__(
        self,
        table: WordTable | BandedTable,
        scale: Positive = 1.0,
        dropout: Probability = 0.0,
        word_dropout: Probability = 0.0,
        project_to: Dim | None = None,
        word_dropout_by: WordDropoutBy = "type",
    ) -> None:
        super().__init__()
        check_scale_and_dropout("lookup", scale, dropout)
        check_rates("lookup", word_dropout=word_dropout)
        if word_dropout_by not in get_args(WordDropoutBy):
            raise SettingsError(f"lookup: word_dropout_by = {word_dropout_by!r}: must be type, stream or token")
        if project_to is not None and project_to < 1:
            raise SettingsError(f"lookup: project_to = {project_to}: must be at least 1, or left out")
        if not isinstance(table, WordTable | BandedTable):
            raise SettingsError(
                f"lookup: needs a table to look words up in; {describe_type(table)} is not one"
                f"{hint_for_torch_layer(table)}"
            )
        if isinstance(table, BandedTable):
            table.check_equal_dims()
        self.table = table
        self.vocab_size = table.vocab_size
        self.dim = project_to or table.dim
        self.scale = scale
        self.dropout = dropout
        self.word_dropout = word_dropout
        self.word_dropout_by = word_dropout_by
        self.projection: nn.Module = nn.Identity()
        if project_to is not None:
            self.projection = build_projection(table.dim, project_to)

    def forward(self, ids_BT: Tensor) -> Tensor:
        rows_BTD = self.table.vectors(ids_BT)
        if self.training and self.word_dropout > 0.0:
            rows_BTD = rows_BTD * self._sample_word_mask(ids_BT, rows_BTD)
        vectors_BTD = self._scale_and_project(rows_BTD)
        return F.dropout(vectors_BTD, self.dropout, self.training)

    def vectors(self) -> Tensor:
        """Return one vector per word, (V, D), scaled and projected."""
        return self._scale_and_project(self.table.vectors())

    def tables(self) -> list[WordTable]:
        """Return the table, or the bands of a banded table.

        An output end that uses one of these tables is tied to this input end.
        """
        if isinstance(self.table, BandedTable):
            return self.table.tables
        return [self.table]

    def _sample_word_mask(self, ids_BT: Tensor, rows_BTD: Tensor) -> Tensor:
        """Return the mask of word dropout, one number per token, with shape (B, T, 1)."""
        keep_rate = 1.0 - self.word_dropout

        def sample(*shape: int) -> Tensor:
            return rows_BTD.new_empty(shape).bernoulli_(keep_rate).div_(keep_rate)

        if self.word_dropout_by == "type":
            return F.embedding(ids_BT, sample(self.vocab_size, 1))
        if self.word_dropout_by == "stream":
            mask_BV = sample(len(ids_BT), self.vocab_size)
            return torch.gather(mask_BV, 1, ids_BT.long())[..., None]
        return sample(*ids_BT.shape, 1)

    def _scale_and_project(self, rows: Tensor) -> Tensor:
        projected: Tensor = self.projection(self.scale * rows)
        return projected


def check_scale_and_dropout(module: str, scale: float, dropout: float) -> None:
    """Raise a `SettingsError` unless the scale is positive and the dropout rate is in [0, 1). It names `module`."""
    if not scale > 0.0:
        raise SettingsError(f"{module}: scale = {scale}: must be greater than 0")
    check_rates(module, dropout=dropout)
