"""Gradients of the losses: dtypes, strides, partial gradients, repeated passes and memory.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.choice import using
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.kernels.losses import row_losses, summed_loss

from .dense import MEMORY, Problem, dense_losses, largest_error, problem, relative_error
from .memory import MEBIBYTE, peak

Loss = Callable[[Problem], Tensor]


def summed(p: Problem) -> Tensor:
    return summed_loss(p.h, p.w, p.b, p.y)


def by_row(p: Problem) -> Tensor:
    """Return the sum of the row losses, whose backward pass gets an expanded gradient."""
    return row_losses(p.h, p.w, p.b, p.y).nll.sum()


def tempered(p: Problem) -> Tensor:
    lse_tau_N = row_losses(p.h, p.w, p.b, p.y, tau=5.0).lse_tau
    assert lse_tau_N is not None
    return lse_tau_N.sum()


both_losses = pytest.mark.parametrize("loss", [summed, by_row])


# -- dtypes --------------------------------------------------------------------------------------------------------

HALF = [torch.float16, torch.bfloat16]
TYPES = list(itertools.product([torch.float64, torch.float32, *HALF], repeat=2))


@pytest.mark.parametrize(("rows", "classes"), TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("loss", [summed, by_row, tempered])
def test_gradients_have_the_dtype_of_their_inputs(rows: torch.dtype, classes: torch.dtype, loss: Loss) -> None:
    start = problem(70, 25, 300)
    assert start.b is not None
    half = rows in HALF or classes in HALF
    for bias, memory in itertools.product((torch.float32, classes), MEMORY):
        h, w, b = (
            tensor.detach().to(dtype).requires_grad_()
            for tensor, dtype in zip(start.leaves, (rows, classes, bias), strict=True)
        )
        p = Problem(h, w, b, start.y)
        exact = p.to(torch.float64)
        by_definition = dense_losses(exact, tau=5.0)[2 if loss is tempered else 0].sum()
        with using(memory=memory):
            actual = loss(p)
            gradients = torch.autograd.grad(actual, p.leaves, allow_unused=True)
        assert actual.dtype == torch.promote_types(torch.promote_types(rows, classes), torch.float32)
        assert relative_error(actual, by_definition) < (1e-2 if half else 1e-6)
        expected = torch.autograd.grad(by_definition, exact.leaves, materialize_grads=True, allow_unused=True)
        for leaf, gradient, expected_gradient in zip(p.leaves, gradients, expected, strict=True):
            assert gradient is not None
            assert gradient.dtype == leaf.dtype
            assert relative_error(gradient, expected_gradient) < (1e-2 if half else 1e-6)


@both_losses
def test_float16_inputs_are_multiplied_in_float32(loss: Loss) -> None:
    p = problem(70, 25, 300).to(torch.float16)
    exact = p.to(torch.float64)
    by_definition = dense_losses(exact)[0].sum()
    assert relative_error(loss(p), by_definition) < 1e-6
    # Only the returned gradients are rounded.
    assert largest_error(p.gradients(loss(p)), exact.gradients(by_definition)) < 5e-4


def test_scaling_factor_is_not_rounded_to_half_precision() -> None:
    p = problem(70, 25, 300).to(torch.bfloat16)
    whole, part = p.gradients(summed(p)), p.gradients(summed(p) / 700)
    for whole_gradient, part_gradient in zip(whole, part, strict=True):
        # Rounding errors of single numbers average out in the projection.
        share = (part_gradient.double() * whole_gradient.double()).sum() / whole_gradient.double().square().sum()
        assert share.item() == pytest.approx(1 / 700, rel=5e-4)


# -- strides and partial gradients ---------------------------------------------------------------------------------


@both_losses
@pytest.mark.parametrize("memory", MEMORY)
def test_noncontiguous_inputs_give_the_same_gradients(loss: Loss, memory: float) -> None:
    exact = problem(140, 25, 1031)
    assert exact.b is not None
    hidden_ND = torch.stack([exact.h, exact.h + 1], dim=-1).detach()[..., 0].requires_grad_()
    weight_VD = exact.w.detach().T.contiguous().T.requires_grad_()
    bias_V = torch.stack([exact.b, exact.b + 1], dim=-1).detach()[..., 0].requires_grad_()
    targets_N = torch.stack([exact.y, exact.y + 1], dim=-1)[..., 0]
    p = Problem(hidden_ND, weight_VD, bias_V, targets_N)
    assert not any(tensor.is_contiguous() for tensor in (*p.leaves, targets_N))
    with using(memory=memory):
        actual = loss(p)
        assert largest_error(p.gradients(actual), exact.gradients(dense_losses(exact)[0].sum())) < 1e-12


@both_losses
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("needs", [needs for needs in itertools.product((True, False), repeat=3) if any(needs)])
def test_only_inputs_that_require_grad_get_gradients(loss: Loss, memory: float, needs: tuple[bool, ...]) -> None:
    exact = problem(140, 25, 1031)
    all_gradients = exact.gradients(dense_losses(exact)[0].sum())
    p = exact.to(torch.float64)
    for leaf, need in zip(p.leaves, needs, strict=True):
        leaf.requires_grad_(need)
    with using(memory=memory):
        loss(p).backward()  # type: ignore[no-untyped-call]
    for leaf, need, expected in zip(p.leaves, needs, all_gradients, strict=True):
        if need:
            assert leaf.grad is not None
            assert relative_error(leaf.grad, expected) < 1e-12
        else:
            assert leaf.grad is None


@both_losses
@pytest.mark.parametrize("memory", MEMORY)
def test_loss_is_the_same_without_gradients(loss: Loss, memory: float) -> None:
    p = problem(140, 25, 1031)
    with using(memory=memory):
        with torch.no_grad():
            scored = loss(p)
        with torch.inference_mode():
            inferred = loss(p)
        trained = loss(p)
    assert trained.requires_grad
    assert not scored.requires_grad
    assert torch.equal(scored, inferred)
    torch.testing.assert_close(scored, trained, rtol=1e-13, atol=0)


# -- the backward pass ---------------------------------------------------------------------------------------------


@both_losses
def test_upstream_gradient_scales_the_gradients(loss: Loss) -> None:
    p = problem(140, 25, 1031)
    once, scaled = p.gradients(loss(p)), p.gradients(loss(p).square() / -3)
    factor = -2 / 3 * loss(p).item()
    assert largest_error(scaled, [factor * tensor for tensor in once]) < 1e-13


@pytest.mark.parametrize("memory", MEMORY)
def test_second_backward_pass_gives_the_same_gradients(memory: float) -> None:
    p = problem(140, 25, 1031)
    with using(memory=memory):
        loss = summed(p)
    first, second = (torch.autograd.grad(loss * factor, p.leaves, retain_graph=True) for factor in (1, 3))
    third = torch.autograd.grad(loss, p.leaves)
    for one, three_times, once in zip(first, second, third, strict=True):
        assert torch.equal(one, once)
        torch.testing.assert_close(three_times, 3 * one, rtol=1e-13, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, p.leaves)


@both_losses
def test_second_derivatives_are_rejected(loss: Loss) -> None:
    """Otherwise a penalty on a gradient would have no effect, without an error."""
    p = problem(7, 4, 6)
    (grad_hidden_ND,) = torch.autograd.grad(loss(p), p.h, create_graph=True)
    assert torch.equal(grad_hidden_ND, torch.autograd.grad(loss(p), p.h)[0])
    with pytest.raises(ArgumentError, match="no second derivatives"):
        torch.autograd.grad(grad_hidden_ND.square().sum(), p.w)
    with using("reference"):
        (grad_hidden_ND,) = torch.autograd.grad(loss(p), p.h, create_graph=True)
        assert torch.autograd.grad(grad_hidden_ND.square().sum(), p.w)[0].any()


@both_losses
@pytest.mark.parametrize("memory", MEMORY)
def test_batch_gradients_are_the_sum_over_its_parts(loss: Loss, memory: float) -> None:
    p = problem(140, 25, 1031)
    with using(memory=memory):
        whole = p.gradients(loss(p))
        for rows in (slice(start, start + 33) for start in range(0, 140, 33)):
            loss(Problem(p.h[rows], p.w, p.b, p.y[rows])).backward()  # type: ignore[no-untyped-call]
    assert largest_error((leaf.grad for leaf in p.leaves), whole) < 1e-12


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@both_losses
@pytest.mark.parametrize("memory", MEMORY)
def test_repeated_calls_are_bitwise_equal(loss: Loss, memory: float) -> None:
    p = problem(140, 103, 1031).to(torch.float32)
    with using(memory=memory):
        first, second = loss(p), loss(p)
        assert torch.equal(first, second)
        for one, other in zip(p.gradients(first), p.gradients(second), strict=True):
            assert torch.equal(one, other)


# -- memory --------------------------------------------------------------------------------------------------------


@both_losses
@pytest.mark.parametrize("memory", [4.0, 16.0])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((20_000, 128, 20), torch.float32),  # copies of rows take more memory than scores
        ((512, 128, 20_000), torch.float64),
        ((1024, 64, 20_000), torch.bfloat16),  # needs an accumulator if rows are in blocks
    ],
    ids=["wide rows", "float64", "bfloat16"],
)
def test_peak_memory_fits_the_budget_for_unusual_shapes(
    loss: Loss, memory: float, shape: tuple[int, int, int], dtype: torch.dtype, tmp_path: Path
) -> None:
    p = problem(*shape, bias=False).to(dtype)
    gradients = sum(leaf.nbytes for leaf in p.leaves)

    def step() -> list[Tensor]:
        with using(memory=memory):
            return p.gradients(loss(p))

    assert peak(step, tmp_path) < 1.25 * memory * MEBIBYTE + gradients + MEBIBYTE


@both_losses
@pytest.mark.parametrize("memory", [4.0, 16.0])
def test_peak_memory_fits_the_budget(loss: Loss, memory: float, tmp_path: Path) -> None:
    p = problem(512, 32, 20_000).to(torch.float32)
    gradients = sum(leaf.nbytes for leaf in p.leaves)

    def step() -> list[Tensor]:
        with using(memory=memory):
            return p.gradients(loss(p))

    def naive() -> list[Tensor]:
        return p.gradients(F.cross_entropy(F.linear(p.h, p.w, p.b), p.y, reduction="sum"))

    # Apart from the blocks, copies of a few rows and a few numbers per row take memory.
    used = peak(step, tmp_path)
    assert used < memory * MEBIBYTE + gradients + MEBIBYTE
    assert used < peak(naive, tmp_path) / 4


def test_mean_over_many_rows_does_not_overflow_float16() -> None:
    """The gradient of the sum overflows float16, so it must not be computed before the division is known."""
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.full((20_000, 4), 8.0).half(), torch.zeros(3, 4).half().requires_grad_()
    loss = linear_cross_entropy(hidden_ND, weight_VD, torch.zeros(20_000, dtype=torch.long))
    (grad_weight_VD,) = torch.autograd.grad(loss, weight_VD)
    torch.testing.assert_close(
        grad_weight_VD.float(), torch.tensor([[-16 / 3], [8 / 3], [8 / 3]]).expand(3, 4), rtol=1e-3, atol=0
    )


def test_loss_gradient_is_accurate_if_the_tempered_output_is_unused() -> None:
    """The forward pass centres the classes for `tau`; the backward pass must too, even if only `nll` is used."""
    torch.manual_seed(0)
    hidden_ND, targets_N = torch.randn(64, 32), torch.randint(500, (64,))
    weight_VD = torch.randn(500, 32) / 32**0.5 + 3

    def dh(dtype: torch.dtype, autocast: bool) -> Tensor:
        leaf = hidden_ND.to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = row_losses(leaf, weight_VD.to(dtype), None, targets_N, tau=5.0).nll.sum()
        return torch.autograd.grad(loss, leaf)[0].double()

    exact = dh(torch.float64, autocast=False)
    assert (dh(torch.float32, autocast=True) - exact).norm() < 0.01 * exact.norm()
