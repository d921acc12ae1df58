"""Softmax-weighted means in blocks equal those of all scores at once: values and every gradient.

Shapes: U queries, V classes, D dimensions of queries and keys, C dimensions of the values.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from reefknot.kernels.choice import Impl, using
from reefknot.kernels.soft_target import SoftTargets, soft_targets

from .dense import MEMORY, largest_error, relative_error

TAU = 1.7

Tables = tuple[Tensor, Tensor, Tensor]


def tables(queries: int, dim: int, classes: int, values: int, dtype: torch.dtype = torch.float64) -> Tables:
    """Return random queries, keys and values with scores of about one."""
    torch.manual_seed(queries + 1000 * dim + classes)
    queries_UD = torch.randn(queries, dim, dtype=torch.float64)
    keys_VD = torch.randn(classes, dim, dtype=torch.float64) / dim**0.5
    values_VC = torch.randn(classes, values, dtype=torch.float64)
    return copy_tables((queries_UD, keys_VD, values_VC), dtype)


def copy_tables(tables: Tables, dtype: torch.dtype, needs: tuple[bool, ...] = (True, True, True)) -> Tables:
    """Return copies in another dtype, as new leaves that may require gradients."""
    queries_UD, keys_VD, values_VC = (
        tensor.detach().clone().to(dtype).requires_grad_(need) for tensor, need in zip(tables, needs, strict=True)
    )
    return queries_UD, keys_VD, values_VC


def dense_means(queries_UD: Tensor, keys_VD: Tensor, values_VC: Tensor, tau: float) -> SoftTargets:
    """Return the means by definition, as differences from the mean of all values."""
    probs_UV = (queries_UD @ keys_VD.T / tau).softmax(-1)
    return SoftTargets(probs_UV @ values_VC - values_VC.mean(0), (probs_UV * probs_UV.log()).sum(-1))


def weighted_sum(actual: SoftTargets) -> Tensor:
    """Return a sum of all outputs with random weights."""
    torch.manual_seed(5)
    parts = [(tensor.double() * torch.randn(tensor.shape, dtype=torch.float64)).sum() for tensor in actual]
    return torch.stack(parts).sum()


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 2, 1), (7, 12, 257, 5), (140, 25, 1031, 25), (140, 64, 300, 30)],
    ids=lambda s: "x".join(map(str, s)),
)
@pytest.mark.parametrize("memory", MEMORY)
def test_values_and_gradients_match_dense(shape: tuple[int, int, int, int], memory: float) -> None:
    leaves = tables(*shape)
    exact = dense_means(*leaves, TAU)
    with using(memory=memory):
        actual = soft_targets(*leaves, TAU)
        assert largest_error(actual, exact) < 1e-12
        gradients = torch.autograd.grad(weighted_sum(actual), leaves)
    assert largest_error(gradients, torch.autograd.grad(weighted_sum(exact), leaves)) < 1e-11


@pytest.mark.parametrize("memory", MEMORY)
def test_one_table_may_be_keys_and_values(memory: float) -> None:
    queries_UD, keys_VD, _ = tables(140, 25, 1031, 25)
    leaves = [queries_UD, keys_VD]
    exact = dense_means(queries_UD, keys_VD, keys_VD, TAU)
    with using(memory=memory):
        # The same tensor, and a view of it, which gets a separate gradient.
        for values_VC in (keys_VD, keys_VD.view_as(keys_VD)):
            actual = soft_targets(queries_UD, keys_VD, values_VC, TAU)
            assert relative_error(actual.mean, exact.mean) < 1e-12
            gradients = torch.autograd.grad(weighted_sum(actual), leaves)
            expected = torch.autograd.grad(weighted_sum(exact), leaves, retain_graph=True)
            assert largest_error(gradients, expected) < 1e-11


def test_keys_and_values_may_share_memory() -> None:
    torch.manual_seed(0)
    table = torch.randn(30, 8, dtype=torch.float64)
    queries_UD = torch.randn(5, 6, dtype=torch.float64)
    square = torch.randn(6, 6, dtype=torch.float64)
    for keys_VD, values_VC in ((table[:, :6], table), (square, square.T)):
        actual = soft_targets(queries_UD, keys_VD, values_VC, TAU)
        exact = dense_means(queries_UD, keys_VD, values_VC, TAU)
        torch.testing.assert_close(actual.mean, exact.mean)


@pytest.mark.parametrize("needs", [needs for needs in itertools.product((True, False), repeat=3) if any(needs)])
def test_only_inputs_that_require_grad_get_gradients(needs: tuple[bool, ...]) -> None:
    leaves = tables(70, 12, 300, 5)
    expected = torch.autograd.grad(weighted_sum(dense_means(*leaves, TAU)), leaves)
    copies = copy_tables(leaves, torch.float64, needs)
    with using(memory=1e-6):
        weighted_sum(soft_targets(*copies, TAU)).backward()  # type: ignore[no-untyped-call]
    for leaf, need, expected_gradient in zip(copies, needs, expected, strict=True):
        if need:
            assert leaf.grad is not None
            assert relative_error(leaf.grad, expected_gradient) < 1e-11
        else:
            assert leaf.grad is None


def test_soft_targets_pass_gradcheck() -> None:
    leaves = tables(3, 4, 6, 5)
    assert torch.autograd.gradcheck(lambda query, key, value: tuple(soft_targets(query, key, value, TAU)), leaves)


@pytest.mark.parametrize("tau", [1.0, 20.0])
@pytest.mark.parametrize("memory", MEMORY)
def test_nearly_uniform_means_are_accurate_under_autocast(tau: float, memory: float) -> None:
    leaves = tables(140, 64, 1031, 64, torch.float32)
    doubles = copy_tables(leaves, torch.float64)
    exact = dense_means(*doubles, tau)
    with using(memory=memory), torch.autocast("cpu", dtype=torch.bfloat16):
        actual = soft_targets(*leaves, tau)
    assert actual.mean.dtype == actual.negentropy.dtype == torch.float32
    assert largest_error(actual, exact) < 1e-2
    gradients = torch.autograd.grad(weighted_sum(actual), leaves)
    assert [tensor.dtype for tensor in gradients] == [torch.float32] * 3
    assert largest_error(gradients, torch.autograd.grad(weighted_sum(exact), doubles)) < 1e-2


def test_zero_queries_give_empty_means() -> None:
    queries_UD, keys_VD, values_VC = tables(0, 4, 6, 5)
    actual = soft_targets(queries_UD, keys_VD, values_VC, TAU)
    assert actual.mean.shape == (0, 5)
    assert actual.negentropy.shape == (0,)
    assert not torch.autograd.grad(weighted_sum(actual), keys_VD)[0].any()


def test_repeated_calls_are_bitwise_equal() -> None:
    leaves = tables(140, 25, 1031, 30, torch.float32)
    for memory in MEMORY:
        with using(memory=memory):
            runs = [soft_targets(*leaves, TAU) for _ in range(2)]
            gradients = [torch.autograd.grad(weighted_sum(actual), leaves) for actual in runs]
        for first, second in zip((*runs[0], *gradients[0]), (*runs[1], *gradients[1]), strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("separate_values", [False, True], ids=["one table", "two tables"])
def test_half_precision_is_accurate_for_large_means(separate_values: bool) -> None:
    """Half-precision tables are not centred, because that would round them again, so their means must cancel elsewhere.

    The remaining error is the rounding of a gradient times a mean as large as the vectors.
    """
    torch.manual_seed(0)
    queries, keys = (torch.randn(size, 32).add(torch.randn(32)).bfloat16() for size in (24, 300))
    values = torch.randn(300, 16).add(2 * torch.randn(16)).bfloat16() if separate_values else keys
    output_gradients = torch.randn(24, values.shape[1]), torch.randn(24)

    def values_and_gradients(dtype: torch.dtype, impl: Impl) -> list[Tensor]:
        queries_UD, keys_VD = (tensor.to(dtype).requires_grad_() for tensor in (queries, keys))
        values_VC = values.to(dtype).requires_grad_() if separate_values else keys_VD
        with using(impl):
            targets = soft_targets(queries_UD, keys_VD, values_VC, 20.0)
        objective = sum(
            (tensor.double() * gradient).sum() for tensor, gradient in zip(targets, output_gradients, strict=True)
        )
        inputs = [queries_UD, keys_VD, *([values_VC] if separate_values else [])]
        return [*targets, *torch.autograd.grad(objective, inputs)]

    for actual, expected in zip(
        values_and_gradients(torch.bfloat16, "chunked"), values_and_gradients(torch.float64, "reference"), strict=True
    ):
        assert (actual.double() - expected).norm() < 0.05 * expected.norm()
