"""The best classes in blocks equal a sort of all classes.

Shapes: N rows, V classes, K best.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reefknot.errors import ArgumentError
from reefknot.kernels.choice import using
from reefknot.kernels.topk import linear_topk

from .dense import MEMORY, largest_error, problem
from .memory import MEBIBYTE, peak


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("classes", "k"), [(2, 2), (257, 1), (1031, 10), (1031, 700)])
def test_topk_equals_a_sort_of_all_log_probs(memory: float, bias: bool, classes: int, k: int) -> None:
    p = problem(140, 25, classes, bias)
    scores_NV = p.h @ p.w.T if p.b is None else p.h @ p.w.T + p.b
    expected = scores_NV.log_softmax(-1).sort(descending=True)
    with using(memory=memory), torch.no_grad():
        log_probs_NK, ids_NK = linear_topk(p.h, p.w, k, linear_bias=p.b)
    assert torch.equal(ids_NK, expected.indices[:, :k])
    torch.testing.assert_close(log_probs_NK, expected.values[:, :k].detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("memory", MEMORY)
def test_topk_of_a_mixture_equals_a_sort(memory: float) -> None:
    p = problem(60, 25, 257)
    log_prior_NK = torch.randn(20, 3, dtype=p.h.dtype).log_softmax(-1)
    log_probs_NKV = torch.nn.functional.linear(p.h, p.w, p.b).log_softmax(-1).view(20, 3, 257)
    expected = torch.logsumexp(log_prior_NK[..., None] + log_probs_NKV, dim=1).sort(descending=True)
    with using(memory=memory), torch.no_grad():
        log_probs_NK, ids_NK = linear_topk(p.h, p.w, 9, linear_bias=p.b, log_prior=log_prior_NK)
    assert torch.equal(ids_NK, expected.indices[:, :9])
    torch.testing.assert_close(log_probs_NK, expected.values[:, :9].detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("experts", [1, 3])
@pytest.mark.parametrize("memory", MEMORY)
def test_classes_of_probability_zero_do_not_give_nan(memory: float, experts: int) -> None:
    """Some blocks have no possible class. Only four classes are possible, and five are returned."""
    p = problem(6, 8, 800)
    bias_V = torch.full((800,), -torch.inf, dtype=p.h.dtype).index_fill(0, torch.tensor([5, 255, 600, 610]), 0.0)
    log_prior_NK = torch.randn(6 // experts, experts, dtype=p.h.dtype).log_softmax(-1)
    log_probs_NKV = torch.nn.functional.linear(p.h, p.w, bias_V).log_softmax(-1).view(-1, experts, 800)
    possible_NV = (log_prior_NK[..., None] + log_probs_NKV)[..., bias_V == 0].logsumexp(1)
    with using(memory=memory):
        best = linear_topk(p.h, p.w, 5, linear_bias=bias_V, log_prior=None if experts == 1 else log_prior_NK)
    torch.testing.assert_close(best.log_probs[:, :4], possible_NV.sort(descending=True).values)
    assert (best.log_probs[:, 4] == -torch.inf).all()
    exact = torch.autograd.grad(possible_NV.square().sum(), [p.h, p.w])
    assert largest_error(torch.autograd.grad(best.log_probs[:, :4].square().sum(), [p.h, p.w]), exact) < 1e-12


@pytest.mark.parametrize("experts", [1, 3])
def test_zero_rows_give_empty_topk_with_gradients(experts: int) -> None:
    hidden_ND = torch.zeros(0, 4, requires_grad=True)
    log_prior_NK = None if experts == 1 else torch.zeros(0, experts)
    log_probs_NK, ids_NK = linear_topk(hidden_ND, torch.randn(9, 4), 5, log_prior=log_prior_NK)
    assert log_probs_NK.shape == ids_NK.shape == (0, 5)
    assert ids_NK.dtype == torch.long
    assert torch.autograd.grad(log_probs_NK.sum(), hidden_ND)[0].shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_working_memory_of_topk_fits_the_budget(dtype: torch.dtype, tmp_path: Path) -> None:
    hidden_ND, weight_VD = torch.randn(200, 4, dtype=dtype), torch.randn(5000, 4, dtype=dtype)
    used = peak(lambda: linear_topk(hidden_ND, weight_VD, 5, memory=4.0), tmp_path)
    assert MEBIBYTE < used < 4.25 * MEBIBYTE


def test_topk_log_probs_are_float32_under_autocast() -> None:
    p = problem(7, 25, 300).to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert linear_topk(p.h, p.w, 3, linear_bias=p.b)[0].dtype == torch.float32


def test_log_prior_that_is_not_a_tensor_raises_an_error() -> None:
    with pytest.raises(ArgumentError, match="linear_topk: log_prior is a list"):
        linear_topk(torch.randn(4, 3), torch.randn(9, 3), 2, log_prior=[0.0])  # type: ignore[arg-type]
