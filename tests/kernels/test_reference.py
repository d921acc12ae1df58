"""The reference implementation equals the definitions in float64; other implementations are compared with it.

Shapes: N rows, V classes, K experts of a mixture.
"""

from __future__ import annotations

import pytest
import torch

from reefknot.kernels.choice import using
from reefknot.kernels.losses import row_losses, summed_loss
from reefknot.kernels.reference import linear_scores

from .dense import IGNORE, Problem, dense_losses, largest_error, problem, relative_error


@pytest.mark.parametrize("bias", [True, False])
def test_row_losses_match_dense(bias: bool) -> None:
    p = problem(70, 25, 300, bias)
    exact = dense_losses(p, tau=5.0)
    with using("reference"):
        actual = row_losses(p.h, p.w, p.b, p.y, tau=5.0)
    assert actual.lse_tau is not None
    assert largest_error(actual, exact) < 1e-12
    actual_total, expected_total = (
        nll.sum() + (lse * lse_tau).sum() for nll, lse, lse_tau in ((*actual[:2], actual.lse_tau), exact)
    )
    assert largest_error(p.gradients(actual_total), p.gradients(expected_total)) < 1e-12


def test_mixture_loss_matches_dense() -> None:
    p = problem(12, 25, 300, ignored=False)
    targets_N = torch.tensor([5, 0, IGNORE, 299])
    log_prior_NK = torch.randn(4, 3, dtype=torch.float64).log_softmax(-1).requires_grad_()
    nll_NK = dense_losses(Problem(p.h, p.w, p.b, targets_N.repeat_interleave(3)))[0].view(4, 3)
    exact = -torch.logsumexp(log_prior_NK - nll_NK, dim=-1).where(targets_N != IGNORE, 0.0).sum()
    with using("reference"):
        actual = summed_loss(p.h, p.w, p.b, targets_N, log_prior_NK)
    leaves = [*p.leaves, log_prior_NK]
    assert relative_error(actual, exact) < 1e-12
    assert largest_error(torch.autograd.grad(actual, leaves), torch.autograd.grad(exact, leaves)) < 1e-12


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_computed_in_float32(dtype: torch.dtype, autocast: bool) -> None:
    # Numbers that are exact in every dtype.
    p = problem(70, 25, 300).to(torch.float16).to(torch.bfloat16).to(torch.float16).to(dtype)
    exact = p.to(torch.float64)
    assert exact.b is not None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        actual = linear_scores(p.h, p.w, p.b)
    expected = exact.h @ exact.w.T + exact.b
    assert actual.dtype == torch.float32
    assert relative_error(actual, expected) < 1e-6
    gradients = p.gradients(actual.square().sum())
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
    assert largest_error(gradients, exact.gradients(expected.square().sum())) < (
        1e-6 if dtype == torch.float32 and not autocast else 1e-2
    )
