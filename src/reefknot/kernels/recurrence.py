"""The recurrence of an LSTM over a window, with a dropout mask on the state where it recurs (Gal and Ghahramani 2016).

    i, f, g, o = x_t + (m * h_{t-1}) W^T        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
                                                h_t = sigmoid(o) tanh(c_t)

The mask is the same at every step. cuDNN has no such mask, so on a GPU two kernels of our own walk through the window,
one for each direction (`triton_recurrence`); everywhere else, and to compare with, a loop in plain torch.

Shapes: T steps, B rows of the batch, H units, G = 4H gates in torch's order i, f, g, o; M masks, 1 or one per gate.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.choice import say_once, triton_chosen
from reefknot.kernels.reference import compute_dtype
from reefknot.kernels.scores import at_least_float32, product


def lstm_scan(x_TBG: Tensor, h_BH: Tensor, c_BH: Tensor, w_GH: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The outputs of every step and the last cells, which are float32 at least; under autocast products are bfloat16's.

    Arguments:
        x_TBG: the input's share of the gates, biases included.
        h_BH: the state before the first step.
        c_BH: the cells before the first step.
        w_GH: recurrent weights.
        mask: factors of the state where it recurs, (B, H), or (4, B, H) for each gate its own; None for none. Scaled
            by whoever drew it; no gradient is sent to it.
    """
    dtype = compute_dtype(x_TBG, w_GH)
    mask = None if mask is None else mask.detach()
    kernels = _has_kernels(x_TBG, w_GH, dtype)
    if not torch.compiler.is_compiling():  # a graph cannot log
        say_once("an LSTM with a mask on its state", "triton" if kernels else "a loop", x_TBG.device.type, dtype)
    with torch.autocast(x_TBG.device.type, enabled=False):
        if kernels:
            return cast(tuple[Tensor, Tensor], _scan(x_TBG, h_BH, c_BH, w_GH, mask, dtype))
        return lstm_loop(x_TBG, h_BH, c_BH, w_GH, mask, dtype)


def lstm_loop(
    x_TBG: Tensor, h_BH: Tensor, c_BH: Tensor, w_GH: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same step by step, with products made in `dtype`."""
    w_GH, h_BH, c_BH = w_GH.to(dtype), h_BH.to(dtype), at_least_float32(c_BH)
    outputs: list[Tensor] = []
    for x_BG in at_least_float32(x_TBG).unbind():
        i, f, g, o = (x_BG + _recurrent_share(h_BH, w_GH, mask)).chunk(4, dim=-1)
        c_BH = f.sigmoid() * c_BH + i.sigmoid() * g.tanh()
        h_BH = (o.sigmoid() * c_BH.tanh()).to(dtype)
        outputs.append(h_BH)
    return torch.stack(outputs), c_BH


def _recurrent_share(h_BH: Tensor, w_GH: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return F.linear(h_BH, w_GH)
    recurs = (h_BH * mask).to(w_GH.dtype)
    if mask.dim() == 2:
        return F.linear(recurs, w_GH)
    return torch.bmm(recurs, w_GH.view(4, *h_BH.shape[1:] * 2).mT).transpose(0, 1).flatten(1)


def _has_kernels(x_TBG: Tensor, w_GH: Tensor, dtype: torch.dtype) -> bool:
    """Whether triton does it: where a GPU and `using` let it, in any type but float64."""
    if dtype == torch.float64 or not x_TBG.numel() or not triton_chosen(x_TBG.device, dtype):
        return False
    from reefknot.kernels.triton_recurrence import Plan

    return Plan.choose(x_TBG.shape[1], w_GH.shape[1], dtype, x_TBG.device) is not None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a grid that waits for itself is nothing to trace
def _scan(
    x_TBG: Tensor, h_BH: Tensor, c_BH: Tensor, w_GH: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    found = _Scan.apply(x_TBG, h_BH, c_BH, w_GH, mask, dtype)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], found)


class _Scan(torch.autograd.Function):
    """Both directions by the kernels. The weights' gradient is one product over all steps, after the walk back."""

    @staticmethod
    def forward(
        ctx: Any, x_TBG: Tensor, h_BH: Tensor, c_BH: Tensor, w_GH: Tensor, mask: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        from reefknot.kernels.triton_recurrence import walk_forward

        h_TBH, walked = walk_forward(x_TBG, h_BH, c_BH, w_GH, mask, dtype)
        ctx.save_for_backward(w_GH, mask, *walked)
        return h_TBH, walked.cells[-1].clone()

    @staticmethod
    def backward(ctx: Any, g_TBH: Tensor, g_c_BH: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ArgumentError(
                "the LSTM's kernels have first derivatives only (create_graph = True asks for more); "
                "use impl = 'reference'"
            )
        from reefknot.kernels.triton_recurrence import Walked, walk_backward

        w_GH, mask, *saved = ctx.saved_tensors
        walked = Walked(*saved)
        d_TBG, dc_BH = walk_backward(g_TBH, g_c_BH, w_GH, mask, walked)
        dh_BH = _state_gradient(d_TBG[0], w_GH, mask) if ctx.needs_input_grad[1] else None
        dw_GH = _weight_gradient(d_TBG, walked.states) if ctx.needs_input_grad[3] else None
        return d_TBG, dh_BH, dc_BH, dw_GH, None, None


def _state_gradient(d_BG: Tensor, w_GH: Tensor, mask: Tensor | None) -> Tensor:
    """Of the state before the first step, from the gradients of that step's gates."""
    w_GH = w_GH.to(d_BG.dtype)
    if mask is None or mask.dim() == 2:
        dh_BH = product(d_BG, w_GH)
        return dh_BH if mask is None else dh_BH * mask
    shares = (product(d_BH, w_HH) for d_BH, w_HH in zip(d_BG.chunk(4, dim=-1), w_GH.chunk(4), strict=True))
    return (torch.stack(list(shares)) * mask).sum(0)


def _weight_gradient(d_TBG: Tensor, states_TBMH: Tensor) -> Tensor:
    """From the gradients of all gates and the masked states that were read at the same steps."""
    states_NMH = states_TBMH[: len(d_TBG)].flatten(0, 1)
    d_NG = d_TBG.flatten(0, 1)
    masks = states_NMH.shape[1]
    shares = zip(d_NG.chunk(masks, dim=-1), states_NMH.unbind(1), strict=True)
    return torch.cat([product(d_N.mT, states_NH) for d_N, states_NH in shares])
