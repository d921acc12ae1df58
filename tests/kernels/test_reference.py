"""The readable implementation against definitions in float64: it is what others are compared with.

Shapes: N rows, V classes, K experts of a mixture.
"""

from __future__ import annotations

import pytest
import torch

from reefknot.kernels.choice import using
from reefknot.kernels.linear_cross_entropy import row_losses, summed_loss
from reefknot.kernels.reference import linear_scores

from .dense import IGNORE, Problem, dense_losses, furthest, off, problem


@pytest.mark.parametrize("bias", [True, False])
def test_rows(bias: bool) -> None:
    p = problem(70, 25, 300, bias)
    exact = dense_losses(p, tau=5.0)
    with using("reference"):
        found = row_losses(p.h, p.w, p.b, p.y, tau=5.0)
    assert found.lse_tau is not None
    assert furthest(found, exact) < 1e-12
    together, expected = (
        nll.sum() + (lse * lse_tau).sum() for nll, lse, lse_tau in ((*found[:2], found.lse_tau), exact)
    )
    assert furthest(p.gradients(together), p.gradients(expected)) < 1e-12


def test_a_mixture() -> None:
    p = problem(12, 25, 300, ignored=False)
    y_N = torch.tensor([5, 0, IGNORE, 299])
    log_prior_NK = torch.randn(4, 3, dtype=torch.float64).log_softmax(-1).requires_grad_()
    nll_NK = dense_losses(Problem(p.h, p.w, p.b, y_N.repeat_interleave(3)))[0].view(4, 3)
    exact = -torch.logsumexp(log_prior_NK - nll_NK, dim=-1).where(y_N != IGNORE, 0.0).sum()
    with using("reference"):
        found = summed_loss(p.h, p.w, p.b, y_N, log_prior_NK)
    leaves = [*p.leaves, log_prior_NK]
    assert off(found, exact) < 1e-12
    assert furthest(torch.autograd.grad(found, leaves), torch.autograd.grad(exact, leaves)) < 1e-12


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_are_at_least_in_float32(dtype: torch.dtype, autocast: bool) -> None:
    # Numbers that every type has.
    p = problem(70, 25, 300).to(torch.float16).to(torch.bfloat16).to(torch.float16).to(dtype)
    exact = p.to(torch.float64)
    assert exact.b is not None
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = linear_scores(p.h, p.w, p.b)
    expected = exact.h @ exact.w.T + exact.b
    assert found.dtype == torch.float32
    assert off(found, expected) < 1e-6
    gradients = p.gradients(found.square().sum())
    assert [each.dtype for each in gradients] == [dtype] * 3
    assert furthest(gradients, exact.gradients(expected.square().sum())) < (
        1e-6 if dtype == torch.float32 and not autocast else 1e-2
    )
