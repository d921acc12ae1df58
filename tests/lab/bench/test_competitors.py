"""Our ends and all competitors compute the same: every gradient is compared in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from reefknot.lab.bench.competitors import Competitor, build_reefknot_step, competitors_for
from reefknot.lab.bench.measure import Step, Unavailable, compute_relative_errors
from reefknot.lab.bench.plain_ends import LOSSES, compute_exact_gradients
from reefknot.lab.bench.problems import ENDS, Problem, Shape, make_problem

SHAPE = Shape(16, 8, 50)


def _problem(end: str) -> Problem:
    return make_problem(end, SHAPE, "cpu", torch.float64)


def _worst_error(step: Step, problem: Problem) -> float:
    """Run a step and return the largest relative error of its gradients."""
    step.run()
    return max(compute_relative_errors(step.get_gradients(), compute_exact_gradients(problem)).values())


@pytest.mark.parametrize("end", ENDS)
def test_reference_does_not_depend_on_the_chunk_size(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compute_exact_gradients(_problem(end))
    monkeypatch.setattr("reefknot.lab.bench.plain_ends.MAX_EXACT_SCORES", {"cpu": 3 * SHAPE.classes})
    errors = compute_relative_errors(compute_exact_gradients(_problem(end)), expected)
    assert max(errors.values()) < 1e-12


@pytest.mark.parametrize("end", ENDS)
def test_our_end_equals_the_naive_implementation(end: str) -> None:
    problem = _problem(end)
    step = build_reefknot_step(problem, torch.float64)
    loss = step.run()
    naive = LOSSES[end](problem.hidden, problem.targets, problem.weights) / SHAPE.tokens
    assert float(loss) == pytest.approx(float(naive), rel=1e-10)
    errors = compute_relative_errors(step.get_gradients(), compute_exact_gradients(problem))
    assert errors.keys() == {"hidden", *problem.weights}
    assert max(errors.values()) < 1e-10


@pytest.mark.parametrize(
    ("end", "competitor"),
    [
        (end, competitor)
        for end in ENDS
        for competitor in competitors_for(end)
        if competitor.family in ("eager", "torch")
    ],
    ids=lambda value: value if isinstance(value, str) else value.label,
)
def test_competitor_computes_the_same_gradients(end: str, competitor: Competitor) -> None:
    if competitor.label == "F.linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("needs torch 2.13")
    problem = _problem(end)
    assert _worst_error(competitor.build_step(problem, torch.float64), problem) < 1e-10


def _fused(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, reduction: str) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden_ND, weight_VD), targets_N, reduction=reduction)


@pytest.mark.parametrize("end", ["plain", "adaptive", "mixture", "drill"])
def test_fused_losses_are_composed_into_ends(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages need a GPU, so a stand-in replaces them."""
    monkeypatch.setattr("reefknot.lab.bench.competitors._import_module", lambda name: _Package())
    for competitor in competitors_for(end):
        if competitor.family in ("liger", "cce"):
            problem = _problem(end)
            assert _worst_error(competitor.build_step(problem, torch.float64), problem) < 1e-10, competitor.label


class _Package:
    """Stand-in for Liger and cut-cross-entropy."""

    class LigerFusedLinearCrossEntropyLoss:
        def __init__(self, reduction: str) -> None:
            self.reduction = reduction

        def __call__(self, weight_VD: torch.Tensor, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
            return _fused(hidden_ND, weight_VD, targets_N, self.reduction)

    @staticmethod
    def linear_cross_entropy(
        e: torch.Tensor, c: torch.Tensor, targets: torch.Tensor, filter_eps: str | None, reduction: str
    ) -> torch.Tensor:
        return _fused(e, c, targets, reduction)


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (competitor,) = [competitor for competitor in competitors_for("plain") if competitor.label == "Liger"]
    with pytest.raises(Unavailable, match="not installed"):
        competitor.build_step(_problem("plain"), torch.float64)


def test_float32_weights_with_bfloat16_states_use_autocast() -> None:
    problem = make_problem("plain", SHAPE, "cpu", torch.bfloat16)
    step = build_reefknot_step(problem, torch.float32)
    step.run()
    gradients = step.get_gradients()
    assert gradients["table"] is not None
    assert gradients["table"].dtype == torch.float32
    assert gradients["hidden"] is not None
    assert gradients["hidden"].dtype == torch.bfloat16
    assert max(compute_relative_errors(gradients, compute_exact_gradients(problem)).values()) < 0.05
