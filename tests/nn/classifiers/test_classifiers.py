"""Plain and projected classifiers; properties that all classifiers share are tested in tests/contract."""

from __future__ import annotations

import pytest
import torch

from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

WORDS, DIM, CONTEXT_DIM = 11, 4, 6


def test_plain_class_vectors_are_the_table() -> None:
    table = WordTable(WORDS, DIM)
    classifier = Plain(table)
    assert classifier.weight() is table.weight
    assert classifier.context_dim == DIM
    assert classifier.penalties() == {}


@pytest.mark.parametrize("bias", [True, False])
def test_plain_bias_can_be_turned_off(bias: bool) -> None:
    table = WordTable(WORDS, DIM)
    classifier = Plain(table, bias=bias)
    added = sum(parameter.numel() for parameter in classifier.parameters()) - table.weight.numel()
    assert added == (WORDS if bias else 0)
    assert (classifier.bias is None) != bias
    hidden_ND = torch.randn(3, DIM)
    scores = hidden_ND @ table.weight.T + (classifier.bias if classifier.bias is not None else 0.0)
    torch.testing.assert_close(Softmax(classifier).log_probs(hidden_ND), torch.log_softmax(scores, -1))


def test_projection_maps_context_to_table_dimension() -> None:
    table = WordTable(WORDS, DIM)
    classifier = Projected(table, CONTEXT_DIM)
    output = Softmax(classifier)
    hidden_ND = torch.randn(3, CONTEXT_DIM)
    assert output.context_dim == CONTEXT_DIM
    projection = classifier.projection
    context = hidden_ND @ projection.weight.T + projection.bias
    torch.testing.assert_close(classifier.context(hidden_ND), context)
    assert classifier.bias is not None
    torch.testing.assert_close(
        output.log_probs(hidden_ND), torch.log_softmax(context @ table.weight.T + classifier.bias, -1)
    )


@pytest.mark.parametrize("projection_bias", [True, False])
def test_projection_adds_matrix_and_optional_bias(projection_bias: bool) -> None:
    classifier = Projected(WordTable(WORDS, DIM), CONTEXT_DIM, bias=False, projection_bias=projection_bias)
    added = sum(parameter.numel() for parameter in classifier.parameters()) - WORDS * DIM
    assert added == DIM * CONTEXT_DIM + (DIM if projection_bias else 0)


def test_penalty_is_half_lambda_times_squared_norm_without_bias() -> None:
    classifier = Projected(WordTable(WORDS, DIM), CONTEXT_DIM, penalty=0.15)
    with torch.no_grad():
        classifier.projection.weight.fill_(2.0)
        classifier.projection.bias.fill_(100.0)
    penalties = classifier.penalties()
    assert list(penalties) == ["projection"]
    assert penalties["projection"].item() == pytest.approx(0.15 / 2 * 4.0 * DIM * CONTEXT_DIM)
    penalties["projection"].backward()
    torch.testing.assert_close(classifier.projection.weight.grad, torch.full((DIM, CONTEXT_DIM), 0.15 * 2.0))
    assert classifier.projection.bias.grad is None


def test_zero_penalty_is_left_out() -> None:
    assert Projected(WordTable(WORDS, DIM), CONTEXT_DIM, penalty=0.0).penalties() == {}


def test_softmax_returns_penalties_of_its_classifier() -> None:
    classifier = Projected(WordTable(WORDS, DIM), CONTEXT_DIM)
    assert Softmax(classifier).penalties().keys() == classifier.penalties().keys()


def test_half_precision_log_probs_are_float32_and_sum_to_one() -> None:
    output = Softmax(Plain(WordTable(1_000, DIM))).bfloat16()
    log_probs_NV = output.log_probs(torch.randn(3, DIM).bfloat16())
    assert log_probs_NV.dtype == torch.float32
    torch.testing.assert_close(log_probs_NV.exp().sum(-1), torch.ones(3))


def test_new_table_has_rows_of_unit_expected_norm() -> None:
    torch.manual_seed(0)
    norms = WordTable(2_000, 50).weight.norm(dim=-1)
    assert norms.mean().item() == pytest.approx(1.0, abs=0.02)
