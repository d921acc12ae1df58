"""Random tensors drawn in one dtype are replayed in another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.lab.bench.encoders import RecordRandomTensors, ReplayRandomTensors


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
def test_replay_in_float64_gives_the_recorded_values(draw: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(64, 8)
    with RecordRandomTensors() as record:
        first_draw, second_draw = draw(x), draw(x)
    assert not torch.equal(first_draw, second_draw)
    wide = x.double().requires_grad_()
    with ReplayRandomTensors(record.tensors):
        replayed = draw(wide), draw(wide)
    assert replayed[0].dtype == torch.float64
    torch.testing.assert_close(replayed[0].float(), first_draw)
    torch.testing.assert_close(replayed[1].float(), second_draw)
    (gradient,) = torch.autograd.grad(replayed[0].sum(), wide)
    assert (gradient == 0).any() == (first_draw == 0).any(), "backward uses the replayed mask"


def test_replaying_more_draws_than_recorded_is_rejected() -> None:
    with RecordRandomTensors() as record:
        torch.rand(3)
    with (
        ReplayRandomTensors(record.tensors),
        pytest.raises(RuntimeError, match="more random tensors are drawn"),
    ):
        torch.rand(3), torch.rand(3)


def test_recurrent_layers_record_no_draws() -> None:
    layer, x = torch.nn.LSTM(3, 4), torch.randn(5, 2, 3)
    with RecordRandomTensors() as record:
        layer(x)
    assert record.tensors == []
