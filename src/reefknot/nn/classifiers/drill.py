"""DRILL (Pappas & Henderson 2019): a deep residual network over the word table computes the class vectors.

    E_0 = E                                               the word table
    E_i = act(E_(i-1) U_i + u_i) [+ E_(i-1)] + E          layer i; the term in brackets is optional, from i = 2 on
    score(y | h) = E_k[y] . h + bias[y]                   k is the number of layers

Start reading at `Drill.encode`. The bilinear classifier (`bilinear.py`) and the dual classifier (`dual.py`) use the
helpers at the end of the file.

Shapes: V classes, D dimensions of the table and of the hidden state.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Ge, Le, Positive, Probability, check_rates
from reefknot.nn.classifiers.contract import Classifier, check_word_table
from reefknot.nn.part import FLOPS_PER_WEIGHT, count_matrix_weights
from reefknot.nn.tables import WordTable

INIT_RANGE = 0.1
"""The authors draw the initial matrices of every label encoder (the network that computes class vectors) from [-0.1,
0.1]. Biases have torch's range."""

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "linear": nn.Identity,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "relu": nn.ReLU,
}

Activation = Literal["linear", "tanh", "sigmoid", "relu"]
Depth = Annotated[int, Ge(0), Le(64)]
DropoutPosition = Literal["input", "output"]


class Drill(Classifier):
    """A classifier whose class vectors are computed from a table by a deep residual network (DRILL).

    The table is added after the activation of every layer. With depth 0 the class vectors are the rows of the table.
    Residual connections bypass the dropout.

    Args:
        table: The word table from which the class vectors are made. The hidden state must have the same dimension.
        depth: Number of layers. With 0, this is the plain classifier.
        activation: Activation of every layer. The paper uses sigmoid on Penn Treebank and relu on WikiText-2.
        bias: Add a learned bias per class. Press & Wolf use one, Inan et al. do not.
        residual: Add the table to the output of every layer.
        layer_residual: From the second layer on, also add the input of the layer. Not used in the paper's main results.
        layer_bias: Add a bias in every layer.
        dropout: Dropout rate in every layer. The paper uses 0.6.
        variational: Drop the same dimensions for all classes. If false, each class has a dropout mask of its own.
        dropout_position: Drop the input of every layer, including the table in the first, as in the authors' code, or
            the output of every activation, as in Eq. 12.
        init: Draw the initial matrices from [-init, init].
    """

    label_modules = ("layers",)

    def __init__(
        self,
        table: WordTable,
        depth: Depth = 4,
        activation: Activation = "sigmoid",
        bias: bool = True,
        residual: bool = True,
        layer_residual: bool = False,
        layer_bias: bool = True,
        dropout: Probability = 0.0,
        variational: bool = True,
        dropout_position: DropoutPosition = "input",
        init: Positive = INIT_RANGE,
    ) -> None:
        check_word_table(type(self).__name__, table)
        super().__init__(table, table.dim, bias)
        if depth < 0:
            raise SettingsError(f"DRILL: depth = {depth}: must be at least 0")
        if dropout_position not in get_args(DropoutPosition):
            raise SettingsError(f"DRILL: dropout_position = {dropout_position!r}: must be input or output")
        self.residual = residual
        self.layer_residual = layer_residual
        self.layers = nn.ModuleList(uniform_linear(table.dim, table.dim, layer_bias, init) for _ in range(depth))
        self.activation = build_activation(activation)
        self.dropout = LabelDropout(dropout, variational)
        self.dropout_position = dropout_position

    def encode(self, ids: Tensor | None = None) -> Tensor:
        """Compute the vectors of some classes, (*ids.shape, D), or of all classes, (V, D), with the label encoder.

        Args:
            ids: Class ids, with any shape. By default all classes.
        """
        table_VD = self.table.vectors(ids)
        vectors_VD = table_VD
        for index, layer in enumerate(self.layers):
            if self.dropout_position == "input":
                output_VD = self.activation(layer(self.dropout(vectors_VD)))
            else:
                output_VD = self.dropout(self.activation(layer(vectors_VD)))
            if self.layer_residual and index > 0:
                output_VD = output_VD + vectors_VD
            if self.residual:
                output_VD = output_VD + table_VD
            vectors_VD = output_VD
        return vectors_VD

    def flops(self, rows: int, classes: int | None = None) -> int:
        # The label encoder runs once per class.
        if classes is None:
            classes = self.vocab_size
        score_products = rows * self.dim * classes
        label_encoder_products = classes * count_matrix_weights(self)
        return FLOPS_PER_WEIGHT * (score_products + label_encoder_products)


# -- helpers that other classifiers share --------------------------------------------------------------------------


def build_activation(name: str) -> nn.Module:
    """Return the activation with this name as a module."""
    if name not in _ACTIVATIONS:
        raise SettingsError(f"classifier: activation = {name!r}: must be one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]()


def uniform_linear(input_dim: int, dim: int, bias: bool, init: float = INIT_RANGE) -> nn.Linear:
    """Return a linear layer with weights from [-init, init]. It maps rows E to E U, so its weight is U transposed."""
    if not 0.0 < init < math.inf:
        raise SettingsError(f"classifier: init = {init}: must be positive and finite")
    layer = nn.Linear(input_dim, dim, bias=bias)
    nn.init.uniform_(layer.weight, -init, init)
    return layer


class LabelDropout(nn.Module):
    """Dropout of class vectors, with the same mask for all classes (variational) or a mask per class (standard).

    Args:
        rate: Dropout rate.
        variational: Drop the same dimensions for all classes.
    """

    def __init__(self, rate: float, variational: bool) -> None:
        super().__init__()
        check_rates("classifier", dropout=rate)
        self.rate = rate
        self.variational = variational

    def forward(self, vectors_VD: Tensor) -> Tensor:
        """Return the class vectors, with dropout in training mode."""
        if not self.training or self.rate == 0:
            return vectors_VD
        if self.variational:
            mask_D = F.dropout(vectors_VD.new_ones(vectors_VD.shape[-1]), self.rate)
            return vectors_VD * mask_D
        return F.dropout(vectors_VD, self.rate)

    def extra_repr(self) -> str:
        """Return the arguments that `print(model)` shows."""
        return f"{self.rate}, variational={self.variational}"
