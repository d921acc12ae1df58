"""The bilinear classifier scores class y as e_y . U h and applies U to the context.

Shapes: N rows, C context dimensions, D table dimensions, V classes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.nn.classifiers.bilinear import Bilinear
from reefknot.nn.classifiers.contract import Classifier
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

DIM, CONTEXT_DIM = 4, 6

MakeTable = Callable[[int], WordTable]
LossAndGradients = Callable[[Classifier], dict[str, Tensor]]


@pytest.mark.parametrize("residual", [False, True])
def test_identity_matrix_equals_tied_softmax(
    make_table: MakeTable, loss_and_gradients: LossAndGradients, residual: bool
) -> None:
    classifier = Bilinear(make_table(DIM), DIM, residual=residual)
    with torch.no_grad():
        classifier.matrix.weight.copy_(torch.zeros(DIM, DIM) if residual else torch.eye(DIM))
    torch.testing.assert_close(loss_and_gradients(classifier), loss_and_gradients(Plain(make_table(DIM))))


def test_scores_equal_bilinear_form_for_different_dimensions(make_table: MakeTable) -> None:
    classifier = Bilinear(make_table(DIM), CONTEXT_DIM).double()
    hidden_ND = torch.randn(3, CONTEXT_DIM, dtype=torch.float64)
    u_DC = classifier.matrix.weight
    scores_NV = torch.einsum("vd,dc,nc->nv", classifier.table.weight, u_DC, hidden_ND)
    torch.testing.assert_close(Softmax(classifier).log_probs(hidden_ND), torch.log_softmax(scores_NV, -1))


def test_class_vectors_are_the_table_itself(make_table: MakeTable) -> None:
    table = make_table(DIM)
    assert Bilinear(table, CONTEXT_DIM, dropout=0.5).weight() is table.weight


def test_adds_only_the_matrix_and_draws_small_values() -> None:
    torch.manual_seed(0)
    tied, bilinear = Plain(WordTable(7, 400)), Bilinear(WordTable(7, 400), 400)
    counts = [sum(parameter.numel() for parameter in classifier.parameters()) for classifier in (bilinear, tied)]
    assert counts[0] - counts[1] == 160_000
    assert 0.0999 < bilinear.matrix.weight.abs().max().item() <= 0.1


@pytest.mark.parametrize("residual", [False, True])
def test_dropout_acts_on_columns_of_the_table(
    make_table: MakeTable, monkeypatch: pytest.MonkeyPatch, residual: bool
) -> None:
    mask_D = torch.tensor([0.0, 2.0, 2.0, 0.0], dtype=torch.float64)
    monkeypatch.setattr(F, "dropout", lambda x, p: x * mask_D)
    classifier = Bilinear(make_table(DIM), DIM, residual=residual, dropout=0.5).double()
    hidden_ND = torch.randn(3, DIM, dtype=torch.float64)
    table_VD = classifier.table.weight
    expected = hidden_ND @ ((table_VD * mask_D) @ classifier.matrix.weight + (table_VD if residual else 0.0)).T
    torch.testing.assert_close(classifier.context(hidden_ND) @ table_VD.T, expected)


def test_dropout_mask_is_shared_by_rows_and_off_in_evaluation(
    make_table: MakeTable, halved_mask_shapes: list[tuple[int, ...]]
) -> None:
    classifier = Bilinear(make_table(DIM), CONTEXT_DIM, dropout=0.5).double()
    hidden_ND = torch.randn(3, CONTEXT_DIM, dtype=torch.float64)
    classifier.context(hidden_ND)
    assert halved_mask_shapes == [(DIM,)]
    torch.testing.assert_close(classifier.eval().context(hidden_ND), hidden_ND @ classifier.matrix.weight.T)
    assert len(halved_mask_shapes) == 1


def test_invalid_settings_are_rejected(make_table: MakeTable) -> None:
    with pytest.raises(SettingsError, match="the table has 4 and the hidden state 6"):
        Bilinear(make_table(DIM), CONTEXT_DIM, residual=True)
    with pytest.raises(SettingsError, match=r"dropout = 1\.0: must be"):
        Bilinear(make_table(DIM), CONTEXT_DIM, dropout=1.0)
