"""The bilinear classifier (Gulordava et al. 2018; Pappas & Henderson 2019): a matrix U maps the hidden state.

    score(y | h) = e_y . (U h) + bias[y]
    score(y | h) = e_y . (U h + h) + bias[y]      with a residual connection

e_y is the row of class y in the word table.

Shapes: N rows (one row per token), D dimensions of the hidden state, C dimensions of the class vectors.
"""

from __future__ import annotations

from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Probability
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.drill import LabelDropout, uniform_linear
from reefknot.nn.tables import WordTable


class Bilinear(Classifier):
    """A classifier whose scores are dot products of a table's rows with U h, where U is a learned matrix.

    With the table E, the paper writes (E U) h. E (U h) gives the same scores without a second V x D matrix. Residual
    connections of the table and of the hidden state have the same effect: U + I instead of U. E U has no bias, because
    a bias b would add the same number, b . h, to all scores, which cancels in a softmax.

    Args:
        table: The word table whose rows are the class vectors.
        context_dim: Dimension of the hidden state.
        bias: Add a learned bias per class. Press & Wolf use one, Inan et al. do not.
        residual: Use U + I instead of U. The table and the hidden state must have the same dimension.
        dropout: Dropout rate of the table's dimensions. The same dimensions are dropped for all classes.
    """

    def __init__(
        self,
        table: WordTable,
        context_dim: int,
        bias: bool = True,
        residual: bool = False,
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__(table, context_dim, bias)
        if residual and table.dim != context_dim:
            raise SettingsError(
                f"bilinear classifier: residual needs equal dimensions, but the table has {table.dim} and the hidden "
                f"state {context_dim}; make them equal or leave the residual out"
            )
        self.residual = residual
        self.matrix = uniform_linear(context_dim, table.dim, bias=False)
        # The authors drop columns of E. Since (E * mask) U h = E (mask * U h), the context can be dropped instead.
        self.dropout = LabelDropout(dropout, variational=True)

    def context(self, hidden_ND: Tensor) -> Tensor:
        """Return U h, or U h + h with a residual, with shape (N, dimension of the table).

        Args:
            hidden_ND: Hidden states, with shape (N, context_dim).
        """
        context_NC: Tensor = self.dropout(self.matrix(hidden_ND))
        if self.residual:
            context_NC = context_NC + hidden_ND
        return context_NC
