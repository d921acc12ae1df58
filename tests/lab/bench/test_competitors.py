"""Our ends and all competitors compute the same: every gradient is compared in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from reefknot.lab.bench.competitors import Competitor, build_products_step, build_reefknot_step, competitors_for
from reefknot.lab.bench.measure import Step, Unavailable, compute_relative_errors
from reefknot.lab.bench.plain_ends import LOSSES, compute_exact_gradients
from reefknot.lab.bench.problems import ENDS, ENTROPY_WEIGHT, NUM_PRODUCTS, Problem, Shape, make_problem

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
    naive = LOSSES[end](problem.hidden, problem.targets, problem.tensors) / SHAPE.tokens
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
        if competitor.family in ("eager", "torch", "trl")
    ],
    ids=lambda value: value if isinstance(value, str) else value.label,
)
def test_competitor_computes_the_same_gradients(end: str, competitor: Competitor) -> None:
    if competitor.label == "F.linear_cross_entropy" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("needs torch 2.13")
    problem = _problem(end)
    assert _worst_error(competitor.build_step(problem, torch.float64), problem) < 1e-10


@pytest.mark.parametrize("end", ["plain", "softcap", "log_probs", "distil"])
def test_compiled_competitor_computes_the_same_gradients(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is captured and differentiated as usual, but not translated to C++, which takes long."""
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    (competitor,) = [competitor for competitor in competitors_for(end) if competitor.family == "compile"]
    problem = _problem(end)
    assert _worst_error(competitor.build_step(problem, torch.float64), problem) < 1e-10


def test_chunks_as_in_trl_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.lab.bench.competitors.CHECKPOINTED_ROWS", 5)
    (competitor,) = [competitor for competitor in competitors_for("log_probs") if competitor.family == "trl"]
    problem = _problem("log_probs")
    assert _worst_error(competitor.build_step(problem, torch.float64), problem) < 1e-10


def test_reference_gradients_of_functions_match_formulas_by_hand() -> None:
    """The gradients of the scores are written out: of a capped cross-entropy, of a policy, and of a divergence."""
    for end in ("softcap", "log_probs", "distil"):
        problem = _problem(end)
        table_VD = problem.weights["table"]
        scores_NV = problem.hidden @ table_VD.T
        one_hot_NV = F.one_hot(problem.targets, SHAPE.classes).double()
        if end == "softcap":
            grad_NV = torch.softmax(30.0 * torch.tanh(scores_NV / 30.0), -1) - one_hot_NV
            grad_NV = grad_NV * (1.0 - torch.tanh(scores_NV / 30.0) ** 2)
        elif end == "log_probs":
            probs_NV = torch.softmax(scores_NV, -1)
            entropy_N1 = -(probs_NV * probs_NV.log()).sum(-1, keepdim=True)
            grad_NV = problem.row_constants["advantages"][:, None] * (probs_NV - one_hot_NV)
            grad_NV = grad_NV + ENTROPY_WEIGHT * probs_NV * (probs_NV.log() + entropy_N1)
        else:
            teacher_NV = problem.row_constants["teacher_hidden"] @ problem.constants["teacher_table"].T
            grad_NV = torch.softmax(scores_NV, -1) - torch.softmax(teacher_NV, -1)
        grad_NV = grad_NV / SHAPE.tokens
        expected = {"hidden": grad_NV @ table_VD, "table": grad_NV.T @ problem.hidden}
        errors = compute_relative_errors(compute_exact_gradients(problem), expected)
        assert max(errors.values()) < 1e-12, end


@pytest.mark.parametrize("end", NUM_PRODUCTS)
def test_products_step_computes_only_the_products(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    multiply = torch.mm

    def count(left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        sizes.append(left.shape[0] * left.shape[1] * right.shape[1])
        return multiply(left, right, out=out)

    monkeypatch.setattr("torch.mm", count)
    N, D, V = SHAPE
    build_products_step(_problem(end)).run()
    assert sizes == [N * D * V] * NUM_PRODUCTS[end]


def _fused(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    reduction: str,
    softcap: float | None = None,
) -> torch.Tensor:
    scores_NV = F.linear(hidden_ND, weight_VD)
    if softcap is not None:
        scores_NV = softcap * torch.tanh(scores_NV / softcap)
    return F.cross_entropy(scores_NV, targets_N, reduction=reduction)


@pytest.mark.parametrize("end", ["plain", "adaptive", "mixture", "drill", "softcap", "log_probs", "distil"])
def test_fused_losses_are_composed_into_ends(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages need a GPU, so a stand-in replaces them."""
    monkeypatch.setattr("reefknot.lab.bench.competitors._import_module", lambda name: _Package())
    monkeypatch.setattr("reefknot.lab.bench.packages.import_module", lambda name: _Package())
    monkeypatch.setattr("reefknot.lab.bench.packages.QUACK_ALIGNMENT", 2)
    for competitor in competitors_for(end):
        if competitor.family in ("liger", "quack", "cce") and competitor.label != "Liger CuTe":
            problem = _problem(end)
            assert _worst_error(competitor.build_step(problem, torch.float64), problem) < 1e-10, competitor.label


class _Package:
    """Stand-in for Liger and cut-cross-entropy."""

    class LigerFusedLinearCrossEntropyLoss:
        def __init__(self, reduction: str, softcap: float | None = None) -> None:
            self.reduction = reduction
            self.softcap = softcap

        def __call__(self, weight_VD: torch.Tensor, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
            return _fused(hidden_ND, weight_VD, targets_N, self.reduction, self.softcap)

    class LigerFusedLinearCrossEntropyFunction:
        @staticmethod
        def forward(
            ctx: object,
            _input: torch.Tensor,
            weight: torch.Tensor,
            target: torch.Tensor,
            bias: None = None,
            reduction: str = "mean",
            softcap: float | None = None,
            chunk_mem_const: int = 1,
        ) -> tuple[torch.Tensor, None]:
            assert chunk_mem_const > 1
            return _fused(_input, weight, target, reduction, softcap), None

        @classmethod
        def apply(cls, *arguments: Any) -> tuple[torch.Tensor, None]:
            return cls.forward(None, *arguments)

    class LigerFusedLinearScaledCrossEntropyFunction:
        @staticmethod
        def apply(
            hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, return_entropy: bool = False
        ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
            losses_N = _fused(hidden_ND, weight_VD, targets_N, "none")
            log_probs_NV = torch.log_softmax(hidden_ND @ weight_VD.T, -1)
            entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(-1)
            return (losses_N, entropy_N) if return_entropy else losses_N

    chunked_linear_cross_entropy = staticmethod(_fused)

    class LigerFusedLinearJSD:
        def __init__(self, jsd_beta: float, temperature: float) -> None:
            assert (jsd_beta, temperature) == (0.0, 1.0)

        def __call__(
            self,
            student_ND: torch.Tensor,
            student_VD: torch.Tensor,
            teacher_ND: torch.Tensor,
            teacher_VD: torch.Tensor,
            labels_N: None,
        ) -> torch.Tensor:
            teacher_probs_NV = torch.softmax(teacher_ND @ teacher_VD.T, -1)
            return F.kl_div(torch.log_softmax(student_ND @ student_VD.T, -1), teacher_probs_NV, reduction="batchmean")

    @staticmethod
    def linear_cross_entropy(
        e: torch.Tensor,
        c: torch.Tensor,
        targets: torch.Tensor,
        filter_eps: str | None,
        reduction: str,
        softcap: float | None = None,
    ) -> torch.Tensor:
        return _fused(e, c, targets, reduction, softcap)


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (competitor,) = [competitor for competitor in competitors_for("plain") if competitor.label == "Liger"]
    with pytest.raises(Unavailable, match="not installed"):
        competitor.build_step(_problem("plain"), torch.float64)


@pytest.mark.parametrize(("label", "reason"), [("QuACK", "divisible by 8"), ("Liger CuTe", "needs a Hopper GPU")])
def test_refused_shape_or_device_is_reported(label: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reefknot.lab.bench.packages.import_module", lambda name: _Package())
    (competitor,) = [competitor for competitor in competitors_for("plain") if competitor.label == label]
    with pytest.raises(Unavailable, match=reason):
        competitor.build_step(_problem("plain"), torch.float64)


@pytest.mark.parametrize("end", ["plain", "softcap", "log_probs", "distil"])
def test_float32_weights_with_bfloat16_states_use_autocast(end: str) -> None:
    problem = make_problem(end, SHAPE, "cpu", torch.bfloat16)
    step = build_reefknot_step(problem, torch.float32)
    step.run()
    gradients = step.get_gradients()
    assert gradients["table"] is not None
    assert gradients["table"].dtype == torch.float32
    assert gradients["hidden"] is not None
    assert gradients["hidden"].dtype == torch.bfloat16
    assert max(compute_relative_errors(gradients, compute_exact_gradients(problem)).values()) < 0.05
