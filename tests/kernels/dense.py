"""Linear cross-entropy in plain torch with all scores in memory: the reference for the tests of the kernels.

Shapes: N rows (tokens), D dimensions, V classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100
MEMORY = (1e-6, 1.0, 64.0)
"""Memory budgets in MiB: the smallest blocks of rows and classes, blocks of rows with all classes, and one block."""


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
        """Return a copy with another dtype and device, with new leaves."""
        h, w, b = (
            None if tensor is None else tensor.detach().to(device, dtype).requires_grad_()
            for tensor in (self.h, self.w, self.b)
        )
        assert h is not None
        assert w is not None
        return Problem(h, w, b, self.y.to(device))

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Return the gradients of rows, classes and biases."""
        return list(torch.autograd.grad(loss, self.leaves))


def problem(rows: int, dim: int, classes: int, bias: bool = True, ignored: bool = True) -> Problem:
    """Return random inputs with scores of about one. If `ignored`, every fifth target is ignored."""
    torch.manual_seed(rows + 1000 * dim + 7 * classes)
    hidden_ND = torch.randn(rows, dim, dtype=torch.float64, requires_grad=True)
    weight_VD = (torch.randn(classes, dim, dtype=torch.float64) / dim**0.5).requires_grad_()
    bias_V = torch.randn(classes, dtype=torch.float64, requires_grad=True) if bias else None
    targets_N = torch.randint(classes, (rows,))
    if ignored:
        targets_N[4::5] = IGNORE
    return Problem(hidden_ND, weight_VD, bias_V, targets_N)


def dense_losses(problem: Problem, tau: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, the log-sum-exps, and the log-sum-exps at `tau` of the scores without bias and mean."""
    plain_NV = problem.h @ problem.w.T
    scores_NV = plain_NV if problem.b is None else plain_NV + problem.b
    lse_N = torch.logsumexp(scores_NV, dim=-1)
    scored_N = problem.y != IGNORE
    target_N = scores_NV.gather(1, problem.y.where(scored_N, 0)[:, None])[:, 0]
    lse_tau_N = torch.logsumexp(plain_NV / tau, dim=-1) - plain_NV.mean(-1) / tau
    return (lse_N - target_N).where(scored_N, 0.0), lse_N, lse_tau_N


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return ||actual - exact|| / ||exact||, or ||actual|| if `exact` is zero."""
    exact = exact.detach()
    distance, size = (actual.detach().to(exact.device, torch.float64) - exact).norm(), exact.norm()
    return float(distance / size) if size > 0 else float(distance)


def largest_error(actual: Iterable[Tensor | None], exact: Iterable[Tensor]) -> float:
    """Return the largest relative error; a missing tensor has an infinite error."""
    return max(
        torch.inf if tensor is None else relative_error(tensor, expected)
        for tensor, expected in zip(actual, exact, strict=True)
    )
