"""Dropout masks of a window: one per example, equal at every step, scaled, drawn from torch's default generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from reefknot.errors import ArgumentError
from reefknot.nn.encoders.awd_lstm import AWDLSTM
from reefknot.nn.encoders.bayesian_lstm import BayesianLSTM
from reefknot.nn.encoders.masks import NUM_GATES, apply_mask, locked_dropout, run_masked_layer, sample_mask
from reefknot.nn.encoders.stacked import RecurrentEncoder
from reefknot.nn.encoders.variational_lstm import VariationalLSTM

from .reference import HIDDEN, IN, STREAMS, lstm_loop, vectors


def test_no_mask_in_evaluation_or_at_rate_zero() -> None:
    inputs_BTD = vectors()
    assert sample_mask(inputs_BTD, 3, 0.5, training=False) is None
    assert sample_mask(inputs_BTD, 3, 0.0, training=True) is None
    assert apply_mask(inputs_BTD, None) is inputs_BTD
    assert locked_dropout(inputs_BTD, 0.5, training=False) is inputs_BTD


def draw_mask(*args: Any, **options: Any) -> torch.Tensor:
    """Draw a mask in training mode."""
    mask = sample_mask(*args, training=True, **options)
    assert mask is not None
    return mask


def test_mask_values_are_zero_or_scaled_to_mean_one() -> None:
    torch.manual_seed(0)
    mask = draw_mask(vectors(streams=200), 300, 0.3)
    assert mask.shape == (200, 1, 300)
    assert mask.dtype == torch.float64
    torch.testing.assert_close(mask[mask != 0].unique(), torch.tensor([1 / 0.7], dtype=torch.float64))
    assert mask.mean().item() == pytest.approx(1.0, abs=0.01)


def test_masks_differ_between_examples_gates_and_draws() -> None:
    torch.manual_seed(0)
    first, second = (draw_mask(vectors(), 50, 0.5, gates=NUM_GATES) for _ in range(2))
    assert first.shape == (NUM_GATES, STREAMS, 1, 50)
    patterns = torch.cat([first, second]).flatten(0, 2)
    assert len(patterns.unique(dim=0)) == 2 * NUM_GATES * STREAMS


def test_masks_come_from_the_default_generator() -> None:
    before = torch.get_rng_state()
    first = draw_mask(vectors(), 50, 0.5)
    torch.set_rng_state(before)
    assert torch.equal(draw_mask(vectors(), 50, 0.5), first)


def test_bfloat16_inputs_are_scaled_in_float32() -> None:
    inputs_BTD = vectors(streams=20).bfloat16()
    mask = draw_mask(inputs_BTD, IN, 0.3)
    assert mask.dtype == torch.float32
    actual = apply_mask(inputs_BTD, mask)
    assert actual.dtype == torch.bfloat16
    selected = mask.expand_as(inputs_BTD) != 0
    assert torch.equal(actual[selected], (inputs_BTD.float() / 0.7).bfloat16()[selected])


def test_locked_dropout_drops_the_same_units_at_every_step() -> None:
    torch.manual_seed(0)
    dropped = locked_dropout(torch.ones(4, 6, 50), 0.5, training=True) == 0
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert len(dropped[:, 0].unique(dim=0)) == 4
    assert 0.3 < dropped.float().mean().item() < 0.7


@pytest.mark.parametrize("by_gate", [False, True])
def test_masked_layer_follows_the_equations(by_gate: bool) -> None:
    """Outputs and all gradients equal those of a loop over the equations in float64."""
    torch.manual_seed(0)
    layer = nn.LSTM(IN, HIDDEN, batch_first=True).double()
    nn.init.zeros_(layer.bias_hh_l0)
    inputs_BTD = vectors().requires_grad_()
    hidden_BH, cell_BH = (torch.randn(STREAMS, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2))
    gates = NUM_GATES if by_gate else 1
    input_mask, state_mask = (draw_mask(inputs_BTD, dim, 0.4, gates=gates) for dim in (IN, HIDDEN))

    actual, (h, c) = run_masked_layer(layer, inputs_BTD, (hidden_BH, cell_BH), input_mask, state_mask)
    masks = [list(mask.squeeze(-2)) if by_gate else [mask.squeeze(-2)] * NUM_GATES for mask in (input_mask, state_mask)]
    expected, last_cell = lstm_loop(layer, inputs_BTD, hidden_BH, cell_BH, *masks)

    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(h, expected[:, -1])
    torch.testing.assert_close(c, last_cell)
    inputs = [inputs_BTD, hidden_BH, cell_BH, layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0]
    gradients = [
        torch.autograd.grad(output.square().sum() + cell.sum(), inputs)
        for output, cell in ((actual, c), (expected, last_cell))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "encoder",
    [
        VariationalLSTM(IN, HIDDEN, dropout=0.5),
        BayesianLSTM(IN, HIDDEN, dropout_hidden=0.5),
        AWDLSTM(IN, HIDDEN, weight_drop=0.5),
    ],
    ids=lambda encoder: type(encoder).__name__,
)
def test_inputs_and_states_of_another_shape_are_rejected_in_training(encoder: RecurrentEncoder) -> None:
    for streams in (1, STREAMS + 1):
        with pytest.raises(ArgumentError, match=rf"state of a layer is \({streams}, .*, but {STREAMS} streams"):
            encoder(vectors().float(), encoder.initial_state(streams))
    with pytest.raises(ArgumentError, match=f"reads vectors of dimension {IN}"):
        encoder(torch.zeros(STREAMS, 4, IN + 1), encoder.initial_state(STREAMS))
