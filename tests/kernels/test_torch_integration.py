"""The losses work with `torch.func`, `torch.compile`, `torch.export`, tensors without values, and nested autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from reefknot.errors import ArgumentError
from reefknot.kernels.divergence import linear_divergence
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy
from reefknot.kernels.log_probs import linear_log_probs

from .dense import largest_error, problem

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def mean(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, memory=0.01)


def capped(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, target, softcap=2.0, label_smoothing=0.1, z_loss=1e-3)


def policy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    results = linear_log_probs(hidden, weight, target, temperature=0.7)
    return results.log_probs.sum() + 0.1 * results.entropy.sum() + results.lse.square().sum()


def divergence(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_divergence((hidden, weight), (hidden.detach() * 2, weight.detach()))


def row_divergences(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return linear_divergence((hidden, weight), (hidden.detach() * 2, weight.detach()), reduction="none").square().sum()


LOSSES = [mean, capped, policy, divergence, row_divergences]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=[loss.__name__ for loss in LOSSES])


@every_loss
def test_functional_gradients_equal_autograds(loss: Loss) -> None:
    p = problem(12, 5, 33, bias=False)
    expected = torch.autograd.grad(loss(p.h, p.w, p.y), [p.h, p.w])
    hidden, weight = p.h.detach(), p.w.detach()
    actual = torch.func.grad(loss, argnums=(0, 1))(hidden, weight, p.y)
    assert largest_error(actual, expected) < 1e-13
    value_gradient, value = torch.func.grad_and_value(loss)(hidden, weight, p.y)
    assert largest_error([value_gradient, value], [expected[0], loss(p.h, p.w, p.y)]) < 1e-13


@every_loss
def test_vmap_equals_a_loop(loss: Loss) -> None:
    p = problem(12, 5, 33, bias=False)
    hidden, weight, target = p.h.detach().view(3, 4, 5), p.w.detach(), p.y.view(3, 4)
    values = torch.vmap(loss, in_dims=(0, None, 0))(hidden, weight, target)
    loop = torch.stack(
        [loss(*arguments, t) for arguments, t in zip(((h, weight) for h in hidden), target, strict=True)]
    )
    torch.testing.assert_close(values, loop)
    per_sample = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None, 0))(hidden, weight, target)
    for index in range(3):
        expected = torch.func.grad(loss, argnums=(0, 1))(hidden[index], weight, target[index])
        assert largest_error([tensor[index] for tensor in per_sample], expected) < 1e-13


@every_loss
def test_second_derivatives_are_refused_when_they_are_taken(loss: Loss) -> None:
    p = problem(12, 5, 33, bias=False)
    hidden, weight = p.h.detach(), p.w.detach()

    def penalty(hidden: Tensor) -> Tensor:
        return torch.func.grad(loss)(hidden, weight, p.y).square().sum()

    assert penalty(hidden) > 0
    with pytest.raises(ArgumentError, match="no second derivatives"):
        torch.func.grad(penalty)(hidden)


@every_loss
def test_compiled_and_exported_losses_equal_eager(loss: Loss) -> None:
    p = problem(12, 5, 33, bias=False)
    expected = loss(p.h, p.w, p.y)
    gradients = torch.autograd.grad(expected, [p.h, p.w])
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    actual = compiled(p.h, p.w, p.y)
    assert largest_error([actual, *torch.autograd.grad(actual, [p.h, p.w])], [expected, *gradients]) < 1e-13

    class Module(torch.nn.Module):
        def forward(self, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            return loss(hidden, weight, target)

    arguments = (p.h.detach(), p.w.detach(), p.y)
    exported = torch.export.export(Module(), arguments)
    torch.testing.assert_close(exported.module()(*arguments), expected.detach())


@every_loss
def test_tensors_without_values_give_shapes(loss: Loss) -> None:
    p = problem(12, 5, 33, bias=False)
    expected = loss(p.h, p.w, p.y)
    meta = [tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for tensor in (p.h, p.w, p.y)]
    assert loss(*meta).shape == expected.shape
    mode: Any = FakeTensorMode(allow_non_fake_inputs=False)
    detached = [tensor.detach() for tensor in (p.h, p.w, p.y)]
    with mode:
        hidden, weight, target = (mode.from_tensor(tensor) for tensor in detached)
        fake = [hidden.requires_grad_(), weight.requires_grad_(), target]
        value = loss(*fake)
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
        assert [tensor.shape for tensor in torch.autograd.grad(value, fake[:2])] == [p.h.shape, p.w.shape]


@every_loss
def test_inference_mode_and_nested_autocast(loss: Loss) -> None:
    p = problem(12, 8, 33, bias=False).to(torch.float32)
    expected = loss(p.h, p.w, p.y)
    with torch.inference_mode():
        torch.testing.assert_close(loss(p.h, p.w, p.y), expected.detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = loss(p.h, p.w, p.y)
        with torch.autocast("cpu", enabled=False):
            torch.testing.assert_close(loss(p.h, p.w, p.y), expected)
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - expected).abs().item() < 0.1 * max(expected.abs().item(), 1)


def test_reference_has_second_derivatives_in_torch_func() -> None:
    p = problem(6, 3, 7, bias=False)
    hidden, weight = p.h.detach(), p.w.detach()

    def plain(hidden: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.T, p.y)

    def reference(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, p.y, impl="reference", check_targets=False)

    for transform in (torch.func.grad, lambda function: torch.func.jacrev(torch.func.grad(function))):
        torch.testing.assert_close(transform(reference)(hidden), transform(plain)(hidden))


@pytest.mark.parametrize("loss", [mean, capped, policy], ids=["mean", "capped", "policy"])
def test_graphs_with_dynamic_shapes_are_whole(loss: Loss) -> None:
    compiled = torch.compile(loss, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (12, 17):
        p = problem(rows, 5, 33, bias=False)
        torch.testing.assert_close(compiled(p.h, p.w, p.y), loss(p.h, p.w, p.y))
