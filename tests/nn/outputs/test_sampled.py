"""The sampled softmax: distribution of samples, loss, and convergence to the exact softmax.

Shapes: N rows, D dimensions, R classes drawn or targeted, V classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.contract import Plan
from reefknot.nn.outputs.sampled import Candidates, SampledSoftmax
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

WORDS, DIM = 50, 6
TARGETS = torch.tensor([3, 0, IGNORE, 49, 3, IGNORE, 17])
SCORED = TARGETS != IGNORE
DISTRIBUTIONS = ["log_uniform", "uniform"]


def build_sampled(samples: int, distribution: Any = "log_uniform", classifier: Any = Plain) -> SampledSoftmax:
    torch.manual_seed(0)
    output = SampledSoftmax(classifier(WordTable(WORDS, DIM)), samples, distribution).double()
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.normal_(std=0.7)
    return output


def hidden(rows: int = len(TARGETS)) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, DIM, dtype=torch.float64, requires_grad=True)


def nll(output: SampledSoftmax, hidden_ND: Tensor, targets_N: Tensor = TARGETS) -> Tensor:
    return output.loss(hidden_ND, targets_N, output.prepare(targets_N))["nll"].sum


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_samples_follow_the_distribution(distribution: str) -> None:
    output = build_sampled(100_000, distribution)
    torch.manual_seed(3)
    probs_V = output._draw_probabilities(torch.arange(WORDS))
    assert probs_V.sum().item() == pytest.approx(1.0)
    assert chisquare(torch.bincount(output._sample_classes(), minlength=WORDS), probs_V * 100_000).pvalue > 1e-3


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_log_q_is_the_probability_that_a_class_is_sampled(distribution: str) -> None:
    output, plans = build_sampled(20, distribution), 2_000
    torch.manual_seed(4)
    all_classes = torch.arange(WORDS)
    count_V, log_q_V = torch.zeros(WORDS), torch.zeros(WORDS)
    for _ in range(plans):
        plan = output.prepare(all_classes)
        count_V[plan.ids[: plan.num_sampled]] += 1
        log_q_V[plan.ids] = plan.log_q.float()
    probs_V = log_q_V.exp()
    error_V = (count_V / plans - probs_V) / (probs_V * (1 - probs_V) / plans).sqrt()
    assert error_V.abs().max() < 4
    assert probs_V.min() < 0.4 < probs_V.max() + 0.1


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_sampling_every_class_equals_the_exact_softmax(distribution: str) -> None:
    output, hidden_ND = build_sampled(100_000, distribution), hidden()
    actual, expected = nll(output, hidden_ND), -output.target_log_probs(hidden_ND, TARGETS).sum()
    torch.testing.assert_close(actual, expected)
    inputs = [hidden_ND, *output.parameters()]
    for gradient, expected_gradient in zip(
        *(torch.autograd.grad(loss, inputs) for loss in (actual, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_each_row_normalises_over_its_target_and_the_samples() -> None:
    """A target that is also a sample counts once; a target that is not a sample counts in its own row only."""
    output, hidden_ND = build_sampled(8), hidden()
    torch.manual_seed(5)
    plan = output.prepare(TARGETS)
    assert isinstance(plan, Candidates)
    drawn = set(plan.ids[: plan.num_sampled].tolist())
    assert drawn & set(TARGETS[SCORED].tolist())
    assert set(TARGETS[SCORED].tolist()) - drawn
    classifier = output.classifier
    probs_V = -torch.expm1(8 * torch.log1p(-output._draw_probabilities(torch.arange(WORDS))))
    scores_NV = hidden_ND @ classifier.weight().T + classifier.bias - probs_V.log()
    expected = torch.zeros((), dtype=torch.float64)
    for row, target in enumerate(TARGETS.tolist()):
        if target != IGNORE:
            classes = [target, *sorted(drawn - {target})]
            expected = expected - torch.log_softmax(scores_NV[row, classes], -1)[0]
    torch.testing.assert_close(output.loss(hidden_ND, TARGETS, plan)["nll"].sum, expected)


def test_mean_gradient_approaches_the_exact_gradient() -> None:
    hidden_ND, plans, errors = hidden(), 300, []
    for samples in (30, 100, 300):
        output = build_sampled(samples)
        exact = torch.autograd.grad(-output.target_log_probs(hidden_ND, TARGETS).sum(), hidden_ND)[0]
        mean = torch.zeros_like(exact)
        for _ in range(plans):
            mean += torch.autograd.grad(nll(output, hidden_ND), hidden_ND)[0] / plans
        errors.append(((mean - exact).norm() / exact.norm()).item())
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2]
    assert errors[2] < 0.04


def test_log_q_correction_makes_mean_gradient_zero_at_the_optimum() -> None:
    """Targets follow the model's distribution; with log Q the mean gradient is zero even for few samples."""
    output, plans, all_classes = build_sampled(10), 600, torch.arange(WORDS)
    hidden_ND = hidden(1).detach().expand(WORDS, -1).clone().requires_grad_()
    probs_V = output.log_probs(hidden_ND).exp().detach()[0]
    corrected_D, uncorrected_D = torch.zeros(2, DIM, dtype=torch.float64)
    for _ in range(plans):
        plan = output.prepare(all_classes)
        assert isinstance(plan, Candidates)
        uncorrected = replace(plan, log_q=torch.zeros_like(plan.log_q))
        for candidates, total_D in ((plan, corrected_D), (uncorrected, uncorrected_D)):
            loss = output.loss(hidden_ND, all_classes, candidates)["nll"].sum
            total_D += probs_V @ torch.autograd.grad(loss, hidden_ND)[0] / plans
    assert corrected_D.norm() < 0.06
    assert uncorrected_D.norm() > 0.4


def test_only_classes_of_the_plan_have_gradients() -> None:
    output, hidden_ND = build_sampled(8), hidden()
    plan = output.prepare(TARGETS)
    assert isinstance(plan, Candidates)
    output.loss(hidden_ND, TARGETS, plan)["nll"].sum.backward()
    in_plan = torch.zeros(WORDS, dtype=torch.bool)
    in_plan[plan.ids] = True
    assert 8 < WORDS - in_plan.sum() < WORDS
    for parameter in output.parameters():
        assert parameter.grad is not None
        assert not parameter.grad[~in_plan].any()
        assert parameter.grad[in_plan].any(-1).all() if parameter.dim() > 1 else parameter.grad[in_plan].all()


def test_drill_runs_on_the_classes_of_the_plan_only() -> None:
    output = build_sampled(8, classifier=Drill)
    rows = []
    output.classifier.layers[0].register_forward_hook(lambda _module, inputs, _out: rows.append(len(inputs[0])))
    plan = output.prepare(TARGETS)
    assert isinstance(plan, Candidates)
    output.loss(hidden(), TARGETS, plan)
    assert rows == [len(plan.ids)]


def test_same_seed_samples_the_same_classes() -> None:
    output, hidden_ND = build_sampled(8), hidden()
    torch.manual_seed(7)
    first, second = nll(output, hidden_ND), nll(output, hidden_ND)
    torch.manual_seed(7)
    assert torch.equal(nll(output, hidden_ND), first)
    assert not torch.equal(first, second)


def test_evaluation_is_exact_and_draws_no_samples() -> None:
    output, hidden_ND = build_sampled(8).eval(), hidden()
    before = torch.get_rng_state()
    plan = output.prepare(TARGETS.view(1, -1))
    assert type(plan) is Plan
    assert torch.equal(torch.get_rng_state(), before)
    expected = Softmax(output.classifier).loss(hidden_ND, TARGETS, plan)["nll"]
    # The plan decides whether classes are sampled, not the mode at the time of the loss.
    output.train()
    actual = output.loss(hidden_ND, TARGETS, plan)["nll"]
    assert torch.equal(actual.sum, expected.sum)
    assert actual.count == expected.count == 5


def test_ignored_rows_have_zero_loss_and_gradient() -> None:
    output, hidden_ND = build_sampled(8), hidden()
    nll(output, hidden_ND).backward()
    assert hidden_ND.grad is not None
    assert not hidden_ND.grad[~SCORED].any()
    assert hidden_ND.grad[SCORED].any(-1).all()
    output.zero_grad()
    loss = nll(output, hidden_ND, torch.full_like(TARGETS, IGNORE))
    loss.backward()
    assert loss == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in output.parameters())


def test_bf16_autocast_gives_a_float32_loss() -> None:
    output, hidden_ND = build_sampled(20).float(), hidden().detach().float()
    plan = output.prepare(TARGETS)
    exact = output.loss(hidden_ND, TARGETS, plan)["nll"].sum
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = output.loss(hidden_ND, TARGETS, plan)["nll"].sum
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.03, atol=0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples = 0"),
        ({"samples": 8, "distribution": "zipf"}, "distribution = 'zipf': must be one of log"),
    ],
)
def test_invalid_settings_are_rejected(settings: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_sampled(**settings)
