"""A word goes in as its row of a table.

Word dropout is that of Gal & Ghahramani (2016), as Pappas & Henderson (2019) and the AWD-LSTM use it: a word *type* is
absent, or not, for a whole step.

Shapes: B streams, T steps, V words, D width.
"""

from __future__ import annotations

from typing import Annotated

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Dim, Positive, Probability, check_rates
from reefknot.nn.inputs.contract import InputEnd
from reefknot.nn.tables import AnyTable, BandedTable, WordTable, projection

Scale = Annotated[Positive, Field(description="multiplies every vector; often the root of the model's width")]
Dropout = Annotated[Probability, Field(description="drop rate on the numbers of the vectors, after everything else")]


def check_scale_and_dropout(who: str, scale: float, dropout: float) -> None:
    """What a recipe's annotations check, for a call from Python."""
    if not scale > 0.0:
        raise SettingsError(f"{who}: scale = {scale}: must be more than 0")
    check_rates(who, dropout=dropout)


class Lookup(InputEnd):
    """Rows of a word table, or of a banded one whose bands have one width.

    In this order: the row, word dropout, the scale, the projection, dropout. Word dropout acts on the rows that were
    looked up, never on the table, so an output end that holds the same table does not see it. Vectors of unit length
    are an option of the table (`unit_norm`), because there the tied end and the augmented loss see the same vectors.
    """

    def __init__(
        self,
        table: AnyTable,
        scale: Scale = 1.0,
        dropout: Dropout = 0.0,
        word_dropout: Annotated[
            Probability, Field(description="share of the word types that are dropped, whole, for a step")
        ] = 0.0,
        project_to: Annotated[
            Dim | None, Field(description="width after a matrix without a bias; left out, that of the table")
        ] = None,
    ) -> None:
        super().__init__()
        check_scale_and_dropout("lookup", scale, dropout)
        check_rates("lookup", word_dropout=word_dropout)
        if project_to is not None and project_to < 1:
            raise SettingsError(f"lookup: project_to = {project_to}: must be at least 1, or left out")
        if not isinstance(table, WordTable | BandedTable):
            raise SettingsError(f"lookup: needs a table to read rows of; a {type(table).__name__} is none")
        if isinstance(table, BandedTable):
            table.check_one_width()
        self.table = table
        self.vocab_size = table.vocab_size
        self.dim = project_to or table.dim
        self.scale = scale
        self.dropout = dropout
        self.word_dropout = word_dropout
        self.projection: nn.Module = nn.Identity()
        if project_to is not None:
            self.projection = projection(table.dim, project_to)

    def forward(self, ids_BT: Tensor) -> Tensor:
        rows_BTD = self.table.vectors(ids_BT)
        if self.training and self.word_dropout > 0.0:
            kept = 1.0 - self.word_dropout
            weight_V1 = rows_BTD.new_empty(self.vocab_size, 1).bernoulli_(kept).div_(kept)
            rows_BTD = rows_BTD * F.embedding(ids_BT, weight_V1)
        return F.dropout(self._finished(rows_BTD), self.dropout, self.training)

    def vectors(self) -> Tensor:
        return self._finished(self.table.vectors())

    def tables(self) -> list[WordTable]:
        return self.table.tables if isinstance(self.table, BandedTable) else [self.table]

    def _finished(self, rows: Tensor) -> Tensor:
        finished: Tensor = self.projection(self.scale * rows)
        return finished
