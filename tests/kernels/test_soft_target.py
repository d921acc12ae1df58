"""Softmax-weighted means in blocks against all scores at once: values and every gradient.

Shapes: U queries, V classes, D width of queries and keys, C width of the values.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from reefknot.kernels.choice import Impl, using
from reefknot.kernels.soft_target import SoftTargets, soft_targets

from .dense import MEMORY, furthest, off

TAU = 1.7


Tables = tuple[Tensor, Tensor, Tensor]


def tables(queries: int, width: int, classes: int, values: int, dtype: torch.dtype = torch.float64) -> Tables:
    """Queries, keys and values, with scores of about one."""
    torch.manual_seed(queries + 1000 * width + classes)
    queries_UD = torch.randn(queries, width, dtype=torch.float64)
    keys_VD = torch.randn(classes, width, dtype=torch.float64) / width**0.5
    values_VC = torch.randn(classes, values, dtype=torch.float64)
    return like((queries_UD, keys_VD, values_VC), dtype)


def like(tables: Tables, dtype: torch.dtype, needs: tuple[bool, ...] = (True, True, True)) -> Tables:
    """The same numbers in a type, as fresh leaves of which some need gradients."""
    queries_UD, keys_VD, values_VC = (
        each.detach().clone().to(dtype).requires_grad_(need) for each, need in zip(tables, needs, strict=True)
    )
    return queries_UD, keys_VD, values_VC


def dense_means(queries_UD: Tensor, keys_VD: Tensor, values_VC: Tensor, tau: float) -> SoftTargets:
    """By definition; the mean as it departs from that of all values."""
    q_UV = (queries_UD @ keys_VD.T / tau).softmax(-1)
    return SoftTargets(q_UV @ values_VC - values_VC.mean(0), (q_UV * q_UV.log()).sum(-1))


def weighed(found: SoftTargets) -> Tensor:
    """A number that depends on everything, each part weighed differently."""
    torch.manual_seed(5)
    parts = [(each.double() * torch.randn(each.shape, dtype=torch.float64)).sum() for each in found]
    return torch.stack(parts).sum()


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 2, 1), (7, 12, 257, 5), (140, 25, 1031, 25), (140, 64, 300, 30)],
    ids=lambda s: "x".join(map(str, s)),
)
@pytest.mark.parametrize("memory", MEMORY)
def test_values_and_gradients(shape: tuple[int, int, int, int], memory: float) -> None:
    leaves = tables(*shape)
    exact = dense_means(*leaves, TAU)
    with using(memory=memory):
        found = soft_targets(*leaves, TAU)
        assert furthest(found, exact) < 1e-12
        gradients = torch.autograd.grad(weighed(found), leaves)
    assert furthest(gradients, torch.autograd.grad(weighed(exact), leaves)) < 1e-11


@pytest.mark.parametrize("memory", MEMORY)
def test_one_table_that_is_keys_and_values(memory: float) -> None:
    queries_UD, keys_VD, _ = tables(140, 25, 1031, 25)
    leaves = [queries_UD, keys_VD]
    exact = dense_means(queries_UD, keys_VD, keys_VD, TAU)
    with using(memory=memory):
        # The same tensor, and another one with the same numbers, which has a gradient of its own.
        for values_VC in (keys_VD, keys_VD.view_as(keys_VD)):
            found = soft_targets(queries_UD, keys_VD, values_VC, TAU)
            assert off(found.mean, exact.mean) < 1e-12
            gradients = torch.autograd.grad(weighed(found), leaves)
            expected = torch.autograd.grad(weighed(exact), leaves, retain_graph=True)
            assert furthest(gradients, expected) < 1e-11


def test_values_that_begin_where_the_keys_do() -> None:
    torch.manual_seed(0)
    table = torch.randn(30, 8, dtype=torch.float64)
    queries_UD = torch.randn(5, 6, dtype=torch.float64)
    square = torch.randn(6, 6, dtype=torch.float64)
    for keys_VD, values_VC in ((table[:, :6], table), (square, square.T)):
        found = soft_targets(queries_UD, keys_VD, values_VC, TAU)
        exact = dense_means(queries_UD, keys_VD, values_VC, TAU)
        torch.testing.assert_close(found.mean, exact.mean)


@pytest.mark.parametrize("needs", [needs for needs in itertools.product((True, False), repeat=3) if any(needs)])
def test_only_what_is_asked_for_has_a_gradient(needs: tuple[bool, ...]) -> None:
    leaves = tables(70, 12, 300, 5)
    expected = torch.autograd.grad(weighed(dense_means(*leaves, TAU)), leaves)
    own = like(leaves, torch.float64, needs)
    with using(memory=1e-6):
        weighed(soft_targets(*own, TAU)).backward()  # type: ignore[no-untyped-call]
    for leaf, need, other in zip(own, needs, expected, strict=True):
        if need:
            assert leaf.grad is not None
            assert off(leaf.grad, other) < 1e-11
        else:
            assert leaf.grad is None


def test_differences_confirm_every_gradient() -> None:
    leaves = tables(3, 4, 6, 5)
    assert torch.autograd.gradcheck(lambda query, key, value: tuple(soft_targets(query, key, value, TAU)), leaves)


@pytest.mark.parametrize("tau", [1.0, 20.0])
@pytest.mark.parametrize("memory", MEMORY)
def test_nearly_uniform_means_keep_their_digits_under_autocast(tau: float, memory: float) -> None:
    leaves = tables(140, 64, 1031, 64, torch.float32)
    doubles = like(leaves, torch.float64)
    exact = dense_means(*doubles, tau)
    with using(memory=memory), torch.autocast("cpu", dtype=torch.bfloat16):
        found = soft_targets(*leaves, tau)
    assert found.mean.dtype == found.negentropy.dtype == torch.float32
    assert furthest(found, exact) < 1e-2
    gradients = torch.autograd.grad(weighed(found), leaves)
    assert [each.dtype for each in gradients] == [torch.float32] * 3
    assert furthest(gradients, torch.autograd.grad(weighed(exact), doubles)) < 1e-2


def test_no_queries_have_no_means() -> None:
    queries_UD, keys_VD, values_VC = tables(0, 4, 6, 5)
    found = soft_targets(queries_UD, keys_VD, values_VC, TAU)
    assert found.mean.shape == (0, 5)
    assert found.negentropy.shape == (0,)
    assert not torch.autograd.grad(weighed(found), keys_VD)[0].any()


def test_two_runs_are_equal_to_the_bit() -> None:
    leaves = tables(140, 25, 1031, 30, torch.float32)
    for memory in MEMORY:
        with using(memory=memory):
            runs = [soft_targets(*leaves, TAU) for _ in range(2)]
            gradients = [torch.autograd.grad(weighed(found), leaves) for found in runs]
        for one, other in zip((*runs[0], *gradients[0]), (*runs[1], *gradients[1]), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("apart", [False, True], ids=["one table", "two tables"])
def test_tables_in_half_precision_keep_their_large_means_out(apart: bool) -> None:
    """They are not centred, which would round them again: what that leaves in the scores must come off elsewhere. What
    stays is the rounding of a gradient times a mean as large as the vectors."""
    torch.manual_seed(0)
    queries, keys = (torch.randn(size, 32).add(torch.randn(32)).bfloat16() for size in (24, 300))
    values = torch.randn(300, 16).add(2 * torch.randn(16)).bfloat16() if apart else keys
    sent = torch.randn(24, values.shape[1]), torch.randn(24)

    def measured(dtype: torch.dtype, impl: Impl) -> list[Tensor]:
        l_UD, k_VD = (each.to(dtype).requires_grad_() for each in (queries, keys))
        w_VC = values.to(dtype).requires_grad_() if apart else k_VD
        with using(impl):
            found = soft_targets(l_UD, k_VD, w_VC, 20.0)
        objective = sum((each.double() * g).sum() for each, g in zip(found, sent, strict=True))
        wanted = [l_UD, k_VD, *([w_VC] if apart else [])]
        return [*found, *torch.autograd.grad(objective, wanted)]

    for got, want in zip(measured(torch.bfloat16, "chunked"), measured(torch.float64, "reference"), strict=True):
        assert (got.double() - want).norm() < 0.05 * want.norm()
