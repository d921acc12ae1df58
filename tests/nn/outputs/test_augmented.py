"""The augmented loss, compared with the formulas of the paper over the whole vocabulary.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels import small
from reefknot.kernels.scores import IGNORE
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.outputs.augmented import PAD_MULTIPLE, Augmented
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, WordTable

WORDS, CONTEXT_DIM, TAU = 11, 6, 3.0
TARGETS = torch.tensor([3, 0, IGNORE, 10, 3, IGNORE, 7, 3])
SCORED = TARGETS != IGNORE


@pytest.fixture(autouse=True, params=["in blocks", "stored"])
def scores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test twice. A small problem on a GPU stores its scores; here, so does one on a CPU."""
    monkeypatch.setattr(small, "_waits_for_python", lambda _: request.param == "stored")


def randomise(output: Augmented) -> Augmented:
    """Convert to float64 and draw every parameter, so that no bias is zero."""
    torch.manual_seed(0)
    output = output.double()
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.normal_()
    return output


def tied(**settings: Any) -> Augmented:
    table = WordTable(WORDS, CONTEXT_DIM)
    return randomise(Augmented(Plain(table), table, **{"tau": TAU, "gamma": 0.5} | settings))


def untied(**settings: Any) -> Augmented:
    """Build an augmented softmax with class vectors and input vectors of different dimensions."""
    classifier = Projected(WordTable(WORDS, 4), CONTEXT_DIM)
    return randomise(Augmented(classifier, WordTable(WORDS, 5), **{"tau": TAU, "gamma": 0.5} | settings))


def hidden(rows: int = len(TARGETS)) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, CONTEXT_DIM, dtype=torch.float64, requires_grad=True)


def augmented_loss(output: Augmented, hidden_ND: Tensor, targets_N: Tensor = TARGETS) -> Tensor:
    return output.loss(hidden_ND, targets_N, output.prepare(targets_N))["augmented"].sum


def expected_loss(output: Augmented, hidden_ND: Tensor) -> Tensor:
    """Return the sum over tokens of KL(soft target || soft prediction) over the whole vocabulary."""
    table_VD = output.table.weight
    student_NV = torch.log_softmax(
        output.classifier.context(hidden_ND) @ output.classifier.weight().T / output.tau, -1
    )[SCORED]
    target_NV = torch.log_softmax(table_VD[TARGETS[SCORED]] @ table_VD.T / output.tau, -1)
    if output.detach_target:
        target_NV = target_NV.detach()
    return F.kl_div(student_NV, target_NV, reduction="sum", log_target=True)


@pytest.mark.parametrize("detach_target", [False, True])
@pytest.mark.parametrize("build", [tied, untied])
def test_loss_and_gradients_equal_the_kl_divergence(build: Any, detach_target: bool) -> None:
    output, hidden_ND = build(detach_target=detach_target), hidden()
    actual, expected = augmented_loss(output, hidden_ND), expected_loss(output, hidden_ND)
    torch.testing.assert_close(actual, expected)
    inputs = {"h": hidden_ND, **dict(output.named_parameters())}
    gradients = [torch.autograd.grad(loss, list(inputs.values()), allow_unused=True) for loss in (actual, expected)]
    with_gradient = set()
    for name, gradient, expected_gradient in zip(inputs, *gradients, strict=True):
        # A parameter that is not in the formula has no gradient, or a gradient of zeros.
        zeros = torch.zeros_like(inputs[name])
        torch.testing.assert_close(
            zeros if gradient is None else gradient, zeros if expected_gradient is None else expected_gradient
        )
        if expected_gradient is not None:
            with_gradient.add(name)
    assert "classifier.bias" not in with_gradient
    assert ("table.weight" in with_gradient) == (build is untied and not detach_target)


def test_detach_target_stops_gradients_of_the_target_table_only() -> None:
    output = untied(detach_target=True)
    augmented_loss(output, hidden()).backward()
    assert output.table.weight.grad is None
    assert output.classifier.table.weight.grad is not None
    assert output.classifier.table.weight.grad.any()


def logits_and_soft_targets(tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient with respect to the student's logits, the logits, and the scores of the soft target.

    The class vectors are unit vectors, so the context is the logits.
    """
    torch.manual_seed(2)
    units = WordTable(WORDS, WORDS)
    output = Augmented(Plain(units, bias=False), WordTable(WORDS, 4), tau=tau, alpha=1.0).double()
    with torch.no_grad():
        units.weight.copy_(torch.eye(WORDS))
        output.table.weight.normal_()
    scores_NV = torch.randn(len(TARGETS), WORDS, dtype=torch.float64, requires_grad=True)
    augmented_loss(output, scores_NV).backward()
    assert scores_NV.grad is not None
    table_VD = output.table.weight.detach()
    return scores_NV.grad[SCORED], scores_NV.detach()[SCORED], table_VD[TARGETS[SCORED]] @ table_VD.T


def test_logit_gradient_is_the_difference_of_the_distributions() -> None:
    gradient_NV, scores_NV, target_scores_NV = logits_and_soft_targets(TAU)
    expected_NV = (torch.softmax(scores_NV / TAU, -1) - torch.softmax(target_scores_NV / TAU, -1)) / TAU
    torch.testing.assert_close(gradient_NV, expected_NV)


def test_logit_gradient_at_high_temperature_matches_logits() -> None:
    tau = 1e4
    gradient_NV, scores_NV, target_scores_NV = logits_and_soft_targets(tau)
    difference_NV = (scores_NV - scores_NV.mean(-1, keepdim=True)) - (
        target_scores_NV - target_scores_NV.mean(-1, keepdim=True)
    )
    torch.testing.assert_close(gradient_NV * tau**2 * WORDS, difference_NV, rtol=0.0, atol=5e-3)


def test_loss_is_zero_if_the_prediction_is_the_soft_target() -> None:
    output = tied()
    hidden_ND = output.table.weight.detach()[TARGETS.clamp(min=0)]
    assert augmented_loss(output, hidden_ND).item() == pytest.approx(0.0, abs=1e-12)
    assert augmented_loss(output, hidden()) > 0.1


@pytest.mark.parametrize(
    ("settings", "nll_weight", "augmented_weight"),
    [
        ({"alpha": 13.0, "gamma": None}, 1.0, 13.0),
        ({"gamma": 0.5}, 1.0, 0.5 * TAU),
        ({"beta": 0.25, "gamma": None}, 0.75, 0.25 * TAU**2 * WORDS),
        ({"beta": 1.0, "gamma": None}, 0.0, TAU**2 * WORDS),
    ],
)
def test_weights_are_returned_separately_from_the_sums(
    settings: Any, nll_weight: float, augmented_weight: float
) -> None:
    output, hidden_ND = tied(**settings), hidden()
    parts = output.loss(hidden_ND, TARGETS, output.prepare(TARGETS))
    assert list(parts) == ["nll", "augmented"]
    assert (parts["nll"].weight, parts["augmented"].weight) == pytest.approx((nll_weight, augmented_weight))
    assert parts["nll"].count == parts["augmented"].count == 6
    torch.testing.assert_close(parts["nll"].sum, -Softmax(output.classifier).target_log_probs(hidden_ND, TARGETS).sum())
    torch.testing.assert_close(parts["augmented"].sum, expected_loss(output, hidden_ND))


def test_output_bias_changes_nll_but_not_augmented_loss() -> None:
    output, hidden_ND = tied(), hidden()
    before = output.loss(hidden_ND, TARGETS, output.prepare(TARGETS))
    with torch.no_grad():
        output.classifier.bias[3] += 5.0
    after = output.loss(hidden_ND, TARGETS, output.prepare(TARGETS))
    assert torch.equal(after["augmented"].sum, before["augmented"].sum)
    assert not torch.allclose(after["nll"].sum, before["nll"].sum)


def test_log_probs_and_tables_equal_the_plain_softmax() -> None:
    output, hidden_ND = untied(), hidden()
    assert torch.equal(output.log_probs(hidden_ND), Softmax(output.classifier).log_probs(hidden_ND))
    assert [id(table) for table in output.tables()] == [id(output.classifier.table)]


def test_plan_has_each_target_once_for_any_shape() -> None:
    output = tied()
    plan = output.prepare(TARGETS.view(2, 4))
    assert plan.targets.tolist() == [0, 3, 7, 10, *[0] * (PAD_MULTIPLE - 4)], (
        "padded to few lengths, so that steps can be captured"
    )
    assert plan.rows.tolist() == [0, 1, 3, 4, 6, 7]
    assert torch.equal(plan.targets[plan.positions], TARGETS[SCORED])
    assert plan.count == 6


@pytest.mark.parametrize(("distinct", "length"), [(0, 0), (1, 32), (31, 32), (32, 32), (33, 64)])
def test_distinct_targets_are_padded_to_multiples_of_32(distinct: int, length: int) -> None:
    table = WordTable(40, CONTEXT_DIM)
    plan = Augmented(Plain(table), table, gamma=0.5).prepare(torch.arange(distinct))
    assert len(plan.targets) == length


def test_micro_batches_are_padded_to_the_same_number_of_targets() -> None:
    table = WordTable(40, CONTEXT_DIM)
    micro_batches = [torch.arange(3), torch.arange(33), torch.full((4,), IGNORE), torch.tensor([IGNORE, 5])]
    plans = Augmented(Plain(table), table, gamma=0.5).prepare_micro_batches(micro_batches)
    assert [len(plan.targets) for plan in plans] == [64, 64, 0, 64]
    assert [plan.count for plan in plans] == [3, 33, 0, 1]
    for targets_N, plan in zip(micro_batches, plans, strict=True):
        assert torch.equal(plan.targets[plan.positions], targets_N[targets_N != IGNORE])


@pytest.mark.parametrize("build", [tied, untied])
def test_padding_of_targets_does_not_change_the_loss(build: Any) -> None:
    output, hidden_ND = build(), hidden()
    plan = output.prepare(TARGETS)
    results = []
    for used_plan in (plan, replace(plan, targets=plan.targets[:4])):
        loss = output.loss(hidden_ND, TARGETS, used_plan)["augmented"].sum
        results.append([loss, *torch.autograd.grad(loss, [hidden_ND, *output.parameters()], materialize_grads=True)])
    torch.testing.assert_close(*results)


def test_ignored_rows_have_zero_loss_and_gradient() -> None:
    output, hidden_ND = untied(), hidden()
    augmented_loss(output, hidden_ND).backward()
    assert hidden_ND.grad is not None
    assert not hidden_ND.grad[~SCORED].any()
    assert hidden_ND.grad[SCORED].any(-1).all()
    output.zero_grad()
    ignored = torch.full_like(TARGETS, IGNORE)
    parts = output.loss(hidden_ND, ignored, output.prepare(ignored))
    assert [(part.sum.item(), part.count) for part in parts.values()] == [(0.0, 0), (0.0, 0)]
    torch.stack([part.sum for part in parts.values()]).sum().backward()
    # In distributed training other processes wait for a gradient of every parameter.
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in output.parameters())


def loss_and_gradients(output: Augmented, hidden_ND: Tensor, targets_N: Tensor, autocast: bool = False) -> list[Tensor]:
    """Return the augmented loss and its gradients for the hidden states and the tables, converted to float64."""
    hidden_ND = hidden_ND.detach().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = augmented_loss(output, hidden_ND, targets_N)
    assert loss.dtype == hidden_ND.dtype
    return [tensor.double() for tensor in (loss, *torch.autograd.grad(loss, [hidden_ND, *output.parameters()]))]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16 autocast"])
@pytest.mark.parametrize("tau", [10.0, 40.0])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_float32_and_bfloat16_losses_are_close_to_float64(tie: bool, tau: float, autocast: bool) -> None:
    """The vectors have a large mean, like trained vectors, so terms of the loss are much larger than the loss.

    In bfloat16 the error must be no larger than the rounding of the vectors.
    """
    torch.manual_seed(3)
    words = WordTable(2_000, 64)
    classes = words if tie else WordTable(2_000, 64)
    output = Augmented(Plain(classes, bias=False), words, tau=tau, beta=1.0)
    with torch.no_grad():
        for table in output.parameters():
            table.mul_(2).add_(torch.randn(64))
    hidden_ND, targets_N = torch.randn(64, 64), torch.randint(2_000, (64,))
    actual = loss_and_gradients(output, hidden_ND, targets_N, autocast)
    expected = loss_and_gradients(output.double(), hidden_ND.double(), targets_N)
    loss, *gradients = (((a - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True))
    assert loss < (1e-3 if autocast else 2e-4)
    assert max(gradients) < (5e-3 if autocast else 1.5e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": None}, "one of alpha, gamma .* and beta; none is given"),
        ({"alpha": 1.0}, "alpha and gamma are given"),
        ({"gamma": -0.5}, "gamma = -0.5: must be 0 or greater"),
        ({"gamma": None, "beta": 1.5}, "beta = 1.5: must be from 0 to 1"),
        ({"tau": 0.0}, "tau = 0.0: must be greater than 0"),
    ],
)
def test_invalid_settings_are_rejected(settings: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        tied(**settings)


def test_mismatched_table_is_rejected() -> None:
    classifier = Plain(WordTable(WORDS, CONTEXT_DIM))
    with pytest.raises(SettingsError, match="12 words but the classifier has 11 classes"):
        Augmented(classifier, WordTable(12, CONTEXT_DIM), gamma=0.5)
    with pytest.raises(SettingsError, match="a BandedTable is not one"):
        Augmented(classifier, BandedTable(WORDS, 8, sizes=[4]), gamma=0.5)  # type: ignore[arg-type]


def test_gradients_are_bitwise_equal_with_several_threads() -> None:
    """Many rows share a target; if the order of their sum varied, equal runs would differ."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    table = WordTable(500, 64)
    output = Augmented(Plain(table), table, gamma=0.5)
    hidden_ND, targets_N = torch.randn(2000, 64), torch.randint(20, (2000,))
    gradients = []
    try:
        torch.set_num_threads(2)
        for _ in range(8):
            output.zero_grad()
            output.loss(hidden_ND, targets_N, output.prepare(targets_N))["augmented"].sum.backward()
            assert table.weight.grad is not None
            gradients.append(table.weight.grad.clone())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
