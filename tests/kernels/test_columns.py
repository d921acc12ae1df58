"""Class vectors that are several matrices side by side give the loss and gradients of one matrix.

Shapes: N rows, D dimensions of the weight, R of the adapter, V classes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from reefknot.kernels.columns import join_columns
from reefknot.kernels.linear_cross_entropy import linear_cross_entropy

N, D, R, V = 23, 10, 3, 700
SETTINGS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "rows": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 2.0, "logit_scale": 0.5, "label_smoothing": 0.1},
    "class weights": {"weight": torch.linspace(0.5, 2, V), "label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
}


def make_tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return hidden states, low-rank rows, weight, adapter and bias."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(N, D), (N, R), (V, D), (V, R), (V,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def loss_and_gradients(tensors: list[Tensor], trained: list[bool], is_joined: bool, **settings: Any) -> list[Any]:
    """Return the loss, and the gradient of each tensor that is trained."""
    tensors = [tensor.clone().requires_grad_(is_trained) for tensor, is_trained in zip(tensors, trained, strict=True)]
    hidden_ND, low_NR, weight_VD, adapter_VR, bias_V = tensors
    targets_N = torch.arange(N) * 30
    targets_N[4] = -100
    weight: Any = join_columns([weight_VD, adapter_VR]) if is_joined else torch.cat([weight_VD, adapter_VR], 1)
    loss = linear_cross_entropy(torch.cat([hidden_ND, low_NR], 1), weight, targets_N, bias_V, **settings)
    (loss * torch.linspace(1, 2, loss.numel()).view(loss.shape)).sum().backward()
    return [loss.detach(), *(tensor.grad for tensor in tensors)]


@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("memory", [1e-6, 0.05, 64.0])
@pytest.mark.parametrize("trains_weight", [True, False], ids=["trained", "frozen"])
def test_loss_and_gradients_equal_those_of_one_matrix(name: str, memory: float, trains_weight: bool) -> None:
    trained = [True, True, trains_weight, True, True]
    settings = {**SETTINGS[name], "memory": memory, "impl": "chunked"}
    expected = loss_and_gradients(make_tensors(), trained, False, **settings)
    for actual, value in zip(loss_and_gradients(make_tensors(), trained, True, **settings), expected, strict=True):
        assert (actual is None) == (value is None)
        if actual is not None:
            torch.testing.assert_close(actual, value, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_every_implementation_takes_joined_columns(impl: str) -> None:
    expected = loss_and_gradients(make_tensors(), [True] * 5, False, impl="chunked")
    actual = loss_and_gradients(make_tensors(), [True] * 5, True, impl=impl)
    torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-9)


def test_adapter_in_float32_of_a_bfloat16_weight_gets_a_float32_gradient() -> None:
    exact = loss_and_gradients(make_tensors(), [True, True, False, True, False], True)
    hidden, low, weight, adapter, bias = make_tensors(torch.bfloat16)
    tensors = [hidden, low, weight, adapter.float(), bias]
    loss, *gradients = loss_and_gradients(tensors, [True, True, False, True, False], True)
    assert gradients[3].dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact[0], atol=0.05, rtol=0.02)
    torch.testing.assert_close(gradients[3].double(), exact[4], atol=0.02, rtol=0.05)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor with as many numbers per row as the weight."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in torch.utils._pytree.tree_leaves(results):
            if isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] >= D and result._base is None:
                self.size = max(self.size, result.shape[0])
        return results


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_frozen_weight_is_neither_copied_nor_gets_a_gradient(reduction: str) -> None:
    tensors = make_tensors()
    hidden_ND, adapter_VR = torch.cat(tensors[:2], 1).requires_grad_(), tensors[3].requires_grad_()
    with LargestTensor() as largest:
        weight: Any = join_columns([tensors[2], adapter_VR])
        loss = linear_cross_entropy(hidden_ND, weight, torch.arange(N), reduction=reduction, memory=1e-6)  # type: ignore[arg-type]
        loss.sum().backward()
    assert N <= largest.size <= 256  # one block
    assert tensors[2].grad is None
