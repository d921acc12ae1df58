"""Projection regularisation (Press & Wolf 2017, section 3): a penalised matrix P maps the hidden state.

    score(y | h) = e_y . (P h + p) + bias[y]
    penalty = (lambda / 2) ||P||_F^2

e_y is the row of class y in the word table. P also connects a table and an encoder of different dimensions.

Shapes: N rows (one row per token), D dimensions of the hidden state, C dimensions of the class vectors.
"""

from __future__ import annotations

from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.bounds import NonNegative
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.tables import WordTable


class Projected(Classifier):
    """A classifier that projects the hidden state: scores are dot products of a table's rows with P h + p.

    P is penalised by (lambda/2) ||P||_F^2 (projection regularisation). With a penalty of 0 it is a plain projection. As
    in the authors' code, the bias p is not penalised, and the penalty is added to the *sum* of the losses of a step,
    which is then divided. For batches of 20 streams (rows) of 20 steps and lambda = 0.15, ||P||^2 has the weight 3.8e-3
    relative to a loss summed over steps and averaged over streams, and 1.9e-4 relative to a loss averaged over tokens.

    Args:
        table: The word table whose rows are the class vectors.
        context_dim: Dimension of the hidden state.
        bias: Add a learned bias per class. Press & Wolf use one, Inan et al. do not.
        penalty: Lambda in (lambda/2) ||P||_F^2. The paper uses 0.15.
        projection_bias: Add the bias p. It is in the authors' code but not in the paper.
    """

    def __init__(
        self,
        table: WordTable,
        context_dim: int,
        bias: bool = True,
        penalty: NonNegative = 0.15,
        projection_bias: bool = True,
    ) -> None:
        super().__init__(table, context_dim, bias)
        if penalty < 0:
            raise SettingsError(f"projected: penalty = {penalty}: must be 0 or greater")
        self.penalty = penalty
        self.projection = nn.Linear(context_dim, table.dim, bias=projection_bias)

    def context(self, hidden_ND: Tensor) -> Tensor:
        """Return P h + p, with shape (N, dimension of the table).

        Args:
            hidden_ND: Hidden states, with shape (N, context_dim).
        """
        context_NC: Tensor = self.projection(hidden_ND)
        return context_NC

    def penalties(self) -> dict[str, Tensor]:
        """Return the penalty on P under the name `projection`, or an empty dictionary if its weight is 0."""
        if self.penalty == 0:
            return {}
        squared_norm = self.projection.weight.square().sum()
        return {"projection": 0.5 * self.penalty * squared_norm}
