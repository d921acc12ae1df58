"""Bilinear classifiers: e_y . U h, on the context.

Shapes: N rows, D width, V classes.
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

WIDTH, CONTEXT = 4, 6

Words = Callable[[int], WordTable]
Outcome = Callable[[Classifier], dict[str, Tensor]]


@pytest.mark.parametrize("residual", [False, True])
def test_the_identity_is_the_tied_softmax(words: Words, outcome: Outcome, residual: bool) -> None:
    classifier = Bilinear(words(WIDTH), WIDTH, residual=residual)
    with torch.no_grad():
        classifier.matrix.weight.copy_(torch.zeros(WIDTH, WIDTH) if residual else torch.eye(WIDTH))
    torch.testing.assert_close(outcome(classifier), outcome(Plain(words(WIDTH))))


def test_scores_are_the_bilinear_form_between_different_widths(words: Words) -> None:
    classifier = Bilinear(words(WIDTH), CONTEXT).double()
    h_ND = torch.randn(3, CONTEXT, dtype=torch.float64)
    u_DC = classifier.matrix.weight
    scores_NV = torch.einsum("vd,dc,nc->nv", classifier.table.weight, u_DC, h_ND)
    torch.testing.assert_close(Softmax(classifier).log_probs(h_ND), torch.log_softmax(scores_NV, -1))


def test_the_matrix_stays_on_the_context(words: Words) -> None:
    table = words(WIDTH)
    assert Bilinear(table, CONTEXT, dropout=0.5).weight() is table.weight


def test_the_matrix_is_all_it_adds_and_starts_small() -> None:
    torch.manual_seed(0)
    tied, bilinear = Plain(WordTable(7, 400)), Bilinear(WordTable(7, 400), 400)
    added = [sum(p.numel() for p in classifier.parameters()) for classifier in (bilinear, tied)]
    assert added[0] - added[1] == 160_000
    assert 0.0999 < bilinear.matrix.weight.abs().max().item() <= 0.1


@pytest.mark.parametrize("residual", [False, True])
def test_dropout_is_that_of_the_tables_columns(words: Words, monkeypatch: pytest.MonkeyPatch, residual: bool) -> None:
    mask_D = torch.tensor([0.0, 2.0, 2.0, 0.0], dtype=torch.float64)
    monkeypatch.setattr(F, "dropout", lambda x, p: x * mask_D)
    classifier = Bilinear(words(WIDTH), WIDTH, residual=residual, dropout=0.5).double()
    h_ND = torch.randn(3, WIDTH, dtype=torch.float64)
    e_VD = classifier.table.weight
    expected = h_ND @ ((e_VD * mask_D) @ classifier.matrix.weight + (e_VD if residual else 0.0)).T
    torch.testing.assert_close(classifier.context(h_ND) @ e_VD.T, expected)


def test_one_mask_for_all_rows_and_none_in_evaluation(words: Words, halving: list[tuple[int, ...]]) -> None:
    classifier = Bilinear(words(WIDTH), CONTEXT, dropout=0.5).double()
    h_ND = torch.randn(3, CONTEXT, dtype=torch.float64)
    classifier.context(h_ND)
    assert halving == [(WIDTH,)]
    torch.testing.assert_close(classifier.eval().context(h_ND), h_ND @ classifier.matrix.weight.T)
    assert len(halving) == 1


def test_impossible_settings_are_refused(words: Words) -> None:
    with pytest.raises(SettingsError, match="the table has 4 and the hidden state 6"):
        Bilinear(words(WIDTH), CONTEXT, residual=True)
    with pytest.raises(SettingsError, match=r"dropout = 1\.0: must be"):
        Bilinear(words(WIDTH), CONTEXT, dropout=1.0)
