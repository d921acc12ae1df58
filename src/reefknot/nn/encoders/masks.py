"""Dropout masks that hold for a whole window, and LSTM layers that have them on their states (Gal & Ghahramani 2016).

A mask is drawn once per example and window ("locked", "variational"): the same units are absent at every step. It comes
from torch's generator of the device, so that a resumed run and a captured graph draw as they should, and is scaled by
1 / (1 - rate), so that evaluation needs none.

Shapes: L layers, B streams, T steps, D and H widths, G = 4H gates in torch's order (input, forget, cell, output).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reefknot.kernels.recurrence import lstm_scan, lstm_stack_scan
from reefknot.nn.encoders.stacked import LayerState, run, weights_of

GATES = 4


def window_mask(x_BTD: Tensor, width: int, rate: float, training: bool, gates: int = 1) -> Tensor | None:
    """One mask of `width` numbers per example of x, mask_B1D, or one for each of several gates, mask_4B1D; None where
    nothing is dropped."""
    if not training or rate == 0.0:
        return None
    shape = (x_BTD.shape[0], 1, width) if gates == 1 else (gates, x_BTD.shape[0], 1, width)
    # Not narrower than float32: there 1 / (1 - rate) would be off by as much as the numbers it scales.
    dtype = torch.promote_types(x_BTD.dtype, torch.float32)
    return x_BTD.new_empty(shape, dtype=dtype).bernoulli_(1.0 - rate).div_(1.0 - rate)


def masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """x where the mask lets it through, in its own type."""
    return x if mask is None else (x * mask).to(x.dtype)


def locked_dropout(x_BTD: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout of the same units at every step of the window."""
    return masked(x_BTD, window_mask(x_BTD, x_BTD.shape[-1], rate, training))


def run_masked(
    layer: nn.Module, x_BTD: Tensor, start: LayerState, input_mask: Tensor | None, state_mask: Tensor | None
) -> tuple[Tensor, LayerState]:
    """One LSTM layer over a window, with masks on what it reads and on its state where that recurs.

    Torch's own layer where it can do this: it knows no mask on the state and none that differs from gate to gate.
    """
    if state_mask is None and (input_mask is None or input_mask.dim() == x_BTD.dim()):
        return run(layer, masked(x_BTD, input_mask), start)
    return scan(weights_of(layer), x_BTD, start, input_mask, state_mask)


def scan(
    weights: Sequence[Tensor],
    x_BTD: Tensor,
    start: LayerState,
    input_mask: Tensor | None = None,
    state_mask: Tensor | None = None,
) -> tuple[Tensor, LayerState]:
    """One LSTM layer over a window by our own recurrence, with these weights, in cuDNN's order; masks as above."""
    input_GD, recurrent_GH, bias_G, other_G = weights
    x_TBG = _input_share(x_BTD, input_GD, bias_G + other_G, input_mask)
    mask = None if state_mask is None else state_mask.squeeze(-2)
    h_BH, c_BH = start
    h_TBH, c_BH = lstm_scan(x_TBG, h_BH, c_BH, recurrent_GH, mask)
    return h_TBH.transpose(0, 1), (h_TBH[-1], c_BH)


def run_stack_masked(
    layers: Iterable[nn.Module], x_BTD: Tensor, start: LayerState, masks_LB1H: Tensor
) -> tuple[Tensor, LayerState]:
    """LSTM layers over a window, with one mask per layer where its state recurs and where the next layer reads it.

    The last layer's outputs h_BTH, undropped, and the states h_LBH and c_LBH after the window.
    """
    inputs, recurrent, *biases = zip(*map(weights_of, layers), strict=True)
    lowest_G, *upper = (bias_G + other_G for bias_G, other_G in zip(*biases, strict=True))
    x_TBG = _input_share(x_BTD, inputs[0], lowest_G, None)
    h_LBH, c_LBH = start
    h_TBH, *ends = lstm_stack_scan(x_TBG, h_LBH, c_LBH, recurrent, inputs[1:], upper, masks_LB1H.squeeze(-2))
    return h_TBH.transpose(0, 1), tuple(ends)


def _input_share(x_BTD: Tensor, weight_GD: Tensor, bias_G: Tensor, mask: Tensor | None) -> Tensor:
    """What the whole window's inputs and the biases add to the gates, x_TBG: one large product, or one per gate."""
    if mask is None or mask.dim() == x_BTD.dim():
        # In order first: the bias is then part of the product.
        return F.linear(masked(x_BTD, mask).transpose(0, 1).contiguous(), weight_GD, bias_G)
    by_gate = zip(mask, weight_GD.chunk(GATES), bias_G.chunk(GATES), strict=True)
    shares = [F.linear(masked(x_BTD, each).transpose(0, 1), weight, bias) for each, weight, bias in by_gate]
    return torch.cat(shares, dim=-1)
