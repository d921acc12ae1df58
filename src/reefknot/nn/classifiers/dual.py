"""The dual nonlinear classifier (Pappas et al. 2018; Pappas & Henderson 2019): a joint space of classes and contexts.

Class vectors and hidden states each pass through one nonlinear layer. The score is the dot product of the results:

    class y       l_y = act(e_y U + u) [+ e_y]      e_y is the row of class y in the word table
    context       c = act(V h + v) [+ h]            h is the hidden state
    score(y | h) = l_y . c + bias[y]

The terms in brackets are optional residual connections.

Shapes: N rows (one row per token), V classes, D dimensions of the table or of the hidden state, J dimensions of the
joint space.
"""

from __future__ import annotations

from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.bounds import Dim, Probability
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.drill import Activation, LabelDropout, build_activation, uniform_linear
from reefknot.nn.part import FLOPS_PER_WEIGHT, count_matrix_weights
from reefknot.nn.tables import WordTable


class Dual(Classifier):
    """A classifier that maps class vectors and hidden states to a joint space, by a nonlinear layer each.

    Scores are dot products in the joint space. As in the authors' code, dropout acts on the table before its layer.
    Residual connections bypass the dropout, and the hidden state has only the dropout of the encoder.

    Args:
        table: The word table from which the class vectors are made.
        context_dim: Dimension of the hidden state.
        joint_dim: Dimension of the joint space. The default is that of the table.
        bias: Add a learned bias per class. Press & Wolf use one, Inan et al. do not.
        activation: Activation of both layers. The paper uses sigmoid on Penn Treebank and relu on WikiText-2.
        residual_to_table: Add the table to the output of its layer. Both must have the same dimension.
        residual_to_context: Add the hidden state to the output of its layer. Both must have the same dimension.
        dropout: Dropout rate of the table before its layer.
        variational: Drop the same dimensions for all classes. If false, each class has a dropout mask of its own.
    """

    label_modules = ("label_layer",)

    def __init__(
        self,
        table: WordTable,
        context_dim: int,
        joint_dim: Dim | None = None,
        bias: bool = True,
        activation: Activation = "sigmoid",
        residual_to_table: bool = False,
        residual_to_context: bool = False,
        dropout: Probability = 0.0,
        variational: bool = True,
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
        self.activation = build_activation(activation)
        self.dropout = LabelDropout(dropout, variational)

    def encode(self, ids: Tensor | None = None) -> Tensor:
        """Map the vectors of some or all classes to the joint space. The result has shape (*ids.shape, J) or (V, J).

        Args:
            ids: Class ids, with any shape. By default all classes.
        """
        embeddings_VD = self.table.vectors(ids)
        joint_VJ: Tensor = self.activation(self.label_layer(self.dropout(embeddings_VD)))
        if self.residual_to_table:
            joint_VJ = joint_VJ + embeddings_VD
        return joint_VJ

    def context(self, hidden_ND: Tensor) -> Tensor:
        """Map the hidden states to the joint space. The result has shape (N, J).

        Args:
            hidden_ND: Hidden states, with shape (N, context_dim).
        """
        joint_NJ: Tensor = self.activation(self.context_layer(hidden_ND))
        if self.residual_to_context:
            joint_NJ = joint_NJ + hidden_ND
        return joint_NJ

    def flops(self, rows: int, classes: int | None = None) -> int:
        # One layer runs once per row, the other once per class.
        if classes is None:
            classes = self.vocab_size
        row_products = rows * (count_matrix_weights(self.context_layer) + self.dim * classes)
        class_products = classes * count_matrix_weights(self.label_layer)
        return FLOPS_PER_WEIGHT * (row_products + class_products)

    def _check_residual(self, setting: str, added: str, added_dim: int) -> None:
        """Raise an error if `added`, which a residual connection adds, does not have the joint space's dimension."""
        if added_dim != self.dim:
            raise SettingsError(
                f"dual classifier: {setting} needs equal dimensions, but {added} has {added_dim} and the joint space "
                f"{self.dim}; set joint_dim = {added_dim} or leave the residual out"
            )
