"""The kernel of `linear_divergence` matches float64: small shapes in triton's interpreter, large shapes on a GPU.

TRITON_INTERPRET=1 pytest tests/kernels/test_triton_divergence.py      runs only the interpreted tests

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from reefknot.kernels.divergence import linear_divergence

from .dense import largest_error, relative_error
from .interpreter import INTERPRETED, gpu_only, gpu_or_interpreter
from .test_divergence import KINDS, Side, leaves, make_side, torch_divergence

pytest.importorskip("triton", reason="triton is not installed")

DEVICE = "cpu" if INTERPRETED else "cuda"


def convert(side: Side, dtype: torch.dtype, device: str = DEVICE) -> Side:
    """Return leaves with the same values in another type."""
    hidden, weight, bias = (
        None if tensor is None else tensor.detach().to(device, dtype).requires_grad_() for tensor in side
    )
    assert hidden is not None
    assert weight is not None
    return hidden, weight, bias


def compare(student: Side, teacher: Side, kind: Any, exact: tuple[Side, Side], **settings: Any) -> tuple[float, float]:
    """Return the errors of the losses and of the gradients against float64."""
    losses_N = torch_divergence(*exact, kind, beta=0.3, temperature=1.7)
    weights_N = torch.linspace(-0.5, 1.5, len(losses_N), dtype=torch.float64, device=losses_N.device)
    actual_N = linear_divergence(
        student,
        teacher,
        kind,
        beta=0.3,
        temperature=1.7,
        reduction="none",
        teacher_grad=True,
        impl="triton",
        **settings,
    )
    gradients = torch.autograd.grad((actual_N * weights_N.to(actual_N)).sum(), leaves(student, teacher))
    exact_gradients = torch.autograd.grad((losses_N * weights_N).sum(), leaves(*exact))
    return relative_error(actual_N, losses_N), largest_error(gradients, exact_gradients)


@gpu_or_interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 5), (7, 12, 131)], ids=str)
@pytest.mark.parametrize("memory", [64.0, 1e-3])
def test_small_shapes_match_float64(kind: str, bias: bool, shape: tuple[int, int, int], memory: float) -> None:
    torch.manual_seed(0)
    rows, dim, classes = shape
    student = convert(make_side(rows, dim, classes, bias), torch.float32)
    teacher = convert(make_side(rows, dim + 3, classes, bias), torch.float32)
    exact = convert(student, torch.float64), convert(teacher, torch.float64)
    loss_error, gradient_error = compare(student, teacher, kind, exact, memory=memory)
    assert loss_error < 2e-6
    assert gradient_error < 1e-5


@gpu_or_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_more_classes_than_lanes_match_float64(kind: str) -> None:
    torch.manual_seed(0)
    student, teacher = (convert(make_side(2, 5, 4500), torch.float32) for _ in range(2))
    exact = convert(student, torch.float64), convert(teacher, torch.float64)
    loss_error, gradient_error = compare(student, teacher, kind, exact)
    assert loss_error < 2e-6
    assert gradient_error < 1e-5


@gpu_or_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_skips_masked_rows_even_if_they_are_nan(kind: Any) -> None:
    torch.manual_seed(0)
    student, teacher = (convert(make_side(5, 4, 33), torch.float32) for _ in range(2))
    mask_N = torch.tensor([True, False, True, True, False], device=DEVICE)
    with torch.no_grad():
        student[0][1] = math.nan
        teacher[0][4] = math.inf
    exact = convert(student, torch.float64), convert(teacher, torch.float64)
    expected = torch_divergence(
        (exact[0][0][mask_N], *exact[0][1:]), (exact[1][0][mask_N], *exact[1][1:]), kind, 0.5, 1.0
    ).mean()
    actual = linear_divergence(student, teacher, kind, mask=mask_N, impl="triton")
    assert relative_error(actual, expected) < 2e-6
    gradients = torch.autograd.grad(actual, leaves(student))
    assert largest_error(gradients, torch.autograd.grad(expected, leaves(exact[0]))) < 1e-5


@gpu_or_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_ruled_out_classes_add_nothing(kind: Any) -> None:
    torch.manual_seed(0)
    student, teacher = (convert(make_side(5, 4, 33), torch.float32) for _ in range(2))
    kept_classes = torch.arange(20, device=DEVICE)
    expected = linear_divergence(student, teacher, kind, classes=kept_classes, impl="reference")
    expected_gradients = torch.autograd.grad(expected, leaves(student))
    with torch.no_grad():
        for side in (student, teacher):
            assert side[2] is not None
            side[2][20:] = -math.inf
    actual = linear_divergence(student, teacher, kind, impl="triton")
    assert relative_error(actual, expected) < 2e-6
    assert largest_error(torch.autograd.grad(actual, leaves(student)), expected_gradients) < 1e-5


@gpu_only
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(700, 256, 33_278), (129, 777, 50_257), (2048, 64, 1000)], ids=str)
def test_bfloat16_matches_float64_and_repeats_to_the_bit(kind: Any, shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    student, teacher = (convert(make_side(*shape), torch.bfloat16) for _ in range(2))
    exact = convert(student, torch.float64), convert(teacher, torch.float64)
    for memory in (64.0, 2048.0):
        loss_error, gradient_error = compare(student, teacher, kind, exact, memory=memory)
        assert loss_error < 1e-4
        assert gradient_error < 5e-3

    def gradients() -> list[Tensor]:
        loss = linear_divergence(student, teacher, kind, teacher_grad=True)
        return [loss, *torch.autograd.grad(loss, leaves(student, teacher))]

    assert all(torch.equal(first, second) for first, second in zip(gradients(), gradients(), strict=True))
