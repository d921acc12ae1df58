"""What is particular to each kind of classifiers; what all of them promise is in tests/contract."""

from __future__ import annotations

import pytest
import torch

from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

WORDS, WIDTH, CONTEXT = 11, 4, 6


def test_plain_labels_are_the_table() -> None:
    table = WordTable(WORDS, WIDTH)
    classifier = Plain(table)
    assert classifier.weight() is table.weight
    assert classifier.context_dim == WIDTH
    assert classifier.penalties() == {}


@pytest.mark.parametrize("bias", [True, False])
def test_the_bias_is_a_switch(bias: bool) -> None:
    table = WordTable(WORDS, WIDTH)
    classifier = Plain(table, bias=bias)
    own = sum(p.numel() for p in classifier.parameters()) - table.weight.numel()
    assert own == (WORDS if bias else 0)
    assert (classifier.bias is None) != bias
    h_ND = torch.randn(3, WIDTH)
    scores = h_ND @ table.weight.T + (classifier.bias if classifier.bias is not None else 0.0)
    torch.testing.assert_close(Softmax(classifier).log_probs(h_ND), torch.log_softmax(scores, -1))


def test_projection_joins_different_widths() -> None:
    table = WordTable(WORDS, WIDTH)
    classifier = Projected(table, CONTEXT)
    output = Softmax(classifier)
    h_ND = torch.randn(3, CONTEXT)
    assert output.context_dim == CONTEXT
    p = classifier.projection
    context = h_ND @ p.weight.T + p.bias
    torch.testing.assert_close(classifier.context(h_ND), context)
    assert classifier.bias is not None
    torch.testing.assert_close(
        output.log_probs(h_ND), torch.log_softmax(context @ table.weight.T + classifier.bias, -1)
    )


@pytest.mark.parametrize("projection_bias", [True, False])
def test_projection_counts_its_matrix(projection_bias: bool) -> None:
    classifier = Projected(WordTable(WORDS, WIDTH), CONTEXT, bias=False, projection_bias=projection_bias)
    own = sum(p.numel() for p in classifier.parameters()) - WORDS * WIDTH
    assert own == WIDTH * CONTEXT + (WIDTH if projection_bias else 0)


def test_penalty_is_half_lambda_times_the_square_and_leaves_the_bias_alone() -> None:
    classifier = Projected(WordTable(WORDS, WIDTH), CONTEXT, penalty=0.15)
    with torch.no_grad():
        classifier.projection.weight.fill_(2.0)
        classifier.projection.bias.fill_(100.0)
    penalties = classifier.penalties()
    assert list(penalties) == ["projection"]
    assert penalties["projection"].item() == pytest.approx(0.15 / 2 * 4.0 * WIDTH * CONTEXT)
    penalties["projection"].backward()
    torch.testing.assert_close(classifier.projection.weight.grad, torch.full((WIDTH, CONTEXT), 0.15 * 2.0))
    assert classifier.projection.bias.grad is None


def test_a_penalty_of_zero_is_no_penalty() -> None:
    assert Projected(WordTable(WORDS, WIDTH), CONTEXT, penalty=0.0).penalties() == {}


def test_a_softmax_passes_the_penalties_on() -> None:
    classifier = Projected(WordTable(WORDS, WIDTH), CONTEXT)
    assert Softmax(classifier).penalties().keys() == classifier.penalties().keys()


def test_half_precision_log_probs_are_float32_and_sum_to_one() -> None:
    output = Softmax(Plain(WordTable(1_000, WIDTH))).bfloat16()
    logp_NV = output.log_probs(torch.randn(3, WIDTH).bfloat16())
    assert logp_NV.dtype == torch.float32
    torch.testing.assert_close(logp_NV.exp().sum(-1), torch.ones(3))


def test_rows_of_a_new_table_have_unit_expected_norm() -> None:
    torch.manual_seed(0)
    norms = WordTable(2_000, 50).weight.norm(dim=-1)
    assert norms.mean().item() == pytest.approx(1.0, abs=0.02)
