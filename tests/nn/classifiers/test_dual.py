"""Dual nonlinear classifiers: act(E U + u) . act(V h + v), compared with the formula in numpy.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reefknot.errors import SettingsError
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.dual import Dual
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

DIM, CONTEXT_DIM = 4, 6

ACTIVATIONS: dict[Any, Callable[[Any], Any]] = {
    "linear": lambda x: x,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
}

MakeTable = Callable[[int], WordTable]
LossAndGradients = Callable[[Classifier], dict[str, Tensor]]


def matrix_and_bias(layer: nn.Linear) -> tuple[Any, Any]:
    """Return the matrix that multiplies a row from the right, and the bias, as numpy arrays."""
    return layer.weight.detach().numpy().T, layer.bias.detach().numpy()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("residuals", [(False, False), (True, False), (False, True), (True, True)])
def test_scores_equal_the_formula_in_numpy(
    make_table: MakeTable, activation: Any, residuals: tuple[bool, bool]
) -> None:
    to_table, to_context = residuals
    joint = DIM if to_table else 5
    context = joint if to_context else CONTEXT_DIM
    classifier = Dual(make_table(DIM), context, joint, True, activation, to_table, to_context).double()
    hidden_ND = np.random.default_rng(0).normal(size=(3, context))
    table_VD = classifier.table.weight.detach().numpy()
    activate = ACTIVATIONS[activation]
    label_matrix, label_bias = matrix_and_bias(classifier.label_layer)
    context_matrix, context_bias = matrix_and_bias(classifier.context_layer)
    classes = activate(table_VD @ label_matrix + label_bias) + (table_VD if to_table else 0)
    contexts = activate(hidden_ND @ context_matrix + context_bias) + (hidden_ND if to_context else 0)
    np.testing.assert_allclose(classifier.weight().detach().numpy(), classes, rtol=1e-12)
    np.testing.assert_allclose(classifier.context(torch.tensor(hidden_ND)).detach().numpy(), contexts, rtol=1e-12)
    log_probs_NV = torch.log_softmax(torch.tensor(contexts @ classes.T), -1)
    torch.testing.assert_close(Softmax(classifier).log_probs(torch.tensor(hidden_ND)).detach(), log_probs_NV)
    assert classifier.dim == joint


def test_identity_layers_equal_tied_softmax(make_table: MakeTable, loss_and_gradients: LossAndGradients) -> None:
    classifier = Dual(make_table(DIM), DIM, activation="linear")
    with torch.no_grad():
        for layer in (classifier.label_layer, classifier.context_layer):
            layer.weight.copy_(torch.eye(DIM))
            layer.bias.zero_()
    torch.testing.assert_close(loss_and_gradients(classifier), loss_and_gradients(Plain(make_table(DIM))))


def test_vectors_of_a_class_subset_equal_rows_of_all(make_table: MakeTable) -> None:
    classifier = Dual(make_table(DIM), CONTEXT_DIM, joint_dim=5).double()
    ids = torch.tensor([7, 0, 7])
    torch.testing.assert_close(classifier.weight(ids), classifier.weight()[ids])


def test_adds_only_two_layers_and_draws_small_values() -> None:
    torch.manual_seed(0)
    tied, dual = Plain(WordTable(7, 400)), Dual(WordTable(7, 400), 400)
    counts = [sum(parameter.numel() for parameter in classifier.parameters()) for classifier in (dual, tied)]
    assert counts[0] - counts[1] == 2 * (400 * 400 + 400)
    for layer in (dual.label_layer, dual.context_layer):
        assert 0.0999 < layer.weight.abs().max().item() <= 0.1
        assert layer.bias.abs().max().item() <= 400**-0.5


@pytest.mark.parametrize(("variational", "mask_shape"), [(True, (DIM,)), (False, (11, DIM))])
def test_dropout_acts_on_the_table_before_its_layer(
    make_table: MakeTable, halved_mask_shapes: list[tuple[int, ...]], variational: bool, mask_shape: tuple[int, ...]
) -> None:
    classifier = Dual(
        make_table(DIM), CONTEXT_DIM, activation="tanh", residual_to_table=True, dropout=0.5, variational=variational
    ).double()
    table_VD = classifier.table.weight
    classifier.context(torch.randn(3, CONTEXT_DIM, dtype=torch.float64))
    assert halved_mask_shapes == []
    torch.testing.assert_close(classifier.weight(), torch.tanh(classifier.label_layer(0.5 * table_VD)) + table_VD)
    assert halved_mask_shapes == [mask_shape]
    torch.testing.assert_close(classifier.eval().weight(), torch.tanh(classifier.label_layer(table_VD)) + table_VD)
    assert len(halved_mask_shapes) == 1


def test_invalid_settings_are_rejected(make_table: MakeTable) -> None:
    table = make_table(DIM)
    with pytest.raises(SettingsError, match=r"the table has 4 and the joint space 6; set joint_dim = 4"):
        Dual(table, CONTEXT_DIM, joint_dim=6, residual_to_table=True)
    with pytest.raises(SettingsError, match=r"the hidden state has 6 and the joint space 4; set joint_dim = 6"):
        Dual(table, CONTEXT_DIM, residual_to_context=True)
    with pytest.raises(SettingsError, match="joint_dim = 0: must be at least 1"):
        Dual(table, CONTEXT_DIM, joint_dim=0)
    with pytest.raises(SettingsError, match="activation = 'swish': must be one of linear, tanh, sigmoid, relu"):
        Dual(table, CONTEXT_DIM, activation="swish")  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=r"dropout = -0\.1: must be"):
        Dual(table, CONTEXT_DIM, dropout=-0.1)
