"""The dual nonlinear classifier (Pappas et al. 2018; Pappas & Henderson 2019): classes and context meet in a joint
space.

    score(y | h) = (act(e_y U + u) [+ e_y]) . (act(V h + v) [+ h]) + bias[y]

Shapes: N rows (tokens), V classes, D width of the table or of the hidden state, J width of the joint space.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Dim, Probability
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.drill import Activation, LabelDropout, Variational, activation_named, uniform_linear
from reefknot.nn.classifiers.plain import Bias
from reefknot.nn.tables import NamedTable


class Dual(Classifier):
    """Rows of a table and the hidden state, each through a nonlinear layer into a joint space.

    Dropout acts on the table before its matrix; what the residuals add is never dropped, and the context is left to the
    encoder's own dropout, as in the authors' code.
    """

    def __init__(
        self,
        table: NamedTable,
        context_dim: int,
        joint_dim: Annotated[Dim | None, Field(description="width of the joint space; left out: the table's")] = None,
        bias: Bias = True,
        activation: Activation = "sigmoid",
        residual_to_table: Annotated[
            bool, Field(description="add the table to its layer; needs a joint space as wide as the table")
        ] = False,
        residual_to_context: Annotated[
            bool, Field(description="add the hidden state to its layer; needs a joint space as wide as the encoder")
        ] = False,
        dropout: Annotated[Probability, Field(description="drop rate of the table before its matrix")] = 0.0,
        variational: Variational = True,
    ) -> None:
        if joint_dim is not None and joint_dim < 1:
            raise SettingsError(f"dual classifier: joint_dim = {joint_dim}: must be at least 1")
        super().__init__(table, context_dim, bias, joint_dim)
        if residual_to_table:
            self._check_residual("residual_to_table", "the table", table.dim)
        if residual_to_context:
            self._check_residual("residual_to_context", "the hidden state", context_dim)
        self.residual_to_table = residual_to_table
        self.residual_to_context = residual_to_context
        self.label_layer = uniform_linear(table.dim, self.dim, bias=True)
        self.context_layer = uniform_linear(context_dim, self.dim, bias=True)
        self.activation = activation_named(activation)
        self.dropout = LabelDropout(dropout, variational)

    def _check_residual(self, setting: str, what: str, width: int) -> None:
        if width != self.dim:
            raise SettingsError(
                f"dual classifier: {setting} needs equal widths, but {what} has {width} and the joint space "
                f"{self.dim}; set joint_dim = {width} or leave the residual out"
            )

    def encode(self, ids: Tensor | None = None) -> Tensor:
        e_VD = self.table.vectors(ids)
        joint_VJ: Tensor = self.activation(self.label_layer(self.dropout(e_VD)))
        return joint_VJ + e_VD if self.residual_to_table else joint_VJ

    def context(self, h_ND: Tensor) -> Tensor:
        joint_NJ: Tensor = self.activation(self.context_layer(h_ND))
        return joint_NJ + h_ND if self.residual_to_context else joint_NJ
