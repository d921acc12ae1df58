"""Scores that are kept in the memory of a gradient give the same losses and gradients as scores computed twice.

Shapes: N rows, D dimensions, V classes, K experts of a mixture.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reefknot.kernels.blocks import BlockCosts
from reefknot.kernels.choice import using
from reefknot.kernels.kept_scores import choose_kept_layout
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.kernels.losses import summed_loss
from reefknot.kernels.passes import allocate_gradient
from reefknot.kernels.scores import KeptBlock, ScoreTransform, TorchBackend

from .dense import IGNORE, Problem, dense_losses, largest_error, problem, relative_error
from .scored import TRANSFORMS, dense_cross_entropy

SMALL = 1e-6
"""A budget in MiB with which classes are computed in blocks of 256."""
ALL, SOME, NONE, FIRST_ROWS = (20, 24, 1100), (40, 25, 3000), (60, 8, 300), (140, 25, 1031)
"""Shapes, (N, D, V), by which scores fit into the memory of the gradient. The last has several blocks of rows."""


class CountingBackend(TorchBackend):
    """Counts the classes whose scores are computed again for the gradient."""

    def __init__(self) -> None:
        self.recomputed = 0
        self.speed_of_products: float | None = None

    def operations_per_byte(self, dtype: torch.dtype) -> float | None:
        return self.speed_of_products

    def score_gradient(self, hidden_ND: Tensor, weight_VD: Tensor, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        self.recomputed += hidden_ND.shape[0] * weight_VD.shape[0]
        return super().score_gradient(hidden_ND, weight_VD, *arguments)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> CountingBackend:
    backend = CountingBackend()
    monkeypatch.setattr("reefknot.kernels.losses.get_backend", lambda impl: backend)
    return backend


@pytest.mark.parametrize(
    ("shape", "least", "most"), [(ALL, 0.0, 0.0), (SOME, 0.3, 0.6), (NONE, 1.0, 1.0), (FIRST_ROWS, 0.5, 0.9)]
)
def test_kept_scores_are_not_computed_again(
    shape: tuple[int, int, int], least: float, most: float, backend: CountingBackend
) -> None:
    p = problem(*shape)
    exact = dense_losses(p)[0].sum()
    with using(memory=SMALL):
        actual = summed_loss(p.h, p.w, p.b, p.y)
    assert least <= backend.recomputed / (shape[0] * shape[2]) <= most
    assert relative_error(actual, exact) < 1e-14
    assert largest_error(p.gradients(actual), p.gradients(exact)) < 1e-14


def test_scores_are_computed_again_if_the_classes_need_no_gradient(backend: CountingBackend) -> None:
    p = problem(*ALL)
    exact = dense_losses(p)[0].sum()
    with using(memory=SMALL):
        actual = summed_loss(p.h, p.w.detach(), None if p.b is None else p.b.detach(), p.y)
    assert backend.recomputed == ALL[0] * ALL[2]
    assert largest_error(torch.autograd.grad(actual, [p.h]), torch.autograd.grad(exact, [p.h])) < 1e-14


def test_more_memory_keeps_more_scores(backend: CountingBackend) -> None:
    p = problem(64, 16, 6000)
    gradients = p.gradients(dense_losses(p)[0].sum())
    backend.speed_of_products = 0.1
    shares = []
    for memory in (2.0, 3.0, 4.0, 5.0):  # all scores with temporary tensors take 9 MiB
        backend.recomputed = 0
        with using(memory=memory):
            actual = summed_loss(p.h, p.w, p.b, p.y)
        assert largest_error(p.gradients(actual), gradients) < 1e-14
        shares.append(backend.recomputed / (64 * 6000))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.2
    assert shares[-1] == 0


def test_no_score_is_computed_twice_if_blocks_of_rows_fit(backend: CountingBackend) -> None:
    p = problem(400, 16, 6000)
    gradients = p.gradients(dense_losses(p)[0].sum())
    backend.speed_of_products = 1e9
    with using(memory=12.0):
        actual = summed_loss(p.h, p.w, p.b, p.y)
    assert backend.recomputed == 0
    assert largest_error(p.gradients(actual), gradients) < 1e-14


class InPlaceBackend(CountingBackend):
    """Writes the gradient of the scores over the scores where that is allowed, as the backend for GPUs does."""

    def kept_gradient(
        self, block: KeptBlock, reference_N: Tensor, transform: ScoreTransform, dtype: torch.dtype, in_place: bool
    ) -> Tensor:
        grad_NV = super().kept_gradient(block, reference_N, transform, dtype, in_place)
        return block.scores.copy_(grad_NV) if in_place else grad_NV


def allocate_poisoned(*arguments: Any) -> Tensor:
    return allocate_gradient(*arguments).fill_(torch.nan)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 150),
    dim=st.integers(1, 40),
    classes=st.integers(250, 3000),
    memory=st.sampled_from([SMALL, 0.5, 2.0, 4.0]),
    speed=st.sampled_from([None, 0.1, 1e9]),
)
def test_no_score_is_read_after_the_gradient_has_overwritten_it(
    rows: int, dim: int, classes: int, memory: float, speed: float | None
) -> None:
    p = problem(rows, dim, classes)
    exact = dense_losses(p)[0].sum()
    backend = InPlaceBackend()
    backend.speed_of_products = speed
    with (
        mock.patch("reefknot.kernels.losses.get_backend", return_value=backend),
        mock.patch("reefknot.kernels.passes.allocate_gradient", allocate_poisoned),
        using(memory=memory),
    ):
        actual = summed_loss(p.h, p.w, p.b, p.y)
        gradients = p.gradients(actual)
    assert relative_error(actual, exact) < 1e-13
    assert largest_error(gradients, p.gradients(exact)) < 1e-13


@given(
    rows=st.integers(1, 40_000),
    classes=st.integers(300, 300_000),
    dim=st.integers(8, 4096),
    budget=st.integers(2**20, 2**34),
    gradient_bytes=st.sampled_from([2, 4]),
)
def test_layouts_fit_the_budget(rows: int, classes: int, dim: int, budget: int, gradient_bytes: int) -> None:
    costs = BlockCosts(bytes_per_score=2, bytes_per_row=8 * dim, bytes_per_class=2 * dim, size_multiple=128)
    layout = choose_kept_layout(rows, classes, dim, costs, budget, 2.0, gradient_bytes * dim, 180.0)
    if layout is None:
        assert costs.total_bytes(rows, min(classes, 4096), several=False) > budget
        return
    block = layout.block_size
    assert block.rows == rows
    used = costs.total_bytes(rows, block.classes, several=False) + layout.spare_blocks * rows * block.classes * 2
    assert used <= budget


@pytest.mark.parametrize("shape", [ALL, SOME])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transformed_and_weighted_losses_match_dense(shape: tuple[int, int, int], transform: Any) -> None:
    p = problem(*shape)
    weight_V = torch.linspace(0.2, 2.0, shape[2], dtype=torch.float64)
    exact = dense_cross_entropy(p, transform, weight=weight_V, reduction="mean", label_smoothing=0.0, z_loss=0.0)
    actual = linear_cross_entropy(p.h, p.w, p.y, p.b, weight=weight_V, **transform.arguments, memory=SMALL)
    assert relative_error(actual, exact) < 1e-13
    assert largest_error(p.gradients(actual), p.gradients(exact)) < 1e-13


@pytest.mark.parametrize("shape", [(24, 24, 1100), (42, 25, 3000)])
def test_mixture_loss_matches_dense(shape: tuple[int, int, int]) -> None:
    p = problem(*shape, ignored=False)
    targets_N = p.y[: shape[0] // 3].clone()
    targets_N[1] = IGNORE
    log_prior_NK = torch.randn(len(targets_N), 3, dtype=torch.float64).log_softmax(-1).requires_grad_()
    nll_NK = dense_losses(Problem(p.h, p.w, p.b, targets_N.repeat_interleave(3)))[0].view(-1, 3)
    exact = -torch.logsumexp(log_prior_NK - nll_NK, dim=-1).where(targets_N != IGNORE, 0.0).sum()
    with using(memory=SMALL):
        actual = summed_loss(p.h, p.w, p.b, targets_N, log_prior_NK)
    leaves = [*p.leaves, log_prior_NK]
    assert relative_error(actual, exact) < 1e-13
    assert largest_error(torch.autograd.grad(actual, leaves), torch.autograd.grad(exact, leaves)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_products_and_gradients(dtype: torch.dtype) -> None:
    """The gradient has less memory per class if it is in half precision too."""
    exact = problem(*SOME)
    loss = dense_losses(exact)[0].sum()
    p = exact.to(dtype)
    with using(memory=SMALL), torch.autocast("cpu", dtype=torch.bfloat16):
        actual = summed_loss(p.h, p.w, p.b, p.y)
    assert largest_error(p.gradients(actual), exact.gradients(loss)) < 1e-2


def test_blocks_without_any_possible_class_give_finite_gradients() -> None:
    start = problem(*ALL)
    assert start.b is not None
    ruled_out_V = start.b.detach().clone()
    ruled_out_V[256:768] = -torch.inf
    targets_N = start.y.where((start.y < 256) | (start.y >= 768), 5)
    p = Problem(start.h, start.w, ruled_out_V.requires_grad_(), targets_N)
    exact = dense_losses(p)[0].sum()
    with using(memory=SMALL):
        actual = summed_loss(p.h, p.w, p.b, p.y)
    assert largest_error(p.gradients(actual), p.gradients(exact)) < 1e-14


def test_extreme_scores_do_not_overflow() -> None:
    start = problem(*ALL).to(torch.float32)
    exact = Problem(start.h * 1e4, start.w, start.b, start.y).to(torch.float64)
    p = exact.to(torch.float32)
    loss = dense_losses(exact)[0].sum()
    with using(memory=SMALL):
        actual = summed_loss(p.h, p.w, p.b, p.y)
    assert relative_error(actual, loss) < 2e-6
    assert largest_error(p.gradients(actual), exact.gradients(loss)) < 1e-5
