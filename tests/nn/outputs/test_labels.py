"""What is particular to each kind of labels; what all of them promise is in tests/contract."""

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
    labels = Plain(table)
    assert labels.weight() is table.weight
    assert labels.context_dim == WIDTH
    assert labels.penalties() == {}


@pytest.mark.parametrize("bias", [True, False])
def test_the_bias_is_a_switch(bias: bool) -> None:
    table = WordTable(WORDS, WIDTH)
    labels = Plain(table, bias=bias)
    own = sum(p.numel() for p in labels.parameters()) - table.weight.numel()
    assert own == (WORDS if bias else 0)
    assert (labels.bias is None) != bias
    h_ND = torch.randn(3, WIDTH)
    scores = h_ND @ table.weight.T + (labels.bias if labels.bias is not None else 0.0)
    torch.testing.assert_close(Softmax(labels).log_probs(h_ND), torch.log_softmax(scores, -1))


def test_projection_joins_different_widths() -> None:
    table = WordTable(WORDS, WIDTH)
    labels = Projected(table, CONTEXT)
    output = Softmax(labels)
    h_ND = torch.randn(3, CONTEXT)
    assert output.context_dim == CONTEXT
    p = labels.projection
    context = h_ND @ p.weight.T + p.bias
    torch.testing.assert_close(labels.context(h_ND), context)
    assert labels.bias is not None
    torch.testing.assert_close(output.log_probs(h_ND), torch.log_softmax(context @ table.weight.T + labels.bias, -1))


@pytest.mark.parametrize("projection_bias", [True, False])
def test_projection_counts_its_matrix(projection_bias: bool) -> None:
    labels = Projected(WordTable(WORDS, WIDTH), CONTEXT, bias=False, projection_bias=projection_bias)
    own = sum(p.numel() for p in labels.parameters()) - WORDS * WIDTH
    assert own == WIDTH * CONTEXT + (WIDTH if projection_bias else 0)


def test_penalty_is_half_lambda_times_the_square_and_leaves_the_bias_alone() -> None:
    labels = Projected(WordTable(WORDS, WIDTH), CONTEXT, penalty=0.15)
    with torch.no_grad():
        labels.projection.weight.fill_(2.0)
        labels.projection.bias.fill_(100.0)
    penalties = labels.penalties()
    assert list(penalties) == ["projection"]
    assert penalties["projection"].item() == pytest.approx(0.15 / 2 * 4.0 * WIDTH * CONTEXT)
    penalties["projection"].backward()
    torch.testing.assert_close(labels.projection.weight.grad, torch.full((WIDTH, CONTEXT), 0.15 * 2.0))
    assert labels.projection.bias.grad is None


def test_a_penalty_of_zero_is_no_penalty() -> None:
    assert Projected(WordTable(WORDS, WIDTH), CONTEXT, penalty=0.0).penalties() == {}


def test_a_softmax_passes_the_penalties_on() -> None:
    labels = Projected(WordTable(WORDS, WIDTH), CONTEXT)
    assert Softmax(labels).penalties().keys() == labels.penalties().keys()


def test_half_precision_log_probs_are_float32_and_sum_to_one() -> None:
    output = Softmax(Plain(WordTable(1_000, WIDTH))).bfloat16()
    logp_NV = output.log_probs(torch.randn(3, WIDTH).bfloat16())
    assert logp_NV.dtype == torch.float32
    torch.testing.assert_close(logp_NV.exp().sum(-1), torch.ones(3))


def test_rows_of_a_new_table_have_unit_expected_norm() -> None:
    torch.manual_seed(0)
    norms = WordTable(2_000, 50).weight.norm(dim=-1)
    assert norms.mean().item() == pytest.approx(1.0, abs=0.02)
