"""The augmented loss against the paper's formulas, written out over the whole vocabulary.

Shapes: N rows, D width, V classes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.kernels.linear_cross_entropy import IGNORE
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.classifiers.projected import Projected
from reefknot.nn.outputs.augmented import FILL, Augmented
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, WordTable

WORDS, CONTEXT, TAU = 11, 6, 3.0
TARGETS = torch.tensor([3, 0, IGNORE, 10, 3, IGNORE, 7, 3])
SCORED = TARGETS != IGNORE


def drawn(output: Augmented) -> Augmented:
    """In float64, every parameter drawn, so that no bias is zero."""
    torch.manual_seed(0)
    output = output.double()
    with torch.no_grad():
        for parameter in output.parameters():
            parameter.normal_()
    return output


def tied(**settings: Any) -> Augmented:
    table = WordTable(WORDS, CONTEXT)
    return drawn(Augmented(Plain(table), table, **{"tau": TAU, "gamma": 0.5} | settings))


def untied(**settings: Any) -> Augmented:
    """Class vectors and input vectors of different widths."""
    classifier = Projected(WordTable(WORDS, 4), CONTEXT)
    return drawn(Augmented(classifier, WordTable(WORDS, 5), **{"tau": TAU, "gamma": 0.5} | settings))


def hidden(rows: int = len(TARGETS)) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, CONTEXT, dtype=torch.float64, requires_grad=True)


def augmented(output: Augmented, h_ND: Tensor, y_N: Tensor = TARGETS) -> Tensor:
    return output.loss(h_ND, y_N, output.prepare(y_N))["augmented"].sum


def written_out(output: Augmented, h_ND: Tensor) -> Tensor:
    """KL(soft target || soft prediction) of the whole distributions, one row per token."""
    l_VD = output.table.weight
    student_NV = torch.log_softmax(output.classifier.context(h_ND) @ output.classifier.weight().T / output.tau, -1)[
        SCORED
    ]
    target_NV = torch.log_softmax(l_VD[TARGETS[SCORED]] @ l_VD.T / output.tau, -1)
    if output.detach_target:
        target_NV = target_NV.detach()
    return F.kl_div(student_NV, target_NV, reduction="sum", log_target=True)


@pytest.mark.parametrize("detach_target", [False, True])
@pytest.mark.parametrize("make", [tied, untied])
def test_it_is_the_divergence_of_the_whole_distributions(make: Any, detach_target: bool) -> None:
    output, h_ND = make(detach_target=detach_target), hidden()
    found, expected = augmented(output, h_ND), written_out(output, h_ND)
    torch.testing.assert_close(found, expected)
    wanted = {"h": h_ND, **dict(output.named_parameters())}
    gradients = [torch.autograd.grad(each, list(wanted.values()), allow_unused=True) for each in (found, expected)]
    seen = set()
    for name, got, want in zip(wanted, *gradients, strict=True):
        # What has no part in the formula gets no gradient, or zero.
        torch.testing.assert_close(*(g if g is not None else torch.zeros_like(wanted[name]) for g in (got, want)))
        if want is not None:
            seen.add(name)
    assert "classifier.bias" not in seen
    assert ("table.weight" in seen) == (make is untied and not detach_target)


def test_detaching_cuts_the_target_and_not_the_labels() -> None:
    output = untied(detach_target=True)
    augmented(output, hidden()).backward()
    assert output.table.weight.grad is None
    assert output.classifier.table.weight.grad is not None
    assert output.classifier.table.weight.grad.any()


def logits_and_soft_targets(tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient with respect to the student's logits, the logits, and the scores of the soft target.

    Class vectors that are the unit vectors make the context the logits.
    """
    torch.manual_seed(2)
    units = WordTable(WORDS, WORDS)
    output = Augmented(Plain(units, bias=False), WordTable(WORDS, 4), tau=tau, alpha=1.0).double()
    with torch.no_grad():
        units.weight.copy_(torch.eye(WORDS))
        output.table.weight.normal_()
    z_NV = torch.randn(len(TARGETS), WORDS, dtype=torch.float64, requires_grad=True)
    augmented(output, z_NV).backward()
    assert z_NV.grad is not None
    l_VD = output.table.weight.detach()
    return z_NV.grad[SCORED], z_NV.detach()[SCORED], l_VD[TARGETS[SCORED]] @ l_VD.T


def test_gradient_of_the_logits_is_the_difference_of_the_distributions() -> None:
    gradient_NV, z_NV, t_NV = logits_and_soft_targets(TAU)
    expected_NV = (torch.softmax(z_NV / TAU, -1) - torch.softmax(t_NV / TAU, -1)) / TAU
    torch.testing.assert_close(gradient_NV, expected_NV)


def test_at_a_high_temperature_it_matches_logits() -> None:
    tau = 1e4
    gradient_NV, z_NV, t_NV = logits_and_soft_targets(tau)
    difference_NV = (z_NV - z_NV.mean(-1, keepdim=True)) - (t_NV - t_NV.mean(-1, keepdim=True))
    torch.testing.assert_close(gradient_NV * tau**2 * WORDS, difference_NV, rtol=0.0, atol=5e-3)


def test_it_is_zero_where_the_prediction_is_the_soft_target() -> None:
    output = tied()
    h_ND = output.table.weight.detach()[TARGETS.clamp(min=0)]
    assert augmented(output, h_ND).item() == pytest.approx(0.0, abs=1e-12)
    assert augmented(output, hidden()) > 0.1


@pytest.mark.parametrize(
    ("settings", "nll_weight", "augmented_weight"),
    [
        ({"alpha": 13.0, "gamma": None}, 1.0, 13.0),
        ({"gamma": 0.5}, 1.0, 0.5 * TAU),
        ({"beta": 0.25, "gamma": None}, 0.75, 0.25 * TAU**2 * WORDS),
        ({"beta": 1.0, "gamma": None}, 0.0, TAU**2 * WORDS),
    ],
)
def test_weights_are_apart_from_the_sums(settings: Any, nll_weight: float, augmented_weight: float) -> None:
    output, h_ND = tied(**settings), hidden()
    parts = output.loss(h_ND, TARGETS, output.prepare(TARGETS))
    assert list(parts) == ["nll", "augmented"]
    assert (parts["nll"].weight, parts["augmented"].weight) == pytest.approx((nll_weight, augmented_weight))
    assert parts["nll"].count == parts["augmented"].count == 6
    torch.testing.assert_close(parts["nll"].sum, -Softmax(output.classifier).target_log_probs(h_ND, TARGETS).sum())
    torch.testing.assert_close(parts["augmented"].sum, written_out(output, h_ND))


def test_only_the_likelihood_knows_the_bias() -> None:
    output, h_ND = tied(), hidden()
    before = output.loss(h_ND, TARGETS, output.prepare(TARGETS))
    with torch.no_grad():
        output.classifier.bias[3] += 5.0
    after = output.loss(h_ND, TARGETS, output.prepare(TARGETS))
    assert torch.equal(after["augmented"].sum, before["augmented"].sum)
    assert not torch.allclose(after["nll"].sum, before["nll"].sum)


def test_log_probs_and_tables_are_those_of_the_plain_softmax() -> None:
    output, h_ND = untied(), hidden()
    assert torch.equal(output.log_probs(h_ND), Softmax(output.classifier).log_probs(h_ND))
    assert [id(table) for table in output.tables()] == [id(output.classifier.table)]


def test_the_plan_has_each_target_once_whatever_the_shape() -> None:
    output = tied()
    plan = output.prepare(TARGETS.view(2, 4))
    assert plan.targets.tolist() == [0, 3, 7, 10, *[0] * (FILL - 4)], "few lengths, so that steps can be captured"
    assert plan.rows.tolist() == [0, 1, 3, 4, 6, 7]
    assert torch.equal(plan.targets[plan.positions], TARGETS[SCORED])
    assert plan.count == 6


@pytest.mark.parametrize(("distinct", "length"), [(0, 0), (1, 32), (31, 32), (32, 32), (33, 64)])
def test_targets_come_in_few_numbers(distinct: int, length: int) -> None:
    table = WordTable(40, CONTEXT)
    plan = Augmented(Plain(table), table, gamma=0.5).prepare(torch.arange(distinct))
    assert len(plan.targets) == length


def test_pieces_of_an_update_have_as_many_targets() -> None:
    table = WordTable(40, CONTEXT)
    pieces = [torch.arange(3), torch.arange(33), torch.full((4,), IGNORE), torch.tensor([IGNORE, 5])]
    plans = Augmented(Plain(table), table, gamma=0.5).prepare_micro_batches(pieces)
    assert [len(plan.targets) for plan in plans] == [64, 64, 0, 64]
    assert [plan.count for plan in plans] == [3, 33, 0, 1]
    for piece, plan in zip(pieces, plans, strict=True):
        assert torch.equal(plan.targets[plan.positions], piece[piece != IGNORE])


@pytest.mark.parametrize("make", [tied, untied])
def test_what_fills_up_the_targets_changes_nothing(make: Any) -> None:
    output, h_ND = make(), hidden()
    plan = output.prepare(TARGETS)
    found = []
    for each in (plan, replace(plan, targets=plan.targets[:4])):
        loss = output.loss(h_ND, TARGETS, each)["augmented"].sum
        found.append([loss, *torch.autograd.grad(loss, [h_ND, *output.parameters()], materialize_grads=True)])
    torch.testing.assert_close(*found)


def test_ignored_rows_send_nothing_and_all_may_be_ignored() -> None:
    output, h_ND = untied(), hidden()
    augmented(output, h_ND).backward()
    assert h_ND.grad is not None
    assert not h_ND.grad[~SCORED].any()
    assert h_ND.grad[SCORED].any(-1).all()
    output.zero_grad()
    nothing = torch.full_like(TARGETS, IGNORE)
    parts = output.loss(h_ND, nothing, output.prepare(nothing))
    assert [(part.sum.item(), part.count) for part in parts.values()] == [(0.0, 0), (0.0, 0)]
    torch.stack([part.sum for part in parts.values()]).sum().backward()
    # Other processes wait for a gradient of every parameter.
    assert all(p.grad is not None and not p.grad.any() for p in output.parameters())


def with_gradients(output: Augmented, h_ND: Tensor, y_N: Tensor, autocast: bool = False) -> list[Tensor]:
    """The augmented loss and what it sends to the hidden states and to each table, in float64."""
    h_ND = h_ND.detach().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = augmented(output, h_ND, y_N)
    assert loss.dtype == h_ND.dtype
    return [each.double() for each in (loss, *torch.autograd.grad(loss, [h_ND, *output.parameters()]))]


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16 autocast"])
@pytest.mark.parametrize("tau", [10.0, 40.0])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_the_small_difference_of_large_terms_keeps_its_digits(tie: bool, tau: float, autocast: bool) -> None:
    """Its gradient too, and although the vectors have a large mean, as trained ones do. In half precision no more is
    lost than the rounding of the vectors themselves."""
    torch.manual_seed(3)
    words = WordTable(2_000, 64)
    classes = words if tie else WordTable(2_000, 64)
    output = Augmented(Plain(classes, bias=False), words, tau=tau, beta=1.0)
    with torch.no_grad():
        for table in output.parameters():
            table.mul_(2).add_(torch.randn(64))
    h_ND, y_N = torch.randn(64, 64), torch.randint(2_000, (64,))
    found = with_gradients(output, h_ND, y_N, autocast)
    expected = with_gradients(output.double(), h_ND.double(), y_N)
    loss, *gradients = (((got - want).norm() / want.norm()).item() for got, want in zip(found, expected, strict=True))
    assert loss < (1e-3 if autocast else 2e-4)
    assert max(gradients) < (5e-3 if autocast else 1.5e-5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"gamma": None}, "one of alpha, gamma .* and beta; none is given"),
        ({"alpha": 1.0}, "alpha and gamma are given"),
        ({"gamma": -0.5}, "gamma = -0.5: must be 0 or greater"),
        ({"gamma": None, "beta": 1.5}, "beta = 1.5: must be from 0 to 1"),
        ({"tau": 0.0}, "tau = 0.0: must be greater than 0"),
    ],
)
def test_impossible_settings_are_refused(settings: Any, sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        tied(**settings)


def test_a_table_that_does_not_fit_is_refused() -> None:
    classifier = Plain(WordTable(WORDS, CONTEXT))
    with pytest.raises(SettingsError, match="12 words but the classifier has 11 classes"):
        Augmented(classifier, WordTable(12, CONTEXT), gamma=0.5)
    with pytest.raises(SettingsError, match="a BandedTable is not one"):
        Augmented(classifier, BandedTable(WORDS, 8, sizes=[4]), gamma=0.5)  # type: ignore[arg-type]


def test_gradients_are_equal_to_the_bit_with_several_threads() -> None:
    """Many rows share a target; adding them up in any order would make two runs differ."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    table = WordTable(500, 64)
    output = Augmented(Plain(table), table, gamma=0.5)
    h_ND, y_N = torch.randn(2000, 64), torch.randint(20, (2000,))
    found = []
    try:
        torch.set_num_threads(2)
        for _ in range(8):
            output.zero_grad()
            output.loss(h_ND, y_N, output.prepare(y_N))["augmented"].sum.backward()
            assert table.weight.grad is not None
            found.append(table.weight.grad.clone())
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(each, found[0]) for each in found)
