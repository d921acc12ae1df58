"""Projection regularisation (Press & Wolf 2017, section 3): a matrix P between the hidden state and the classes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import NonNegative
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.plain import Bias
from reefknot.nn.tables import NamedTable


class Projected(Classifier):
    """Rows of a table, against P h + p, with a penalty on P.

    The penalty is (lambda/2) ||P||_F^2, added to the *sum* of the losses of a step, then divided with it; the bias p is
    not penalised. This is what the authors' code does. With 20 streams, 20 steps and lambda 0.15 ||P||^2 weighs
    3.8e-3 beside a loss summed over steps and averaged over streams, 1.9e-4 beside a loss averaged over tokens.
    P also joins a table and an encoder of different widths; a penalty of 0 leaves it a plain projection.
    """

    def __init__(
        self,
        table: NamedTable,
        context_dim: int,
        bias: Bias = True,
        penalty: Annotated[NonNegative, Field(description="lambda in (lambda/2) ||P||^2; the paper has 0.15")] = 0.15,
        projection_bias: Annotated[
            bool, Field(description="a bias in the projection: in the authors' code, not in the paper")
        ] = True,
    ) -> None:
        super().__init__(table, context_dim, bias)
        if penalty < 0:
            raise SettingsError(f"projected: penalty = {penalty}: must be 0 or more")
        self.penalty = penalty
        self.projection = nn.Linear(context_dim, table.dim, bias=projection_bias)

    def context(self, h_ND: Tensor) -> Tensor:
        projected: Tensor = self.projection(h_ND)
        return projected

    def penalties(self) -> dict[str, Tensor]:
        if self.penalty == 0:
            return {}
        return {"projection": 0.5 * self.penalty * self.projection.weight.square().sum()}
