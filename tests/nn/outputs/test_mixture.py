"""The mixture of softmaxes against a mix of probabilities, written out.

Shapes: N rows, D width of the hidden state, K experts, L width of a latent, V classes.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from pydantic import TypeAdapter
from scipy.stats import chisquare
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.linear_cross_entropy import IGNORE
from reefknot.lab.config.parts import OUTPUTS
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

WORDS, WIDTH, CONTEXT = 11, 4, 6
TARGETS = torch.tensor([3, 0, IGNORE, 10, 3, IGNORE, 7])


def mixture(experts: int = 3, **settings: Any) -> MixtureOfSoftmaxes:
    """A table narrower than the hidden state; in float64, every parameter drawn, so that experts differ."""
    torch.manual_seed(0)
    output = MixtureOfSoftmaxes(Plain(WordTable(WORDS, WIDTH)), CONTEXT, experts, **settings).double()
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.normal_()
    return output


def hidden(rows: int = len(TARGETS)) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, CONTEXT, dtype=torch.float64, requires_grad=True)


def nll(output: MixtureOfSoftmaxes, h_ND: Tensor) -> Tensor:
    return output.loss(h_ND, TARGETS, output.prepare(TARGETS))["nll"].sum


def mixed(output: MixtureOfSoftmaxes, h_ND: Tensor) -> Tensor:
    """Probabilities, p_NV, expert by expert."""
    classifier = output.classifier
    prior_NK = torch.softmax(h_ND @ output.prior.weight.T, -1)
    p_NV = torch.zeros(len(h_ND), WORDS, dtype=torch.float64)
    for k in range(output.experts):
        own = slice(k * WIDTH, (k + 1) * WIDTH)
        latent_NL = torch.tanh(h_ND @ output.latent.weight[own].T + output.latent.bias[own])
        p_NV = p_NV + prior_NK[:, k, None] * torch.softmax(latent_NL @ classifier.weight().T + classifier.bias, -1)
    return p_NV


def test_it_mixes_probabilities() -> None:
    output, h_ND = mixture(), hidden()
    torch.testing.assert_close(output.log_probs(h_ND).exp(), mixed(output, h_ND))


def test_loss_and_gradients_are_those_of_the_mix() -> None:
    output, h_ND = mixture(), hidden()
    scored = TARGETS != IGNORE
    expected = -mixed(output, h_ND)[scored].gather(1, TARGETS[scored, None]).log().sum()
    found = nll(output, h_ND)
    torch.testing.assert_close(found, expected)
    wanted = [h_ND, *output.parameters()]
    for got, want in zip(*(torch.autograd.grad(each, wanted) for each in (found, expected)), strict=True):
        torch.testing.assert_close(got, want)


def test_one_expert_is_a_softmax_over_the_latent() -> None:
    output, h_ND = mixture(experts=1), hidden()
    latent_NL = torch.tanh(output.latent(h_ND))
    torch.testing.assert_close(output.log_probs(h_ND), Softmax(output.classifier).log_probs(latent_NL))
    torch.testing.assert_close(
        output.target_log_probs(h_ND, TARGETS), Softmax(output.classifier).target_log_probs(latent_NL, TARGETS)
    )


def test_ignored_rows_are_exactly_nothing() -> None:
    output, h_ND = mixture(experts=15), hidden()
    nll(output, h_ND).backward()
    assert h_ND.grad is not None
    assert not h_ND.grad[TARGETS == IGNORE].any()
    nothing = torch.full_like(TARGETS, IGNORE)
    assert output.loss(h_ND, nothing, output.prepare(nothing))["nll"].sum == 0


def test_samples_follow_the_mix() -> None:
    output, draws = mixture(), 20_000
    h_ND = hidden(2).detach()
    ids = output.sample(h_ND.repeat_interleave(draws, 0), torch.Generator().manual_seed(5)).view(2, draws)
    for row, p_V in zip(ids, mixed(output, h_ND).detach(), strict=True):
        assert chisquare(torch.bincount(row, minlength=WORDS), p_V * draws).pvalue > 1e-3


def test_a_sample_scores_one_expert_per_row() -> None:
    output = mixture()
    rows = []
    context = output.classifier.context
    with patch.object(output.classifier, "context", side_effect=lambda c: rows.append(len(c)) or context(c)):
        output.sample(hidden().detach(), torch.Generator().manual_seed(5))
    assert rows == [len(TARGETS)]


def test_class_vectors_are_made_once_per_loss() -> None:
    classifier = Drill(WordTable(WORDS, WIDTH), depth=2)
    output = MixtureOfSoftmaxes(classifier, CONTEXT, experts=4)
    with patch.object(classifier, "weight", wraps=classifier.weight) as weight:
        nll(output, hidden().detach().float())
    assert weight.call_count == 1


def test_dropout_acts_on_the_latents_in_training_only() -> None:
    output, h_ND = mixture(dropout=0.5), hidden()
    torch.manual_seed(2)
    first, second = nll(output, h_ND), nll(output, h_ND)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert torch.equal(nll(output, h_ND), first)
    output.eval()
    torch.testing.assert_close(output.log_probs(h_ND).exp(), mixed(output, h_ND))


def test_parameters_are_those_of_the_authors() -> None:
    """One matrix with a bias for the latents, one without for the prior; the classes are shared by the experts."""
    output = mixture(experts=15)
    own = sum(p.numel() for p in output.parameters()) - sum(p.numel() for p in output.classifier.parameters())
    assert own == 15 * WIDTH * (CONTEXT + 1) + 15 * CONTEXT


@pytest.mark.parametrize(("latent_dim", "width"), [(None, CONTEXT), (5, 5)])
def test_a_recipe_gives_the_labels_the_latent_width(latent_dim: int | None, width: int) -> None:
    classifier = {"kind": "projected", "table": "words"}
    settings = TypeAdapter(OUTPUTS.settings()).validate_python(
        {"kind": "mixture", "classifier": classifier, "experts": 2, "latent_dim": latent_dim}
    )
    given = {"context_dim": CONTEXT, "tables": {"words": WordTable(WORDS, WIDTH)}}
    output = OUTPUTS.build(settings, given)
    assert isinstance(output.classifier, Projected)
    assert (output.context_dim, output.classifier.context_dim) == (CONTEXT, width)
    assert output.log_probs(torch.randn(3, CONTEXT)).shape == (3, WORDS)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"latent_dim": 5}, "latent_dim = 5 but the classifier reads 4 numbers"),
        ({"experts": 0}, "experts = 0"),
        ({"dropout": 1.0}, r"dropout = 1.0: must be"),
    ],
)
def test_impossible_settings_are_refused(settings: Any, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        mixture(**settings)
