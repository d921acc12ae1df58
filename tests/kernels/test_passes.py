"""Losses and gradients in blocks against all scores at once: every layout, every type, odd shapes.

Shapes: N rows, D width, V classes, K experts of a mixture.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from reefknot.kernels.choice import using
from reefknot.kernels.linear_cross_entropy import row_losses, summed_loss
from reefknot.kernels.passes import LossInputs
from reefknot.kernels.scores import Scores

from .dense import IGNORE, MEMORY, Problem, dense_losses, furthest, off, problem

SHAPES = list(itertools.product((1, 7, 140), (1, 25, 64, 103), (2, 3, 257, 1031)))

shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def summed(p: Problem) -> Tensor:
    return summed_loss(p.h, p.w, p.b, p.y)


def weighed(losses: tuple[Tensor | None, ...]) -> Tensor:
    """A sum of everything that comes back, each row with weights of its own, of either sign."""
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros((), dtype=torch.float64)
    for each in losses:
        assert each is not None
        total = total + (torch.randn(len(each), generator=generator, dtype=torch.float64) * each).sum()
    return total


def test_the_budgets_reach_every_layout() -> None:
    layouts = set()
    for (rows, width, classes), memory in itertools.product(SHAPES, MEMORY):
        p = problem(rows, width, classes)
        blocks = LossInputs(p.h, p.w, p.b, p.y, torch.float64, Scores(), int(memory * 2**20)).blocks()
        layouts.add((blocks.rows < rows, blocks.classes < classes))
    assert layouts == {(False, False), (True, False), (False, True), (True, True)}


@shapes
def test_sums_in_float64(shape: tuple[int, int, int]) -> None:
    for bias in (True, False):
        p = problem(*shape, bias)
        exact = dense_losses(p)[0].sum()
        gradients = p.gradients(exact)
        for memory in MEMORY:
            with using(memory=memory):
                found = summed(p)
            assert off(found, exact) < 1e-12, (bias, memory)
            assert furthest(p.gradients(found), gradients) < 1e-12, (bias, memory)


@shapes
def test_rows_in_float64(shape: tuple[int, int, int]) -> None:
    for bias in (True, False):
        p = problem(*shape, bias)
        exact = dense_losses(p, tau=5.0)
        gradients = p.gradients(weighed(exact))
        for memory in MEMORY:
            with using(memory=memory):
                found = row_losses(p.h, p.w, p.b, p.y, tau=5.0)
                assert furthest(found, exact) < 1e-12, (bias, memory)
                assert furthest(p.gradients(weighed(found)), gradients) < 1e-12, (bias, memory)


@pytest.mark.parametrize("tau", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("memory", MEMORY)
def test_tempered_normalisers_leave_out_bias_and_mean(tau: float, memory: float) -> None:
    start = problem(140, 25, 1031)
    p = Problem(start.h, (start.w.detach() + 3).requires_grad_(), start.b, start.y)
    exact = dense_losses(p, tau)[2]
    with using(memory=memory):
        found = row_losses(p.h, p.w, p.b, p.y, tau)
        assert found.lse_tau is not None
        assert off(found.lse_tau, exact) < 1e-12
        gradients = torch.autograd.grad(found.lse_tau.square().sum(), p.leaves)
        expected = torch.autograd.grad(exact.square().sum(), [p.h, p.w])
        assert furthest(gradients[:2], expected) < 1e-11
        assert not gradients[2].any()
        alone = row_losses(p.h, p.w, p.b, p.y)
    assert alone.lse_tau is None
    assert furthest(alone[:2], (found.nll, found.lse)) < 1e-13


@shapes
def test_float32_keeps_its_digits(shape: tuple[int, int, int]) -> None:
    exact = problem(*shape).to(torch.float32).to(torch.float64)
    p = exact.to(torch.float32)
    loss, rows = dense_losses(exact)[0].sum(), dense_losses(exact, tau=20.0)
    of_loss, of_rows = exact.gradients(loss), exact.gradients(weighed(rows))
    for memory in MEMORY:
        with using(memory=memory):
            found = summed(p)
            assert found.dtype == torch.float32
            assert off(found, loss) < 2e-6, memory
            assert furthest(p.gradients(found), of_loss) < 2e-6, memory
            found_rows = row_losses(p.h, p.w, p.b, p.y, tau=20.0)
            assert furthest(found_rows, rows) < 2e-6, memory
            # Weights of either sign: what they send may cancel, down to one digit.
            assert furthest(p.gradients(weighed(found_rows)), of_rows) < 1e-5, memory


@pytest.mark.parametrize("shape", [(7, 64, 257), (140, 25, 1031), (140, 103, 1031)])
@pytest.mark.parametrize("memory", MEMORY)
def test_autocast_rounds_products_and_nothing_else(shape: tuple[int, int, int], memory: float) -> None:
    exact = problem(*shape)
    p = exact.to(torch.float32)
    loss, rows = dense_losses(exact)[0].sum(), dense_losses(exact, tau=5.0)
    with using(memory=memory), torch.autocast("cpu", dtype=torch.bfloat16):
        found, found_rows = summed(p), row_losses(p.h, p.w, p.b, p.y, tau=5.0)
    for each in (found, *found_rows):
        assert each is not None
        assert each.dtype == torch.float32
    assert off(found, loss) < 1e-3
    assert furthest(p.gradients(found), exact.gradients(loss)) < 1e-2
    assert furthest(found_rows, rows) < 1e-2
    assert furthest(p.gradients(weighed(found_rows)), exact.gradients(weighed(rows))) < 1e-2


@pytest.mark.parametrize("memory", MEMORY)
def test_a_large_mean_of_the_classes_costs_a_tempered_softmax_no_digits(memory: float) -> None:
    start = problem(140, 64, 1031)
    exact = Problem(start.h, (start.w.detach() + 3).requires_grad_(), start.b, start.y)
    p = exact.to(torch.float32)
    by_definition = dense_losses(exact, tau=20.0)[2].sum()
    with using(memory=memory), torch.autocast("cpu", dtype=torch.bfloat16):
        found = row_losses(p.h, p.w, p.b, p.y, tau=20.0).lse_tau
    assert found is not None
    gradients = torch.autograd.grad(found.sum(), [p.h, p.w])
    assert furthest(gradients, torch.autograd.grad(by_definition, [exact.h, exact.w])) < 1e-2


def test_no_row_of_rounded_products_is_more_than_certain() -> None:
    p = problem(500, 64, 100, bias=False, ignored=False).to(torch.float32)
    sharp = Problem(p.h, p.w * 8, None, (p.h @ p.w.T).argmax(-1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, together = row_losses(sharp.h, sharp.w, None, sharp.y).nll, summed(sharp)
    assert found.min() >= -1e-5
    torch.testing.assert_close(found.sum(), together, rtol=1e-5, atol=1e-5)


def test_differences_confirm_the_gradients_of_rows() -> None:
    p = problem(3, 4, 6)

    def every(h_ND: Tensor, w_VD: Tensor, b_V: Tensor) -> list[Tensor]:
        losses = row_losses(h_ND, w_VD, b_V, torch.tensor([5, IGNORE, 1]), tau=0.7)
        return [each for each in losses if each is not None]

    for memory in MEMORY:
        with using(memory=memory):
            assert torch.autograd.gradcheck(every, tuple(p.leaves))


def test_differences_confirm_the_gradients_of_sums() -> None:
    p = problem(6, 4, 6)
    log_prior_NK = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def mixture(h_ND: Tensor, w_VD: Tensor, b_V: Tensor, log_prior_NK: Tensor) -> Tensor:
        return summed_loss(h_ND, w_VD, b_V, torch.tensor([5, IGNORE, 1]), log_prior_NK)

    for memory in MEMORY:
        with using(memory=memory):
            assert torch.autograd.gradcheck(mixture, (*p.leaves, log_prior_NK))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("experts", [1, 3, 70])
def test_a_mixture_is_a_logsumexp_over_its_experts(memory: float, experts: int) -> None:
    p = problem(6 * experts, 25, 1031, ignored=False)
    y_N = torch.tensor([5, 0, IGNORE, 1030, 5, IGNORE])
    log_prior_NK = torch.randn(6, experts, dtype=torch.float64).log_softmax(-1).requires_grad_()
    spread = Problem(p.h, p.w, p.b, y_N.repeat_interleave(experts))
    nll_NK = dense_losses(spread)[0].view(6, experts)
    exact = -torch.logsumexp(log_prior_NK - nll_NK, dim=-1).where(y_N != IGNORE, 0.0).sum()
    leaves = [*p.leaves, log_prior_NK]
    gradients = list(torch.autograd.grad(exact, leaves))
    with using(memory=memory):
        found = summed_loss(p.h, p.w, p.b, y_N, log_prior_NK)
        assert off(found, exact) < 1e-12
        assert furthest(list(torch.autograd.grad(found, leaves)), gradients) < 1e-12
        with torch.no_grad():
            assert off(summed_loss(p.h, p.w, p.b, y_N, log_prior_NK), exact) < 1e-12


@pytest.mark.parametrize("memory", MEMORY)
def test_ignored_rows_cost_nothing_and_send_nothing(memory: float) -> None:
    p = problem(140, 25, 1031)
    nobody = Problem(p.h, p.w, p.b, torch.full((140,), IGNORE))
    with using(memory=memory):
        for loss in (summed(nobody), row_losses(nobody.h, nobody.w, nobody.b, nobody.y).nll.sum()):
            assert loss.item() == 0
            assert not any(gradient.any() for gradient in p.gradients(loss))
        nll_N = row_losses(p.h, p.w, p.b, p.y).nll
        dh_ND = p.gradients(summed(p))[0]
    assert not nll_N[p.y == IGNORE].any()
    assert not dh_ND[p.y == IGNORE].any()
    assert dh_ND[p.y != IGNORE].any(-1).all()


@pytest.mark.parametrize("memory", MEMORY)
def test_rows_that_share_a_target(memory: float) -> None:
    p = problem(140, 25, 1031)
    same = Problem(p.h, p.w, p.b, torch.full((140,), 1030))
    exact = dense_losses(same)[0].sum()
    with using(memory=memory):
        found = summed(same)
        assert furthest(p.gradients(found), p.gradients(exact)) < 1e-12


def test_no_rows_cost_nothing_and_keep_the_graph() -> None:
    w_VD, b_V = torch.randn(3, 2, requires_grad=True), torch.randn(3, requires_grad=True)
    h_ND, y_N = torch.zeros(0, 2, requires_grad=True), torch.zeros(0, dtype=torch.long)
    rows = row_losses(h_ND, w_VD, b_V, y_N, tau=2.0)
    assert [each.shape for each in rows if each is not None] == [(0,)] * 3
    mixture = summed_loss(h_ND, w_VD, b_V, y_N, torch.zeros(0, 4))
    for loss in (rows.nll.sum(), summed_loss(h_ND, w_VD, b_V, y_N), mixture):
        assert loss.item() == 0
        for leaf, gradient in zip((h_ND, w_VD, b_V), torch.autograd.grad(loss, (h_ND, w_VD, b_V)), strict=True):
            assert gradient.shape == leaf.shape
            assert not gradient.any()
    with torch.no_grad():
        assert summed_loss(h_ND, w_VD, b_V, y_N).item() == 0


def test_one_class_is_certain() -> None:
    h_ND, w_VD, b_V = torch.randn(3, 2), torch.randn(1, 2), torch.randn(1)
    assert row_losses(h_ND, w_VD, b_V, torch.tensor([0, 0, IGNORE])).nll.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", MEMORY)
def test_extreme_scores(dtype: torch.dtype, memory: float) -> None:
    h_ND = torch.tensor([[1.0], [-1.0], [1.0]], dtype=dtype, requires_grad=True)
    w_VD = torch.tensor([[1e4], [-1e4], *[[0.0]] * 400], dtype=dtype, requires_grad=True)
    y_N = torch.tensor([0, 0, 1])
    with using(memory=memory):
        rows = row_losses(h_ND, w_VD, None, y_N, tau=1.0)
        assert rows.lse_tau is not None
        assert rows.nll.tolist() == [0.0, 2e4, 2e4]
        assert rows.lse.tolist() == rows.lse_tau.tolist() == [1e4] * 3
        for loss in (rows.nll.sum(), summed_loss(h_ND, w_VD, None, y_N)):
            dh_ND, dw_VD = torch.autograd.grad(loss, (h_ND, w_VD))
            assert loss.item() == 4e4
            # All the probability is at class 0 or 1: row 0 is certain, and right; the others are certain, and wrong.
            assert dh_ND[:, 0].tolist() == [0.0, -2e4, 2e4]
            assert dw_VD[:2, 0].tolist() == [2.0, -2.0]
            assert not dw_VD[2:].any()
