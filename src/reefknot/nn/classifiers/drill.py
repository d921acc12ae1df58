"""DRILL, a deep residual label encoder (Pappas & Henderson 2019): class vectors by a network over the table.

    E^(0) = E,   E^(i) = act(E^(i-1) U^(i) + u^(i)) [+ E^(i-1), from i = 2 on] + E
    score(y | h) = E^(k)[y] . h + bias[y]

The bilinear classifier is its single linear layer, the dual one has such a layer on either side; they share the pieces
below.

Shapes: V classes, D width of the table and of the hidden state.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import Positive, Probability, check_rates
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.plain import Bias
from reefknot.nn.tables import NamedTable

INIT = 0.1
"""The authors draw every matrix of a label network from [-0.1, 0.1]; biases keep torch's own range."""

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "linear": nn.Identity,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "relu": nn.ReLU,
}

Activation = Annotated[
    Literal["linear", "tanh", "sigmoid", "relu"],
    Field(description="what follows the matrix: the paper has sigmoid on Penn Treebank, relu on WikiText-2"),
]
Variational = Annotated[
    bool,
    Field(description="drop the same dimensions of all classes; false: every class and dimension on its own"),
]
Position = Literal["input", "output"]


def activation_named(name: str) -> nn.Module:
    """The activation of a label network."""
    if name not in _ACTIVATIONS:
        raise SettingsError(f"classifier: activation = {name!r}: must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]()


def uniform_linear(input_dim: int, dim: int, bias: bool, init: float = INIT) -> nn.Linear:
    """A linear map of a label network. Acting on rows, it computes E U with U the transpose of its weight."""
    if not 0.0 < init < math.inf:
        raise SettingsError(f"classifier: init = {init}: must be positive and finite")
    layer = nn.Linear(input_dim, dim, bias=bias)
    nn.init.uniform_(layer.weight, -init, init)
    return layer


class LabelDropout(nn.Module):
    """Dropout of class vectors: one mask over the dimensions for all (variational) or one for each (standard)."""

    def __init__(self, rate: float, variational: bool) -> None:
        super().__init__()
        check_rates("classifier", dropout=rate)
        self.rate = rate
        self.variational = variational

    def forward(self, e_VD: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return e_VD
        if self.variational:
            return e_VD * F.dropout(e_VD.new_ones(e_VD.shape[-1]), self.rate)
        return F.dropout(e_VD, self.rate)

    def extra_repr(self) -> str:
        return f"{self.rate}, variational={self.variational}"


class Drill(Classifier):
    """Rows of a table through a deep residual network: DRILL.

    The table is added outside the activation, at every layer. Depth 0 is the table itself. Dropout on the `input` of a
    layer, as in the authors' code, acts on the table before the first layer too and never on what leaves the last; on
    the `output`, as in Eq. 12, it acts on what each activation gives. What the residuals add is never dropped.
    """

    def __init__(
        self,
        table: NamedTable,
        depth: Annotated[int, Field(ge=0, le=64, description="layers of the label network; 0: the plain table")] = 4,
        activation: Activation = "sigmoid",
        bias: Bias = True,
        residual: Annotated[bool, Field(description="add the table after every layer")] = True,
        layer_residual: Annotated[
            bool,
            Field(description="from the second layer on, add what went into the layer too; not in the main results"),
        ] = False,
        layer_bias: Annotated[bool, Field(description="a bias in every layer")] = True,
        dropout: Annotated[Probability, Field(description="drop rate in the label network; the paper has 0.6")] = 0.0,
        variational: Variational = True,
        dropout_position: Annotated[
            Position, Field(description="of every layer: input as in the authors' code, output as in Eq. 12")
        ] = "input",
        init: Annotated[Positive, Field(description="draw the matrices from [-init, init]")] = INIT,
    ) -> None:
        super().__init__(table, table.dim, bias)
        if depth < 0:
            raise SettingsError(f"DRILL: depth = {depth}: must be at least 0")
        if dropout_position not in get_args(Position):
            raise SettingsError(f"DRILL: dropout_position = {dropout_position!r}: must be input or output")
        self.residual = residual
        self.layer_residual = layer_residual
        self.layers = nn.ModuleList(uniform_linear(table.dim, table.dim, layer_bias, init) for _ in range(depth))
        self.activation = activation_named(activation)
        self.dropout = LabelDropout(dropout, variational)
        self.dropout_position = dropout_position

    def encode(self, ids: Tensor | None = None) -> Tensor:
        table_VD = e_VD = self.table.vectors(ids)
        for number, layer in enumerate(self.layers, start=1):
            if self.dropout_position == "input":
                out_VD = self.activation(layer(self.dropout(e_VD)))
            else:
                out_VD = self.dropout(self.activation(layer(e_VD)))
            if self.layer_residual and number > 1:
                out_VD = out_VD + e_VD
            e_VD = out_VD + table_VD if self.residual else out_VD
        return e_VD
