"""The mixture of softmaxes, compared with a loop that mixes probabilities.

Shapes: N rows, D dimensions of the hidden state, K experts, L dimensions of a latent vector, V classes.
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
from reefknot.kernels.scores import IGNORE
from reefknot.lab.config.parts import OUTPUTS
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.outputs.mixture import MixtureOfSoftmaxes
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

WORDS, DIM, CONTEXT_DIM = 11, 4, 6
TARGETS = torch.tensor([3, 0, IGNORE, 10, 3, IGNORE, 7])


def build_mixture(experts: int = 3, **settings: Any) -> MixtureOfSoftmaxes:
    """Build a float64 mixture with random parameters, so that experts differ.

    The table has fewer dimensions than the hidden state.
    """
    torch.manual_seed(0)
    output = MixtureOfSoftmaxes(Plain(WordTable(WORDS, DIM)), CONTEXT_DIM, experts, **settings).double()
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.normal_()
    return output


def hidden(rows: int = len(TARGETS)) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, CONTEXT_DIM, dtype=torch.float64, requires_grad=True)


def nll(output: MixtureOfSoftmaxes, hidden_ND: Tensor) -> Tensor:
    return output.loss(hidden_ND, TARGETS, output.prepare(TARGETS))["nll"].sum


def mixed_probabilities(output: MixtureOfSoftmaxes, hidden_ND: Tensor) -> Tensor:
    """Return the mixed probabilities probs_NV, computed one expert at a time."""
    classifier = output.classifier
    prior_NK = torch.softmax(hidden_ND @ output.prior.weight.T, -1)
    probs_NV = torch.zeros(len(hidden_ND), WORDS, dtype=torch.float64)
    for expert in range(output.experts):
        rows = slice(expert * DIM, (expert + 1) * DIM)
        latent_NL = torch.tanh(hidden_ND @ output.latent.weight[rows].T + output.latent.bias[rows])
        expert_probs_NV = torch.softmax(latent_NL @ classifier.weight().T + classifier.bias, -1)
        probs_NV = probs_NV + prior_NK[:, expert, None] * expert_probs_NV
    return probs_NV


def test_log_probs_equal_mixed_probabilities() -> None:
    output, hidden_ND = build_mixture(), hidden()
    torch.testing.assert_close(output.log_probs(hidden_ND).exp(), mixed_probabilities(output, hidden_ND))


def test_loss_and_gradients_equal_mixed_probabilities() -> None:
    output, hidden_ND = build_mixture(), hidden()
    scored = TARGETS != IGNORE
    expected = -mixed_probabilities(output, hidden_ND)[scored].gather(1, TARGETS[scored, None]).log().sum()
    actual = nll(output, hidden_ND)
    torch.testing.assert_close(actual, expected)
    inputs = [hidden_ND, *output.parameters()]
    for gradient, expected_gradient in zip(
        *(torch.autograd.grad(loss, inputs) for loss in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_one_expert_equals_a_softmax_of_its_latent_vector() -> None:
    output, hidden_ND = build_mixture(experts=1), hidden()
    latent_NL = torch.tanh(output.latent(hidden_ND))
    torch.testing.assert_close(output.log_probs(hidden_ND), Softmax(output.classifier).log_probs(latent_NL))
    torch.testing.assert_close(
        output.target_log_probs(hidden_ND, TARGETS), Softmax(output.classifier).target_log_probs(latent_NL, TARGETS)
    )


def test_ignored_rows_have_zero_loss_and_gradient() -> None:
    output, hidden_ND = build_mixture(experts=15), hidden()
    nll(output, hidden_ND).backward()
    assert hidden_ND.grad is not None
    assert not hidden_ND.grad[TARGETS == IGNORE].any()
    ignored = torch.full_like(TARGETS, IGNORE)
    assert output.loss(hidden_ND, ignored, output.prepare(ignored))["nll"].sum == 0


def test_samples_follow_the_mixed_probabilities() -> None:
    output, draws = build_mixture(), 20_000
    hidden_ND = hidden(2).detach()
    ids = output.sample(hidden_ND.repeat_interleave(draws, 0), torch.Generator().manual_seed(5)).view(2, draws)
    for row, probs_V in zip(ids, mixed_probabilities(output, hidden_ND).detach(), strict=True):
        assert chisquare(torch.bincount(row, minlength=WORDS), probs_V * draws).pvalue > 1e-3


def test_sampling_scores_one_expert_per_row() -> None:
    output = build_mixture()
    rows = []
    context = output.classifier.context
    with patch.object(output.classifier, "context", side_effect=lambda c: rows.append(len(c)) or context(c)):
        output.sample(hidden().detach(), torch.Generator().manual_seed(5))
    assert rows == [len(TARGETS)]


def test_class_vectors_are_computed_once_per_loss() -> None:
    classifier = Drill(WordTable(WORDS, DIM), depth=2)
    output = MixtureOfSoftmaxes(classifier, CONTEXT_DIM, experts=4)
    with patch.object(classifier, "weight", wraps=classifier.weight) as weight:
        nll(output, hidden().detach().float())
    assert weight.call_count == 1


def test_dropout_acts_in_training_only() -> None:
    output, hidden_ND = build_mixture(dropout=0.5), hidden()
    torch.manual_seed(2)
    first, second = nll(output, hidden_ND), nll(output, hidden_ND)
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert torch.equal(nll(output, hidden_ND), first)
    output.eval()
    torch.testing.assert_close(output.log_probs(hidden_ND).exp(), mixed_probabilities(output, hidden_ND))


def latent_masks(output: MixtureOfSoftmaxes, hidden_ND: Tensor, targets: Tensor) -> Tensor:
    """Return the dropout masks of the latent vectors in a call of `loss`, masks_NE, by dividing by the latents."""
    contexts = []
    context = output.classifier.context
    with patch.object(output.classifier, "context", side_effect=lambda c: contexts.append(c) or context(c)):
        loss = output.loss(hidden_ND, targets.flatten(), output.prepare(targets))["nll"].sum
    assert torch.isfinite(loss)
    latents_NE = torch.tanh(output.latent(hidden_ND))
    return contexts[0].reshape(latents_NE.shape) / latents_NE


def test_locked_dropout_has_one_mask_per_stream_and_window() -> None:
    streams, steps = 3, 5
    output = build_mixture(dropout=0.5, locked=True)
    hidden_ND = hidden(streams * steps)
    targets_BT = torch.randint(WORDS, (streams, steps))
    masks_BTE = latent_masks(output, hidden_ND, targets_BT).view(streams, steps, -1)
    torch.testing.assert_close(masks_BTE, masks_BTE[:, :1].expand_as(masks_BTE))
    assert not torch.allclose(masks_BTE[0, 0], masks_BTE[1, 0])
    assert set(masks_BTE.flatten().round(decimals=6).tolist()) == {0.0, 2.0}
    again_BTE = latent_masks(output, hidden_ND, targets_BT).view(streams, steps, -1)
    assert not torch.allclose(again_BTE, masks_BTE)


def test_locked_dropout_of_rows_without_streams_is_one_mask() -> None:
    output = build_mixture(dropout=0.5, locked=True)
    masks_NE = latent_masks(output, hidden(6), torch.randint(WORDS, (6,)))
    torch.testing.assert_close(masks_NE, masks_NE[:1].expand_as(masks_NE))


def test_locked_dropout_gives_the_loss_of_latents_with_these_masks() -> None:
    output, hidden_ND = build_mixture(dropout=0.5, locked=True), hidden(6)
    targets_BT = torch.tensor([[3, 0, 7], [10, IGNORE, 3]])
    torch.manual_seed(4)
    call = output(hidden_ND.view(2, 3, -1), targets_BT, reduction="sum")
    torch.manual_seed(4)
    rows = output(hidden_ND.view(2, 3, -1), targets_BT, reduction="none")
    torch.manual_seed(4)
    masks_BE = torch.empty(2, output.experts * DIM, dtype=torch.float64).bernoulli_(0.5) / 0.5
    latents_BTE = torch.tanh(output.latent(hidden_ND)).view(2, 3, -1) * masks_BE[:, None]
    scores = latents_BTE.view(2, 3, output.experts, DIM) @ output.classifier.weight().T + output.classifier.bias
    prior = torch.softmax(output.prior(hidden_ND), -1).view(2, 3, -1, 1)
    probs_BTV = (prior * torch.softmax(scores, -1)).sum(2)
    nll_BT = -probs_BTV.gather(2, targets_BT.clamp(min=0)[..., None]).squeeze(-1).log() * (targets_BT != IGNORE)
    torch.testing.assert_close(call.loss, nll_BT.sum())
    torch.testing.assert_close(rows.loss, nll_BT)


def test_parameter_count_equals_the_paper() -> None:
    """Latent vectors have a matrix and a bias, the prior has a matrix; the experts share the class vectors."""
    output = build_mixture(experts=15)
    added = sum(parameter.numel() for parameter in output.parameters()) - sum(
        parameter.numel() for parameter in output.classifier.parameters()
    )
    assert added == 15 * DIM * (CONTEXT_DIM + 1) + 15 * CONTEXT_DIM


@pytest.mark.parametrize(("latent_dim", "dim"), [(None, CONTEXT_DIM), (5, 5)])
def test_recipe_gives_the_classifier_the_latent_dimension(latent_dim: int | None, dim: int) -> None:
    classifier = {"kind": "projected", "table": "words"}
    settings = TypeAdapter(OUTPUTS.entry_type()).validate_python(
        {"kind": "mixture", "classifier": classifier, "experts": 2, "latent_dim": latent_dim}
    )
    context = {"context_dim": CONTEXT_DIM, "tables": {"words": WordTable(WORDS, DIM)}}
    output = OUTPUTS.build(settings, context)
    assert isinstance(output.classifier, Projected)
    assert (output.context_dim, output.classifier.context_dim) == (CONTEXT_DIM, dim)
    assert output.log_probs(torch.randn(3, CONTEXT_DIM)).shape == (3, WORDS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latent_dim": 5}, "latent_dim = 5 but the classifier reads 4 numbers"),
        ({"experts": 0}, "experts = 0"),
        ({"dropout": 1.0}, r"dropout = 1.0: must be"),
    ],
)
def test_invalid_settings_are_rejected(settings: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_mixture(**settings)
