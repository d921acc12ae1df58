"""Dropout masks that are constant over time, and LSTM layers with masks on their state (Gal & Ghahramani 2016).

With "locked" or "variational" dropout, a mask is drawn once for each window of a stream (the T steps that are computed
at once), so the same units are dropped at every step.

    sample_mask         draws a mask
    locked_dropout      draws a mask and applies it to a window
    run_masked_layer    runs one LSTM layer with masks on its input and on its recurrent state
    run_masked_stack    runs several LSTM layers with one mask per layer

Shapes: L layers, B streams (rows of a batch), T steps, D input dimensions, H units, G = 4H gates in torch's order
(input, forget, cell, output).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.kernels.recurrence import lstm_scan, lstm_stack_scan
from reefknot.nn.encoders.stacked import LayerState, check_shapes, get_weights, run_layer

NUM_GATES = 4


def sample_mask(inputs_BTD: Tensor, units: int, rate: float, training: bool, gates: int = 1) -> Tensor | None:
    """Draw a dropout mask for each stream, with shape (B, 1, units) or, for several gates, (gates, B, 1, units).

    Return None if nothing is dropped. The mask is scaled by 1 / (1 - rate), so evaluation needs no scaling. It is drawn
    from torch's generator of the device, so that resumed runs and captured CUDA graphs draw the right masks.

    Args:
        inputs_BTD: Inputs of the window, which give the number of streams, the type and the device.
        units: Number of units to drop from.
        rate: Dropout rate.
        training: Whether the module is in training mode.
        gates: Number of gates with a separate mask.
    """
    if not training or rate == 0.0:
        return None
    streams = inputs_BTD.shape[0]
    shape = (streams, 1, units) if gates == 1 else (gates, streams, 1, units)
    # At least float32, because half precision would round 1 / (1 - rate) and so change all values in one direction.
    dtype = torch.promote_types(inputs_BTD.dtype, torch.float32)
    keep_rate = 1.0 - rate
    return inputs_BTD.new_empty(shape, dtype=dtype).bernoulli_(keep_rate).div_(keep_rate)


def apply_mask(vectors: Tensor, mask: Tensor | None) -> Tensor:
    """Multiply vectors by a mask, if there is one, and keep the type of the vectors."""
    if mask is None:
        return vectors
    return (vectors * mask).to(vectors.dtype)


def locked_dropout(inputs_BTD: Tensor, rate: float, training: bool) -> Tensor:
    """Drop the same units at every step of the window."""
    units = inputs_BTD.shape[-1]
    mask_B1D = sample_mask(inputs_BTD, units, rate, training)
    return apply_mask(inputs_BTD, mask_B1D)


def run_masked_layer(
    layer: nn.Module, inputs_BTD: Tensor, state: LayerState, input_mask: Tensor | None, state_mask: Tensor | None
) -> tuple[Tensor, LayerState]:
    """Run one LSTM layer over a window, with masks on its input and on its recurrent state.

    This uses torch's own layer where possible: without a mask on the state and without masks that differ by gate.
    Return the outputs hidden_BTH and the state after the window, (hidden_BH, cell_BH).
    """
    if state_mask is None and not _differs_by_gate(input_mask, inputs_BTD):
        return run_layer(layer, apply_mask(inputs_BTD, input_mask), state)
    return scan_layer(get_weights(layer), inputs_BTD, state, input_mask, state_mask)


def scan_layer(
    weights: Sequence[Tensor],
    inputs_BTD: Tensor,
    state: LayerState,
    input_mask: Tensor | None = None,
    state_mask: Tensor | None = None,
) -> tuple[Tensor, LayerState]:
    """Run one LSTM layer over a window with our own recurrence. `weights` are in cuDNN's order (see `get_weights`).

    Return the outputs hidden_BTH and the state after the window, (hidden_BH, cell_BH).
    """
    input_weight_GD, recurrent_weight_GH, input_bias_G, recurrent_bias_G = weights
    check_shapes(inputs_BTD, state, input_weight_GD.shape[1], recurrent_weight_GH.shape[1])
    inputs_TBG = _input_gates(inputs_BTD, input_weight_GD, input_bias_G + recurrent_bias_G, input_mask)
    if state_mask is not None:
        state_mask = state_mask.squeeze(-2)  # without the dimension of steps
    hidden_BH, cell_BH = state
    hidden_TBH, cell_BH = lstm_scan(inputs_TBG, hidden_BH, cell_BH, recurrent_weight_GH, state_mask)
    return hidden_TBH.transpose(0, 1), (hidden_TBH[-1], cell_BH)


def run_masked_stack(
    layers: Iterable[nn.Module], inputs_BTD: Tensor, state: LayerState, masks_LB1H: Tensor
) -> tuple[Tensor, LayerState]:
    """Run LSTM layers over a window, with one mask per layer on its recurrent state and on the next layer's input.

    Return the outputs of the last layer without its mask, hidden_BTH, and the states of all layers after the window,
    (hidden_LBH, cell_LBH).
    """
    input_weights: list[Tensor] = []
    recurrent_weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in layers:
        input_weight_GD, recurrent_weight_GH, input_bias_G, recurrent_bias_G = get_weights(layer)
        input_weights.append(input_weight_GD)
        recurrent_weights.append(recurrent_weight_GH)
        biases.append(input_bias_G + recurrent_bias_G)

    hidden_LBH, cell_LBH = state
    check_shapes(inputs_BTD, [*hidden_LBH, *cell_LBH], input_weights[0].shape[1], recurrent_weights[0].shape[1])
    # Only the first layer knows its inputs for all steps in advance, so its products are computed at once.
    inputs_TBG = _input_gates(inputs_BTD, input_weights[0], biases[0], None)
    masks_LBH = masks_LB1H.squeeze(-2)
    hidden_TBH, *next_state = lstm_stack_scan(
        inputs_TBG, hidden_LBH, cell_LBH, recurrent_weights, input_weights[1:], biases[1:], masks_LBH
    )
    return hidden_TBH.transpose(0, 1), tuple(next_state)


def _differs_by_gate(mask: Tensor | None, inputs_BTD: Tensor) -> bool:
    """Return whether a mask has one more dimension than the inputs, for the gates."""
    return mask is not None and mask.dim() != inputs_BTD.dim()


def _input_gates(inputs_BTD: Tensor, weight_GD: Tensor, bias_G: Tensor, mask: Tensor | None) -> Tensor:
    """Return the contribution of inputs and biases to the gates, (T, B, G): by one product, or one product per gate."""
    if mask is None or not _differs_by_gate(mask, inputs_BTD):
        # Contiguous, so that the bias is part of the product.
        inputs_TBD = apply_mask(inputs_BTD, mask).transpose(0, 1).contiguous()
        return F.linear(inputs_TBD, weight_GD, bias_G)
    gates = []
    for gate_mask, weight_HD, bias_H in zip(mask, weight_GD.chunk(NUM_GATES), bias_G.chunk(NUM_GATES), strict=True):
        inputs_TBD = apply_mask(inputs_BTD, gate_mask).transpose(0, 1)
        gates.append(F.linear(inputs_TBD, weight_HD, bias_H))
    return torch.cat(gates, dim=-1)
