"""Masks of a window: one per example, the same at every step, scaled, drawn from torch's own generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from reefknot.nn.encoders.masks import GATES, locked_dropout, masked, run_masked, window_mask

from .authority import HIDDEN, IN, STREAMS, plain_loop, vectors


def test_a_mask_is_there_only_in_training_and_with_a_rate() -> None:
    x_BTD = vectors()
    assert window_mask(x_BTD, 3, 0.5, training=False) is None
    assert window_mask(x_BTD, 3, 0.0, training=True) is None
    assert masked(x_BTD, None) is x_BTD
    assert locked_dropout(x_BTD, 0.5, training=False) is x_BTD


def drawn(*args: Any, **options: Any) -> torch.Tensor:
    mask = window_mask(*args, training=True, **options)
    assert mask is not None
    return mask


def test_a_mask_keeps_or_drops_and_keeps_the_expected_value() -> None:
    torch.manual_seed(0)
    mask = drawn(vectors(streams=200), 300, 0.3)
    assert mask.shape == (200, 1, 300)
    assert mask.dtype == torch.float64
    torch.testing.assert_close(mask[mask != 0].unique(), torch.tensor([1 / 0.7], dtype=torch.float64))
    assert mask.mean().item() == pytest.approx(1.0, abs=0.01)


def test_masks_differ_from_example_to_example_from_gate_to_gate_and_from_draw_to_draw() -> None:
    torch.manual_seed(0)
    first, second = (drawn(vectors(), 50, 0.5, gates=GATES) for _ in range(2))
    assert first.shape == (GATES, STREAMS, 1, 50)
    patterns = torch.cat([first, second]).flatten(0, 2)
    assert len(patterns.unique(dim=0)) == 2 * GATES * STREAMS


def test_masks_come_from_the_generator_that_is_saved() -> None:
    before = torch.get_rng_state()
    first = drawn(vectors(), 50, 0.5)
    torch.set_rng_state(before)
    assert torch.equal(drawn(vectors(), 50, 0.5), first)


def test_narrow_numbers_are_scaled_in_float32() -> None:
    x_BTD = vectors(streams=20).bfloat16()
    mask = drawn(x_BTD, IN, 0.3)
    assert mask.dtype == torch.float32
    found = masked(x_BTD, mask)
    assert found.dtype == torch.bfloat16
    kept = mask.expand_as(x_BTD) != 0
    assert torch.equal(found[kept], (x_BTD.float() / 0.7).bfloat16()[kept])


def test_locked_dropout_drops_the_same_units_at_every_step() -> None:
    torch.manual_seed(0)
    gone = locked_dropout(torch.ones(4, 6, 50), 0.5, training=True) == 0
    assert torch.equal(gone, gone[:, :1].expand_as(gone))
    assert len(gone[:, 0].unique(dim=0)) == 4
    assert 0.3 < gone.float().mean().item() < 0.7


@pytest.mark.parametrize("by_gate", [False, True])
def test_a_masked_layer_follows_the_equations(by_gate: bool) -> None:
    """Values and every gradient against the plain loop in float64."""
    torch.manual_seed(0)
    layer = nn.LSTM(IN, HIDDEN, batch_first=True).double()
    nn.init.zeros_(layer.bias_hh_l0)
    x_BTD = vectors().requires_grad_()
    h_BH, c_BH = (torch.randn(STREAMS, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gates = GATES if by_gate else 1
    below, before = (drawn(x_BTD, width, 0.4, gates=gates) for width in (IN, HIDDEN))

    found, (h, c) = run_masked(layer, x_BTD, (h_BH, c_BH), below, before)
    each = [list(mask.squeeze(-2)) if by_gate else [mask.squeeze(-2)] * GATES for mask in (below, before)]
    expected, last = plain_loop(layer, x_BTD, h_BH, c_BH, *each)

    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(h, expected[:, -1])
    torch.testing.assert_close(c, last)
    inputs = [x_BTD, h_BH, c_BH, layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0]
    gradients = [
        torch.autograd.grad(output.square().sum() + cell.sum(), inputs)
        for output, cell in ((found, c), (expected, last))
    ]
    torch.testing.assert_close(*gradients)
