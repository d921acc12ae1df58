"""Small problems on a GPU take a path of their own, which matches float64 and behaves like the general code.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels import losses
from reefknot.kernels.choice import using
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable

from .dense import largest_error, relative_error
from .interpreter import INTERPRETED, gpu_only, gpu_or_interpreter

pytest.importorskip("triton", reason="triton is not installed")

from reefknot.kernels import small

DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def never_store_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute even the smallest problems by the kernel."""
    monkeypatch.setattr(small, "MAX_STORED_SCORES", 0)
    monkeypatch.setattr(small, "MAX_UNALIGNED_SCORES", 0)


def make_problem(rows: int, dim: int, classes: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Return hidden states, class vectors and targets."""
    torch.manual_seed(0)
    hidden_ND = torch.randn(rows, dim).to(DEVICE, torch.bfloat16).requires_grad_()
    weight_VD = (torch.randn(classes, dim) / dim**0.5).to(torch.bfloat16).to(DEVICE, dtype).requires_grad_()
    targets_N = torch.randint(classes, (rows,), device=DEVICE)
    targets_N[::5] = -100
    return hidden_ND, weight_VD, targets_N


def make_bias(classes: int, has_bias: bool) -> Tensor | None:
    return torch.randn(classes).to(DEVICE).requires_grad_() if has_bias else None


def exact_loss(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, bias_V: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return the mean loss and its gradients in float64."""
    leaves = [
        tensor.detach().double().requires_grad_() for tensor in (hidden_ND, weight_VD, bias_V) if tensor is not None
    ]
    loss = F.cross_entropy(F.linear(*leaves), targets_N)
    return loss, list(torch.autograd.grad(loss, leaves))


@gpu_or_interpreter
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(7, 8, 31), (3, 16, 2100)], ids=str)
def test_losses_and_gradients_match_float64(shape: tuple[int, int, int], dtype: torch.dtype, has_bias: bool) -> None:
    hidden_ND, weight_VD, targets_N = make_problem(*shape)
    bias_V = make_bias(shape[2], has_bias)
    loss, exact_gradients = exact_loss(hidden_ND, weight_VD, targets_N, bias_V)
    leaves = hidden_ND.to(dtype), weight_VD.to(dtype), bias_V
    sums_2N, gradients = small._compute(*leaves, targets_N, dtype, (True, True, has_bias))
    sums_2 = sums_2N.sum(1)
    assert sums_2[1] == (targets_N != -100).sum()
    is_rounded = dtype == torch.bfloat16
    # A CPU cannot write the product of bfloat16 matrices in float32.
    assert relative_error(sums_2[0] / sums_2[1], loss) < (1e-3 if INTERPRETED and is_rounded else 1e-5)
    scaled = [gradient.double() / sums_2[1] for gradient in gradients if gradient is not None]
    assert largest_error(scaled, exact_gradients) < (1e-2 if is_rounded else 1e-5)


@gpu_only
@pytest.mark.parametrize("shape", [(128, 256, 1000), (512, 768, 50_257), (1400, 400, 10_001)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stored", [False, True], ids=["kernel", "stored"])
def test_function_takes_the_path_and_matches_float64(
    shape: Any, weight_dtype: torch.dtype, has_bias: bool, stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "MAX_STORED_SCORES", 2**25 if stored else 0)
    problem = hidden_ND, weight_VD, targets_N = make_problem(*shape, weight_dtype)
    bias_V = make_bias(shape[2], has_bias)
    leaves = [tensor for tensor in (hidden_ND, weight_VD, bias_V) if tensor is not None]
    loss, exact_gradients = exact_loss(*problem, bias_V)
    with torch.autocast("cuda", torch.bfloat16):
        assert small.is_small_problem(*problem, bias_V)
        results = [linear_cross_entropy(hidden_ND[None], weight_VD, targets_N[None], bias_V) for _ in range(2)]
    assert relative_error(results[0], loss) < 1e-4
    gradients = [torch.autograd.grad(3 * result, leaves, retain_graph=True) for result in results]
    assert largest_error([gradient.double() / 3 for gradient in gradients[0]], exact_gradients) < 5e-3
    again = torch.autograd.grad(3 * results[0], leaves)
    for first, second, third in zip(*gradients, again, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)
    with using("chunked"):
        assert not small.is_small_problem(*problem)


@gpu_or_interpreter
@pytest.mark.parametrize("is_mean", [True, False], ids=["mean", "sum"])
def test_gradients_are_scaled_and_a_second_backward_pass_repeats_them(is_mean: bool) -> None:
    problem = hidden_ND, weight_VD, targets_N = make_problem(7, 8, 31)
    bias_V = make_bias(31, has_bias=True)
    loss, exact_gradients = exact_loss(*problem, bias_V)
    count = (targets_N != -100).sum()
    result = small._SmallLossFunction.apply(hidden_ND, weight_VD, bias_V, targets_N, is_mean)
    factor = 3 if is_mean else 3 / count
    assert relative_error(result, loss if is_mean else loss * count) < (1e-3 if INTERPRETED else 1e-5)
    leaves = [hidden_ND, weight_VD, bias_V]
    first = torch.autograd.grad(factor * result, leaves, retain_graph=True)
    second = torch.autograd.grad(factor * result, leaves)
    assert largest_error([gradient.double() / 3 for gradient in first], exact_gradients) < 1e-2
    assert all(map(torch.equal, first, second))


@gpu_only
@pytest.mark.parametrize("name", ["stored_losses", "small_summed_loss"])
def test_ends_take_the_path_except_among_general_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_ND, weight_VD, targets_N = make_problem(130, 64, 512)
    monkeypatch.setattr(small, "MAX_STORED_SCORES", 2**25 if name == "stored_losses" else 0)
    end = Softmax(Plain(WordTable(512, 64))).to(DEVICE, torch.bfloat16)
    with torch.no_grad():
        end.classifier.table.weight.copy_(weight_VD)
    with mock.patch.object(losses, name, wraps=getattr(small, name)) as small_loss:
        total = end(hidden_ND, targets_N, reduction="sum").loss
        assert small_loss.call_count == 1
        with small.general_kernels():
            assert not small.is_small_problem(hidden_ND, weight_VD, targets_N)
            assert not small.stores_scores(hidden_ND, 512)
            general_total = end(hidden_ND, targets_N, reduction="sum").loss
        assert small_loss.call_count == 1
    assert relative_error(total, general_total.double()) < 1e-4


@gpu_only
def test_targets_are_checked_and_ignored_as_in_the_general_code() -> None:
    hidden_ND, weight_VD, targets_N = make_problem(130, 64, 500)
    targets_N[3] = 500
    with pytest.raises(ArgumentError, match="target 500 of row 3 is not a class"):
        linear_cross_entropy(hidden_ND, weight_VD, targets_N)
    loss = linear_cross_entropy(hidden_ND, weight_VD, targets_N, check_targets=False)
    assert loss.isnan()
    assert torch.autograd.grad(loss, hidden_ND)[0][3].count_nonzero() == 0
    loss = linear_cross_entropy(hidden_ND, weight_VD, torch.full_like(targets_N, -100))
    assert loss == 0
    assert torch.autograd.grad(loss, weight_VD)[0].count_nonzero() == 0


@gpu_only
def test_second_derivative_raises_an_error() -> None:
    problem = hidden_ND, _, _ = make_problem(130, 64, 500)
    (gradient,) = torch.autograd.grad(linear_cross_entropy(*problem), hidden_ND, create_graph=True)
    with pytest.raises(ArgumentError, match="reference"):
        torch.autograd.grad(gradient.float().square().sum(), hidden_ND)
