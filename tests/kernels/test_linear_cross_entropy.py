"""The primitive against mathematics written out by hand in float64: values and every gradient.

Shapes: N rows, D width, V classes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.kernels.linear_cross_entropy import IGNORE, linear_cross_entropy

Array = NDArray[np.float64]
WEIGHTS = np.array([0.3, -1.2, 0.0, 2.0, 0.7])
"""What the callers multiply the rows with; a mixture's may have any sign."""


def problem(rows: int = 5, width: int = 4, classes: int = 6, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    torch.manual_seed(0)
    h_ND, w_VD = torch.randn(rows, width).double(), torch.randn(classes, width).double()
    b_V = torch.randn(classes).double() if bias else None
    return h_ND, w_VD, b_V


def softmax(scores_NV: Array) -> Array:
    powers = np.exp(scores_NV - scores_NV.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_by_hand(bias: bool) -> None:
    h_ND, w_VD, b_V = problem(bias=bias)
    leaves = [tensor.requires_grad_() for tensor in (h_ND, w_VD, b_V) if tensor is not None]
    y = np.array([2, 0, IGNORE, 5, 2])
    nll_N, nothing = linear_cross_entropy(h_ND, w_VD, b_V, torch.from_numpy(y))
    assert nothing is None
    gradients = torch.autograd.grad(nll_N, leaves, torch.from_numpy(WEIGHTS))

    h, w = h_ND.detach().numpy(), w_VD.detach().numpy()
    b = np.zeros(len(w)) if b_V is None else b_V.detach().numpy()
    p_NV = softmax(h @ w.T + b)
    scored = y != IGNORE
    expected = np.where(scored, -np.log(p_NV[np.arange(5), np.where(scored, y, 0)]), 0.0)
    np.testing.assert_allclose(nll_N.detach().numpy(), expected, rtol=1e-12)
    # d nll / d score = p - 1[y], times the row's weight.
    d_NV = p_NV - np.eye(len(w))[np.where(scored, y, 0)]
    d_NV *= (WEIGHTS * scored)[:, None]
    for found, by_hand in zip(gradients, (d_NV @ w, d_NV.T @ h, d_NV.sum(0)), strict=False):
        np.testing.assert_allclose(found.numpy(), by_hand, rtol=1e-10, atol=1e-12)


def test_tau_leaves_out_the_bias() -> None:
    h_ND, w_VD, b_V = problem()
    tau = 2.5
    leaves = [h_ND.requires_grad_(), w_VD.requires_grad_()]
    nll_N, lse_N = linear_cross_entropy(h_ND, w_VD, b_V, torch.tensor([0, 1, 2, IGNORE, 4]), tau)
    assert lse_N is not None
    gradients = torch.autograd.grad(lse_N, leaves, torch.from_numpy(WEIGHTS), retain_graph=True)

    h, w = h_ND.detach().numpy(), w_VD.detach().numpy()
    expected = np.log(np.exp(h @ w.T / tau).sum(-1))
    np.testing.assert_allclose(lse_N.detach().numpy(), expected, rtol=1e-12)
    d_NV = softmax(h @ w.T / tau) / tau * WEIGHTS[:, None]
    for found, by_hand in zip(gradients, (d_NV @ w, d_NV.T @ h), strict=True):
        np.testing.assert_allclose(found.numpy(), by_hand, rtol=1e-10, atol=1e-12)
    # tau changes nothing of the other output.
    assert torch.equal(nll_N, linear_cross_entropy(h_ND, w_VD, b_V, torch.tensor([0, 1, 2, IGNORE, 4]))[0])


def test_differences_confirm_every_gradient() -> None:
    h_ND, w_VD, b_V = problem(rows=3)
    assert b_V is not None
    y_N = torch.tensor([5, IGNORE, 1])
    leaves = tuple(tensor.requires_grad_() for tensor in (h_ND, w_VD, b_V))

    def both(h_ND: Tensor, w_VD: Tensor, b_V: Tensor) -> tuple[Tensor, Tensor]:
        nll_N, lse_N = linear_cross_entropy(h_ND, w_VD, b_V, y_N, 0.7)
        assert lse_N is not None
        return nll_N, lse_N

    assert torch.autograd.gradcheck(both, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores_stay_finite(dtype: torch.dtype) -> None:
    h_ND = torch.tensor([[1.0], [-1.0]], dtype=dtype, requires_grad=True)
    w_VD = torch.tensor([[1e4], [-1e4], [0.0]], dtype=dtype, requires_grad=True)
    nll_N, lse_N = linear_cross_entropy(h_ND, w_VD, None, torch.tensor([0, 0]), tau=1.0)
    assert lse_N is not None
    assert nll_N.tolist() == [0.0, 2e4]
    assert lse_N.tolist() == [1e4, 1e4]
    (nll_N.sum() + lse_N.sum()).backward()
    assert h_ND.grad is not None
    assert w_VD.grad is not None
    assert h_ND.grad.isfinite().all()
    assert w_VD.grad.isfinite().all()


def test_one_row_and_two_classes() -> None:
    nll_N, _ = linear_cross_entropy(torch.ones(1, 1), torch.tensor([[0.0], [1.0]]), None, torch.tensor([1]))
    assert nll_N.shape == (1,)
    assert nll_N.item() == pytest.approx(math.log1p(math.exp(-1)))


def test_one_class_is_certain() -> None:
    nll_N, _ = linear_cross_entropy(torch.randn(3, 2), torch.randn(1, 2), torch.randn(1), torch.tensor([0, 0, IGNORE]))
    assert nll_N.tolist() == [0.0, 0.0, 0.0]


def test_no_rows_cost_nothing_and_keep_the_graph() -> None:
    w_VD = torch.randn(3, 2, requires_grad=True)
    nll_N, _ = linear_cross_entropy(torch.zeros(0, 2), w_VD, None, torch.zeros(0, dtype=torch.long))
    assert nll_N.shape == (0,)
    nll_N.sum().backward()
    assert w_VD.grad is not None
    assert not w_VD.grad.any()


def test_only_ignored_rows_cost_nothing() -> None:
    h_ND, w_VD, b_V = problem()
    h_ND.requires_grad_()
    nll_N, _ = linear_cross_entropy(h_ND, w_VD, b_V, torch.full((5,), IGNORE))
    nll_N.sum().backward()
    assert nll_N.tolist() == [0.0] * 5
    assert h_ND.grad is not None
    assert not h_ND.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_half_precision_comes_back_in_float32(dtype: torch.dtype, bias: bool) -> None:
    h_ND, w_VD, b_V = problem(bias=bias)
    y_N = torch.tensor([2, 0, 1, 5, 2])
    half = [None if t is None else t.to(dtype) for t in (h_ND, w_VD, b_V)]
    h, w, b = half
    assert h is not None
    assert w is not None
    found, lse_N = linear_cross_entropy(h, w, b, y_N, tau=2.0)
    assert lse_N is not None
    assert found.dtype == lse_N.dtype == torch.float32
    # Only the products are rounded; the sum over classes is not.
    exact, _ = linear_cross_entropy(h.double(), w.double(), None if b is None else b.double(), y_N)
    torch.testing.assert_close(found.double(), exact, rtol=0.0, atol=0.05)


def test_the_gradient_of_a_weighted_sum_is_the_weighted_gradient() -> None:
    h_ND, w_VD, b_V = problem()
    w_VD.requires_grad_()
    y_N = torch.tensor([2, 0, 1, 5, 2])
    nll_N, _ = linear_cross_entropy(h_ND, w_VD, b_V, y_N)
    rows = [torch.autograd.grad(nll, w_VD, retain_graph=True)[0] for nll in nll_N]
    (together,) = torch.autograd.grad(nll_N @ torch.from_numpy(WEIGHTS), w_VD)
    torch.testing.assert_close(together, sum(float(c) * g for c, g in zip(WEIGHTS, rows, strict=True)))
