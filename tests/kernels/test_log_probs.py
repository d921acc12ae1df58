"""`linear_log_probs` equals a log_softmax of all scores, with every gradient, in float64.

Shapes: N rows, D dimensions, V classes.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reefknot.errors import ArgumentError
from reefknot.kernels.log_probs import linear_log_probs

from .dense import MEMORY, Problem, largest_error, problem
from .scored import TRANSFORMS, Transform, dense_log_probs, objective


def check(p: Problem, transform: Transform, which: str, **choice: Any) -> None:
    expected = dense_log_probs(p, transform)
    actual = linear_log_probs(p.h, p.w, p.y, linear_bias=p.b, **transform.arguments, **choice)
    assert largest_error(actual[:3], expected[:3]) < 1e-11
    assert torch.equal(actual.argmax, expected.argmax)
    assert not actual.argmax.requires_grad
    assert largest_error(p.gradients(objective(actual, which)), p.gradients(objective(expected, which))) < 1e-10


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
@pytest.mark.parametrize("which", ["log_probs", "entropy", "lse", "all"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_results_and_gradients_equal_the_dense_formula(transform: Transform, which: str, bias: bool) -> None:
    p = problem(33, 12, 300, bias)
    for memory in MEMORY:
        check(p, transform, which, impl="chunked", memory=memory)
    check(p, transform, which, impl="reference")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    dim=st.integers(1, 20),
    classes=st.integers(2, 700),
    bias=st.booleans(),
    transform=st.sampled_from(list(TRANSFORMS.values())),
    memory=st.sampled_from([1e-6, 0.05, 64.0]),
)
def test_random_shapes_equal_the_dense_formula(
    rows: int, dim: int, classes: int, bias: bool, transform: Transform, memory: float
) -> None:
    check(problem(rows, dim, classes, bias), transform, "all", memory=memory)


def test_any_leading_shape_works() -> None:
    p = problem(12, 5, 9)
    flat = linear_log_probs(p.h, p.w, p.y)
    shaped = linear_log_probs(p.h.view(3, 4, 5), p.w, p.y.view(3, 4))
    for flat_result, shaped_result in zip(flat, shaped, strict=True):
        assert torch.equal(shaped_result, flat_result.view(3, 4))
    assert linear_log_probs(p.h[:0], p.w, p.y[:0]).argmax.shape == (0,)


def test_classes_of_probability_zero_do_not_give_nan() -> None:
    p = problem(7, 4, 300, ignored=False)
    bias_V = torch.zeros(300, dtype=torch.float64)
    bias_V[3:290] = -torch.inf
    targets_N = torch.tensor([0, 1, 2, 290, 291, 299, 1])
    for impl, memory in itertools.product(("chunked", "reference"), MEMORY):
        results = linear_log_probs(p.h, p.w, targets_N, linear_bias=bias_V, impl=impl, memory=memory)
        total = 3 * (results.log_probs.sum() + results.entropy.sum())
        gradients = torch.autograd.grad(total, [p.h, p.w])
        assert all(tensor.isfinite().all() for tensor in (*results, *gradients))


@pytest.mark.parametrize("memory", MEMORY)
def test_entropies_of_large_scores_keep_their_digits(memory: float) -> None:
    p = problem(70, 12, 2000, ignored=False).to(torch.float32)
    with torch.no_grad():
        p.h.mul_(1e3)
    exact = p.to(torch.float64)
    expected = dense_log_probs(exact, Transform()).entropy
    actual = linear_log_probs(p.h, p.w, p.y, linear_bias=p.b, memory=memory).entropy
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-3)
    assert largest_error(p.gradients(actual.sum()), exact.gradients(expected.sum())) < 2e-2


def test_half_precision_scores_are_computed_in_float32() -> None:
    exact = problem(64, 32, 500, ignored=False).to(torch.bfloat16).to(torch.float64)
    p = exact.to(torch.bfloat16)
    expected, actual = dense_log_probs(exact, Transform()), linear_log_probs(p.h, p.w, p.y, linear_bias=p.b)
    assert actual.entropy.dtype == torch.float32
    assert largest_error(actual[:3], expected[:3]) < 1e-6
    assert largest_error(p.gradients(objective(actual, "all")), exact.gradients(objective(expected, "all"))) < 5e-3


def test_unused_results_take_no_part_in_the_backward_pass() -> None:
    p = problem(20, 5, 9)
    only_log_probs = p.gradients(linear_log_probs(p.h, p.w, p.y, linear_bias=p.b).log_probs.sum())
    results = linear_log_probs(p.h, p.w, p.y, linear_bias=p.b)
    with_zero_weight = p.gradients(results.log_probs.sum() + 0 * results.entropy.sum())
    assert largest_error(with_zero_weight, only_log_probs) < 1e-12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": torch.zeros(6)}, "must be integers"),
        ({"target": torch.full((6,), 9)}, "target 9 of row 0 is not a class"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"linear_weight": torch.randn(9, 3)}, r"linear_weight is \(9, 3\)"),
        ({"ignore_index": 0.5}, "ignore_index = 0.5"),
    ],
)
def test_mistakes_get_one_clear_sentence(arguments: dict[str, Any], message: str) -> None:
    valid = {"input": torch.randn(6, 4), "linear_weight": torch.randn(9, 4), "target": torch.zeros(6).long()}
    with pytest.raises(ArgumentError, match=message) as error:
        linear_log_probs(**(valid | arguments))
    assert str(error.value).startswith("linear_log_probs: ")
