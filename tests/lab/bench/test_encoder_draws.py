"""What was drawn in one type is drawn again in another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.lab.bench.encoders import RecordDraws, ReplayDraws


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: F.dropout(x, 0.4),
        lambda x: torch.native_dropout(x, 0.4, True)[0],
        lambda x: x * x.new_empty(x.shape).bernoulli_(0.6),
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.6)),
        lambda x: x * (torch.rand_like(x) < 0.6),
        lambda x: x + torch.randn(x.shape, dtype=x.dtype),
    ],
    ids=["dropout", "native_dropout", "bernoulli_", "bernoulli", "rand_like", "randn"],
)
def test_a_wider_run_draws_the_same(draw: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(64, 8)
    with RecordDraws() as first:
        one, two = draw(x), draw(x)
    assert not torch.equal(one, two)
    wide = x.double().requires_grad_()
    with ReplayDraws(first.drawn):
        found = draw(wide), draw(wide)
    assert found[0].dtype == torch.float64
    torch.testing.assert_close(found[0].float(), one)
    torch.testing.assert_close(found[1].float(), two)
    (gradient,) = torch.autograd.grad(found[0].sum(), wide)
    assert (gradient == 0).any() == (one == 0).any(), "the mask that was drawn again is the one backward uses"


def test_a_run_that_draws_more_is_refused() -> None:
    with RecordDraws() as first:
        torch.rand(3)
    with (
        ReplayDraws(first.drawn),
        pytest.raises(RuntimeError, match="more random tensors are drawn"),
    ):
        torch.rand(3), torch.rand(3)


def test_recurrent_layers_are_no_draws() -> None:
    layer, x = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3)
    with RecordDraws() as first:
        layer(x)
    assert first.drawn == []
