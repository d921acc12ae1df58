"""The bilinear classifier (Gulordava et al. 2018; Pappas & Henderson 2019): a matrix between classes and context.

    score(y | h) = e_y . U h + bias[y],   with a residual e_y . (U h + h) + bias[y]

Shapes: N rows (tokens), D width: the hidden state's before U, the table's after it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Probability
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.drill import LabelDropout, uniform_linear
from reefknot.nn.classifiers.plain import Bias
from reefknot.nn.tables import NamedTable


class Bilinear(Classifier):
    """Rows of a table, against U h.

    The paper writes (E U) h; E (U h) is the same score without a second V x D matrix. A residual to the table and one
    to the hidden state are the same thing here, U + I. A bias beside U on the side of the classes would add b . h to
    all of them alike, which cancels in a softmax over them: there is none.
    """

    def __init__(
        self,
        table: NamedTable,
        context_dim: int,
        bias: Bias = True,
        residual: Annotated[
            bool, Field(description="U + I in place of U; needs a table as wide as the encoder")
        ] = False,
        dropout: Annotated[
            Probability, Field(description="drop rate of the table's dimensions, the same ones for all classes")
        ] = 0.0,
    ) -> None:
        super().__init__(table, context_dim, bias)
        if residual and table.dim != context_dim:
            raise SettingsError(
                f"bilinear classifier: residual needs equal widths, but the table has {table.dim} and the hidden state "
                f"{context_dim}; make them equal or leave the residual out"
            )
        self.residual = residual
        self.matrix = uniform_linear(context_dim, table.dim, bias=False)
        # The authors drop columns of E before its matrix. (E * mask) U h = E (mask * U h): the context can be dropped.
        self.dropout = LabelDropout(dropout, variational=True)

    def context(self, h_ND: Tensor) -> Tensor:
        mapped_ND: Tensor = self.dropout(self.matrix(h_ND))
        return mapped_ND + h_ND if self.residual else mapped_ND
