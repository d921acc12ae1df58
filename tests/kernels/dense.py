"""The primitive with all scores at once, in plain torch: what the tests of the kernels compare with.

Shapes: N rows (tokens), D width, V classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100
MEMORY = (1e-6, 1.0, 64.0)
"""MiB: the smallest blocks of rows and classes, blocks of rows against all classes, everything at once."""


@dataclass(frozen=True)
class Problem:
    """Rows, classes, biases and targets."""

    h: Tensor
    w: Tensor
    b: Tensor | None
    y: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.h, self.w] if self.b is None else [self.h, self.w, self.b]

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Problem:
        """The same numbers in another type, as fresh leaves."""
        h, w, b = (
            None if each is None else each.detach().to(device, dtype).requires_grad_()
            for each in (self.h, self.w, self.b)
        )
        assert h is not None
        assert w is not None
        return Problem(h, w, b, self.y.to(device))

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Of rows, classes and biases."""
        return list(torch.autograd.grad(loss, self.leaves))


def problem(rows: int, width: int, classes: int, bias: bool = True, ignored: bool = True) -> Problem:
    """Scores of about one; every fifth row ignored where asked for, but never the first."""
    torch.manual_seed(rows + 1000 * width + 7 * classes)
    h_ND = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    w_VD = (torch.randn(classes, width, dtype=torch.float64) / width**0.5).requires_grad_()
    b_V = torch.randn(classes, dtype=torch.float64, requires_grad=True) if bias else None
    y_N = torch.randint(classes, (rows,))
    if ignored:
        y_N[4::5] = IGNORE
    return Problem(h_ND, w_VD, b_V, y_N)


def dense_losses(problem: Problem, tau: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihoods, log-sum-exps, and log-sum-exps at `tau` of the scores without bias and mean."""
    plain_NV = problem.h @ problem.w.T
    z_NV = plain_NV if problem.b is None else plain_NV + problem.b
    lse_N = torch.logsumexp(z_NV, dim=-1)
    scored_N = problem.y != IGNORE
    target_N = z_NV.gather(1, problem.y.where(scored_N, 0)[:, None])[:, 0]
    lse_tau_N = torch.logsumexp(plain_NV / tau, dim=-1) - plain_NV.mean(-1) / tau
    return (lse_N - target_N).where(scored_N, 0.0), lse_N, lse_tau_N


def off(found: Tensor, exact: Tensor) -> float:
    """||found - exact|| / ||exact||; where nothing is expected, what there is."""
    exact = exact.detach()
    distance, size = (found.detach().to(exact.device, torch.float64) - exact).norm(), exact.norm()
    return float(distance / size) if size > 0 else float(distance)


def furthest(found: Iterable[Tensor | None], exact: Iterable[Tensor]) -> float:
    """The largest of their errors; what is missing is infinitely far."""
    return max(torch.inf if one is None else off(one, other) for one, other in zip(found, exact, strict=True))
