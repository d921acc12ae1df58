"""Losses and gradients in blocks equal those of all scores at once, for every layout, dtype and odd shapes.

Shapes: N rows, D dimensions, V classes, K experts of a mixture.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from reefknot.kernels import losses
from reefknot.kernels.choice import using
from reefknot.kernels.losses import row_losses, summed_loss
from reefknot.kernels.passes import LossInputs
from reefknot.kernels.scores import TorchBackend

from .dense import IGNORE, MEMORY, Problem, dense_losses, largest_error, problem, relative_error

SHAPES = list(itertools.product((1, 7, 140), (1, 25, 64, 103), (2, 3, 257, 1031)))

shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def summed(p: Problem) -> Tensor:
    return summed_loss(p.h, p.w, p.b, p.y)


def weighted_sum(losses: tuple[Tensor | None, ...]) -> Tensor:
    """Return a sum of all outputs, with a random weight for every row."""
    generator = torch.Generator().manual_seed(3)
    total = torch.zeros((), dtype=torch.float64)
    for row_losses_N in losses:
        assert row_losses_N is not None
        total = total + (torch.randn(len(row_losses_N), generator=generator, dtype=torch.float64) * row_losses_N).sum()
    return total


def test_memory_budgets_cover_every_block_layout() -> None:
    layouts = set()
    for (rows, dim, classes), memory in itertools.product(SHAPES, MEMORY):
        p = problem(rows, dim, classes)
        blocks = LossInputs(p.h, p.w, p.b, p.y, torch.float64, TorchBackend(), int(memory * 2**20)).block_size()
        layouts.add((blocks.rows < rows, blocks.classes < classes))
    assert layouts == {(False, False), (True, False), (False, True), (True, True)}


@shapes
def test_summed_loss_matches_dense_in_float64(shape: tuple[int, int, int]) -> None:
    for bias in (True, False):
        p = problem(*shape, bias)
        exact = dense_losses(p)[0].sum()
        gradients = p.gradients(exact)
        for memory in MEMORY:
            with using(memory=memory):
                actual = summed(p)
            assert relative_error(actual, exact) < 1e-12, (bias, memory)
            assert largest_error(p.gradients(actual), gradients) < 1e-12, (bias, memory)


@shapes
def test_row_losses_match_dense_in_float64(shape: tuple[int, int, int]) -> None:
    for bias in (True, False):
        p = problem(*shape, bias)
        exact = dense_losses(p, tau=5.0)
        gradients = p.gradients(weighted_sum(exact))
        for memory in MEMORY:
            with using(memory=memory):
                actual = row_losses(p.h, p.w, p.b, p.y, tau=5.0)
                assert largest_error(actual, exact) < 1e-12, (bias, memory)
                assert largest_error(p.gradients(weighted_sum(actual)), gradients) < 1e-12, (bias, memory)


@pytest.mark.parametrize("tau", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("memory", MEMORY)
def test_tempered_log_normaliser_excludes_bias_and_mean(tau: float, memory: float) -> None:
    start = problem(140, 25, 1031)
    p = Problem(start.h, (start.w.detach() + 3).requires_grad_(), start.b, start.y)
    exact = dense_losses(p, tau)[2]
    with using(memory=memory):
        actual = row_losses(p.h, p.w, p.b, p.y, tau)
        assert actual.lse_tau is not None
        assert relative_error(actual.lse_tau, exact) < 1e-12
        gradients = torch.autograd.grad(actual.lse_tau.square().sum(), p.leaves)
        expected = torch.autograd.grad(exact.square().sum(), [p.h, p.w])
        assert largest_error(gradients[:2], expected) < 1e-11
        assert not gradients[2].any()
        untempered = row_losses(p.h, p.w, p.b, p.y)
    assert untempered.lse_tau is None
    assert largest_error(untempered[:2], (actual.nll, actual.lse)) < 1e-13


@shapes
def test_float32_losses_and_gradients_are_accurate(shape: tuple[int, int, int]) -> None:
    exact = problem(*shape).to(torch.float32).to(torch.float64)
    p = exact.to(torch.float32)
    loss, rows = dense_losses(exact)[0].sum(), dense_losses(exact, tau=20.0)
    loss_gradients, row_gradients = exact.gradients(loss), exact.gradients(weighted_sum(rows))
    for memory in MEMORY:
        with using(memory=memory):
            actual = summed(p)
            assert actual.dtype == torch.float32
            assert relative_error(actual, loss) < 2e-6, memory
            assert largest_error(p.gradients(actual), loss_gradients) < 2e-6, memory
            actual_rows = row_losses(p.h, p.w, p.b, p.y, tau=20.0)
            assert largest_error(actual_rows, rows) < 2e-6, memory
            # Weights of both signs may cancel, which costs digits.
            assert largest_error(p.gradients(weighted_sum(actual_rows)), row_gradients) < 1e-5, memory


@pytest.mark.parametrize("shape", [(7, 64, 257), (140, 25, 1031), (140, 103, 1031)])
@pytest.mark.parametrize("memory", MEMORY)
def test_autocast_rounds_only_the_products(shape: tuple[int, int, int], memory: float) -> None:
    exact = problem(*shape)
    p = exact.to(torch.float32)
    loss, rows = dense_losses(exact)[0].sum(), dense_losses(exact, tau=5.0)
    with using(memory=memory), torch.autocast("cpu", dtype=torch.bfloat16):
        actual, actual_rows = summed(p), row_losses(p.h, p.w, p.b, p.y, tau=5.0)
    for output in (actual, *actual_rows):
        assert output is not None
        assert output.dtype == torch.float32
    assert relative_error(actual, loss) < 1e-3
    assert largest_error(p.gradients(actual), exact.gradients(loss)) < 1e-2
    assert largest_error(actual_rows, rows) < 1e-2
    assert largest_error(p.gradients(weighted_sum(actual_rows)), exact.gradients(weighted_sum(rows))) < 1e-2


@pytest.mark.parametrize("memory", MEMORY)
def test_tempered_softmax_is_accurate_for_large_class_means(memory: float) -> None:
    start = problem(140, 64, 1031)
    exact = Problem(start.h, (start.w.detach() + 3).requires_grad_(), start.b, start.y)
    p = exact.to(torch.float32)
    by_definition = dense_losses(exact, tau=20.0)[2].sum()
    with using(memory=memory), torch.autocast("cpu", dtype=torch.bfloat16):
        actual = row_losses(p.h, p.w, p.b, p.y, tau=20.0).lse_tau
    assert actual is not None
    gradients = torch.autograd.grad(actual.sum(), [p.h, p.w])
    assert largest_error(gradients, torch.autograd.grad(by_definition, [exact.h, exact.w])) < 1e-2


def test_rounded_products_give_no_negative_losses() -> None:
    p = problem(500, 64, 100, bias=False, ignored=False).to(torch.float32)
    sharp = Problem(p.h, p.w * 8, None, (p.h @ p.w.T).argmax(-1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, total = row_losses(sharp.h, sharp.w, None, sharp.y).nll, summed(sharp)
    assert losses.min() >= -1e-5
    torch.testing.assert_close(losses.sum(), total, rtol=1e-5, atol=1e-5)


def test_row_losses_pass_gradcheck() -> None:
    p = problem(3, 4, 6)

    def all_losses(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor) -> list[Tensor]:
        losses = row_losses(hidden_ND, weight_VD, bias_V, torch.tensor([5, IGNORE, 1]), tau=0.7)
        return [output for output in losses if output is not None]

    for memory in MEMORY:
        with using(memory=memory):
            assert torch.autograd.gradcheck(all_losses, tuple(p.leaves))


def test_mixture_loss_passes_gradcheck() -> None:
    p = problem(6, 4, 6)
    log_prior_NK = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def mixture(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, log_prior_NK: Tensor) -> Tensor:
        return summed_loss(hidden_ND, weight_VD, bias_V, torch.tensor([5, IGNORE, 1]), log_prior_NK)

    for memory in MEMORY:
        with using(memory=memory):
            assert torch.autograd.gradcheck(mixture, (*p.leaves, log_prior_NK))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("experts", [1, 3, 70])
def test_mixture_loss_is_a_logsumexp_over_experts(memory: float, experts: int) -> None:
    p = problem(6 * experts, 25, 1031, ignored=False)
    targets_N = torch.tensor([5, 0, IGNORE, 1030, 5, IGNORE])
    log_prior_NK = torch.randn(6, experts, dtype=torch.float64).log_softmax(-1).requires_grad_()
    spread = Problem(p.h, p.w, p.b, targets_N.repeat_interleave(experts))
    nll_NK = dense_losses(spread)[0].view(6, experts)
    exact = -torch.logsumexp(log_prior_NK - nll_NK, dim=-1).where(targets_N != IGNORE, 0.0).sum()
    leaves = [*p.leaves, log_prior_NK]
    gradients = list(torch.autograd.grad(exact, leaves))
    with using(memory=memory):
        actual = summed_loss(p.h, p.w, p.b, targets_N, log_prior_NK)
        assert relative_error(actual, exact) < 1e-12
        assert largest_error(list(torch.autograd.grad(actual, leaves)), gradients) < 1e-12
        with torch.no_grad():
            assert relative_error(summed_loss(p.h, p.w, p.b, targets_N, log_prior_NK), exact) < 1e-12


@pytest.mark.parametrize("memory", MEMORY)
def test_ignored_rows_have_zero_loss_and_gradients(memory: float) -> None:
    p = problem(140, 25, 1031)
    ignored = Problem(p.h, p.w, p.b, torch.full((140,), IGNORE))
    with using(memory=memory):
        for loss in (summed(ignored), row_losses(ignored.h, ignored.w, ignored.b, ignored.y).nll.sum()):
            assert loss.item() == 0
            assert not any(gradient.any() for gradient in p.gradients(loss))
        nll_N = row_losses(p.h, p.w, p.b, p.y).nll
        grad_hidden_ND = p.gradients(summed(p))[0]
    assert not nll_N[p.y == IGNORE].any()
    assert not grad_hidden_ND[p.y == IGNORE].any()
    assert grad_hidden_ND[p.y != IGNORE].any(-1).all()


@pytest.mark.parametrize("memory", MEMORY)
def test_rows_with_the_same_target_add_their_gradients(memory: float) -> None:
    p = problem(140, 25, 1031)
    same = Problem(p.h, p.w, p.b, torch.full((140,), 1030))
    exact = dense_losses(same)[0].sum()
    with using(memory=memory):
        actual = summed(same)
        assert largest_error(p.gradients(actual), p.gradients(exact)) < 1e-12


def test_zero_rows_give_zero_loss_and_gradients() -> None:
    weight_VD, bias_V = torch.randn(3, 2, requires_grad=True), torch.randn(3, requires_grad=True)
    hidden_ND, targets_N = torch.zeros(0, 2, requires_grad=True), torch.zeros(0, dtype=torch.long)
    rows = row_losses(hidden_ND, weight_VD, bias_V, targets_N, tau=2.0)
    assert [output.shape for output in rows if output is not None] == [(0,)] * 3
    mixture = summed_loss(hidden_ND, weight_VD, bias_V, targets_N, torch.zeros(0, 4))
    for loss in (rows.nll.sum(), summed_loss(hidden_ND, weight_VD, bias_V, targets_N), mixture):
        assert loss.item() == 0
        for leaf, gradient in zip(
            (hidden_ND, weight_VD, bias_V), torch.autograd.grad(loss, (hidden_ND, weight_VD, bias_V)), strict=True
        ):
            assert gradient.shape == leaf.shape
            assert not gradient.any()
    with torch.no_grad():
        assert summed_loss(hidden_ND, weight_VD, bias_V, targets_N).item() == 0


def test_single_class_has_zero_loss() -> None:
    hidden_ND, weight_VD, bias_V = torch.randn(3, 2), torch.randn(1, 2), torch.randn(1)
    assert row_losses(hidden_ND, weight_VD, bias_V, torch.tensor([0, 0, IGNORE])).nll.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", MEMORY)
def test_extreme_scores_do_not_overflow(dtype: torch.dtype, memory: float) -> None:
    hidden_ND = torch.tensor([[1.0], [-1.0], [1.0]], dtype=dtype, requires_grad=True)
    weight_VD = torch.tensor([[1e4], [-1e4], *[[0.0]] * 400], dtype=dtype, requires_grad=True)
    targets_N = torch.tensor([0, 0, 1])
    with using(memory=memory):
        rows = row_losses(hidden_ND, weight_VD, None, targets_N, tau=1.0)
        assert rows.lse_tau is not None
        assert rows.nll.tolist() == [0.0, 2e4, 2e4]
        assert rows.lse.tolist() == rows.lse_tau.tolist() == [1e4] * 3
        for loss in (rows.nll.sum(), summed_loss(hidden_ND, weight_VD, None, targets_N)):
            grad_hidden_ND, grad_weight_VD = torch.autograd.grad(loss, (hidden_ND, weight_VD))
            assert loss.item() == 4e4
            # One class has all the probability. It is the target of row 0, but not of the other rows.
            assert grad_hidden_ND[:, 0].tolist() == [0.0, -2e4, 2e4]
            assert grad_weight_VD[:2, 0].tolist() == [2.0, -2.0]
            assert not grad_weight_VD[2:].any()


@pytest.mark.parametrize("dim", [1, 7, 8, 13])
def test_padded_dimensions_give_the_same_losses_and_gradients(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU needs rows of a multiple of 8 dimensions. Here the padding is made on the CPU."""
    p = problem(20, dim, 50)
    expected = [*p.gradients(summed(p)), *p.gradients(row_losses(p.h, p.w, p.b, p.y).nll.square().sum())]

    def pad(hidden_ND: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        padding = (0, -dim % losses.DIMENSION_MULTIPLE)
        return torch.nn.functional.pad(hidden_ND, padding), torch.nn.functional.pad(weight_VD, padding)

    monkeypatch.setattr(losses, "align_dimensions", pad)
    actual = [*p.gradients(summed(p)), *p.gradients(row_losses(p.h, p.w, p.b, p.y).nll.square().sum())]
    assert largest_error(actual, expected) < 1e-13
