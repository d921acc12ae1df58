"""The recurrence of an LSTM over a window, with a dropout mask on the recurrent state (Gal and Ghahramani 2016).

    i, f, g, o = x_t + (m * h_{t-1}) W^T        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
                                                h_t = sigmoid(o) tanh(c_t)

The mask m is the same at every step. cuDNN does not support such a mask, so on a GPU two kernels of our own process the
window, one forward and one backward (`triton_recurrence`). On other devices, and as the reference, a loop in plain
torch computes it. If each layer reads the masked states of the layer below (Inan et al. 2017), the kernels process all
layers at once. A layer without a mask can use cuDNN or our kernels (`outruns_cudnn`).

Shapes: L layers, T steps, B rows of the batch, H units, P units with padding, G = 4H gates in torch's order i, f, g, o;
M masks, 1 or one per gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.choice import current, log_once, rounds_to_tf32, triton_chosen
from reefknot.kernels.reference import compute_dtype
from reefknot.kernels.scores import accumulation_dtype, at_least_float32, widened


def lstm_scan(x_TBG: Tensor, h_BH: Tensor, c_BH: Tensor, w_GH: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outputs of all steps, h_TBH, and the last cells, c_BH, at least in float32.

    Autocast applies to the matrix products.

    Args:
        x_TBG: The contribution of the input to the gates, including biases.
        h_BH: The state before the first step.
        c_BH: The cells before the first step.
        w_GH: Recurrent weights.
        mask: Factors of the recurrent state, (B, H), or (4, B, H) with a mask for each gate, or None. They must be
            scaled by 1 / (1 - rate). They get no gradient.
    """
    dtype = compute_dtype(x_TBG, w_GH)
    mask = None if mask is None else mask.detach()
    with torch.autocast(x_TBG.device.type, enabled=False):
        return _one_layer(x_TBG, h_BH, c_BH, w_GH, mask, dtype)


def outruns_cudnn(x_BTD: Tensor, w_GH: Tensor) -> bool:
    """Return whether `lstm_scan` should train a layer without a mask, which cuDNN could train too.

    `reefknot bench encoders` measures this. On an H200 with products in bfloat16 or TF32, a weight-dropped LSTM with
    layers of 1150, 1150 and 400 units takes 0.6 to 0.7 times as long as with cuDNN. With products in float32, a
    variational LSTM takes 1.0 to 1.4 times as long. Single layers that are narrower or wider, and passes without
    gradients, have not been measured. `using("triton")` selects our kernel for any layer.
    """
    dtype, units = compute_dtype(x_BTD, w_GH), w_GH.shape[1]
    if not _has_kernels(x_BTD.transpose(0, 1), w_GH, dtype):
        return False
    narrow = dtype == torch.bfloat16 or (dtype == torch.float32 and rounds_to_tf32())
    measured = _NARROWEST <= units <= _WIDEST and torch.is_grad_enabled()
    return current().impl == "triton" or (narrow and measured)


_NARROWEST, _WIDEST = 400, 1150
"""The range of units per layer that was measured."""


def lstm_stack_scan(
    x_TBG: Tensor,
    h_LBH: Tensor,
    c_LBH: Tensor,
    recurrent: Sequence[Tensor],
    upward: Sequence[Tensor],
    biases: Sequence[Tensor],
    masks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a stack of layers, each of which reads the masked states of the layer below.

    Return the outputs of the last layer for all steps without its mask, h_TBH, and the last states and cells of all
    layers, h_LBH and c_LBH, at least in float32.

    Args:
        x_TBG: The contribution of the input to the gates of the first layer, including biases.
        h_LBH: The states before the first step.
        c_LBH: The cells before the first step.
        recurrent: w_GH of every layer.
        upward: w_GH of every layer but the first, for the state of the layer below.
        biases: b_G of every layer but the first.
        masks: Factors of the states, for the recurrence and for the layer above: (L, B, H), or (L, 4, B, H) with a mask
            for each gate, or None. They must be scaled by 1 / (1 - rate). They get no gradient.
    """
    dtype = compute_dtype(x_TBG, recurrent[0])
    masks = None if masks is None else masks.detach()
    with torch.autocast(x_TBG.device.type, enabled=False):
        if _has_kernels(x_TBG, recurrent[0], dtype, len(recurrent)):
            _log("triton, all layers at once", x_TBG, dtype)
            return _scan(x_TBG, h_LBH, c_LBH, masks, dtype, *recurrent, *upward, *biases)
        return _layer_by_layer(x_TBG, h_LBH, c_LBH, recurrent, upward, biases, masks, dtype)


def _layer_by_layer(
    x_TBG: Tensor,
    h_LBH: Tensor,
    c_LBH: Tensor,
    recurrent: Sequence[Tensor],
    upward: Sequence[Tensor],
    biases: Sequence[Tensor],
    masks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    layer_masks = [None] * len(recurrent) if masks is None else list(masks)
    h_TBH, c_BH = _one_layer(x_TBG, h_LBH[0], c_LBH[0], recurrent[0], layer_masks[0], dtype)
    last = [(at_least_float32(h_TBH[-1]), c_BH)]
    for below, (w_GH, up_GH, b_G) in enumerate(zip(recurrent[1:], upward, biases, strict=True)):
        x_TBG = _to_gates(h_TBH, up_GH.to(dtype), layer_masks[below], b_G.to(dtype))
        h_TBH, c_BH = _one_layer(x_TBG, h_LBH[below + 1], c_LBH[below + 1], w_GH, layer_masks[below + 1], dtype)
        last.append((at_least_float32(h_TBH[-1]), c_BH))
    h_LBH, c_LBH = (torch.stack(parts) for parts in zip(*last, strict=True))
    return h_TBH, h_LBH, c_LBH


def _one_layer(
    x_TBG: Tensor, h_BH: Tensor, c_BH: Tensor, w_GH: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    kernels = _has_kernels(x_TBG, w_GH, dtype)
    _log("triton" if kernels else "a loop", x_TBG, dtype)
    if not kernels:
        return lstm_loop(x_TBG, h_BH, c_BH, w_GH, mask, dtype)
    h_TBH, _, c_LBH = _scan(x_TBG, h_BH[None], c_BH[None], None if mask is None else mask[None], dtype, w_GH)
    return h_TBH, c_LBH[0]


def lstm_loop(
    x_TBG: Tensor, h_BH: Tensor, c_BH: Tensor, w_GH: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute `lstm_scan` step by step in plain torch, with products in `dtype`."""
    w_GH, h_BH, c_BH = w_GH.to(dtype), h_BH.to(dtype), at_least_float32(c_BH)
    outputs: list[Tensor] = []
    for x_BG in at_least_float32(x_TBG).unbind():
        i, f, g, o = (x_BG + _to_gates(h_BH, w_GH, mask)).chunk(4, dim=-1)
        c_BH = f.sigmoid() * c_BH + i.sigmoid() * g.tanh()
        h_BH = (o.sigmoid() * c_BH.tanh()).to(dtype)
        outputs.append(h_BH)
    return torch.stack(outputs), c_BH


def _to_gates(h_BH: Tensor, w_GH: Tensor, mask: Tensor | None, bias_G: Tensor | None = None) -> Tensor:
    """Return the contribution of a state, or of the states of all steps, to the gates that read it."""
    if mask is None or mask.dim() == 2:
        return F.linear(h_BH if mask is None else (h_BH * mask).to(w_GH.dtype), w_GH, bias_G)
    masked_4BH = (h_BH.unsqueeze(-3) * mask).to(w_GH.dtype)
    gates_4BH = torch.matmul(masked_4BH, w_GH.reshape(4, -1, w_GH.shape[1]).mT)
    gates_BG = gates_4BH.transpose(-3, -2).flatten(-2)
    return gates_BG if bias_G is None else gates_BG + bias_G


def _log(impl: str, x_TBG: Tensor, dtype: torch.dtype) -> None:
    if not torch.compiler.is_compiling():  # a graph cannot log
        log_once("the recurrence of an LSTM", impl, x_TBG.device.type, dtype)


def _has_kernels(x_TBG: Tensor, w_GH: Tensor, dtype: torch.dtype, layers: int = 1) -> bool:
    """Return whether the kernels are used. They need a type other than float64, and layers that fit on the device."""
    if dtype == torch.float64 or not x_TBG.numel() or not triton_chosen(x_TBG.device, dtype):
        return False
    from reefknot.kernels.triton_recurrence import Plan

    return Plan.choose(x_TBG.shape[1], w_GH.shape[1], dtype, x_TBG.device, layers) is not None


def _scan(
    x_TBG: Tensor, h_LBH: Tensor, c_LBH: Tensor, masks: Tensor | None, dtype: torch.dtype, *weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    apply: Any = _Scan.apply
    if torch.compiler.is_compiling():
        # A kernel whose programs wait for each other cannot be traced. `disable` is not a decorator here, because
        # that would always import the compiler, which takes longer than importing torch.
        apply = torch.compiler.disable(apply)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor, Tensor], apply(x_TBG, h_LBH, c_LBH, masks, dtype, *weights))


class _Scan(torch.autograd.Function):
    """The forward and backward pass by the kernels. `weights` are recurrent weights, upward weights and biases.

    The gradients of the weights are products over all steps, computed after the backward kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TBG: Tensor,
        h_LBH: Tensor,
        c_LBH: Tensor,
        masks: Tensor | None,
        dtype: torch.dtype,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from reefknot.kernels.triton_recurrence import walk_forward

        matrices = 2 * len(h_LBH) - 1
        h_TBH, h_LBH, c_LBH, results = walk_forward(
            x_TBG, h_LBH, c_LBH, weights[:matrices], weights[matrices:], masks, dtype
        )
        ctx.save_for_backward(masks, *results)
        ctx.set_materialize_grads(False)
        ctx.weight_dtype = weights[0].dtype
        return h_TBH, h_LBH, c_LBH

    @staticmethod
    def backward(
        ctx: Any, g_TBH: Tensor | None, g_h_LBH: Tensor | None, g_c_LBH: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ArgumentError(
                "the LSTM kernels have no second derivatives, which create_graph = True asks for; "
                "use impl = 'reference'"
            )
        from reefknot.kernels.triton_recurrence import ForwardResults, walk_backward

        masks, *saved = ctx.saved_tensors
        results = ForwardResults(*saved)
        layers, steps, rows, gates = results.gates.shape
        if g_TBH is None:
            g_TBH = results.gates.new_zeros(steps, rows, gates // 4)
        d_LTB4P, dc_LBH = walk_backward(g_TBH, g_h_LBH, g_c_LBH, masks, results)
        d_LTBG = d_LTB4P[..., : gates // 4].flatten(-2)
        _, needs_h, _, _, _, *needs = ctx.needs_input_grad
        dh_LBH = _state_gradients(d_LTBG[:, 0], results.weights, masks) if needs_h else None
        dws: list[Tensor | None] = [None] * len(needs)
        if any(needs[:layers]):
            dws[:layers] = _weight_gradients(d_LTB4P, results.states[:, :-1], gates // 4, ctx.weight_dtype)
        if any(needs[layers:]):
            up = slice(layers, 2 * layers - 1)
            dws[up] = _weight_gradients(d_LTB4P[1:], results.states[:-1, 1:], gates // 4, ctx.weight_dtype)
            dws[up.stop :] = d_LTBG[1:].sum((1, 2), dtype=ctx.weight_dtype).unbind()
        return d_LTBG[0], dh_LBH, dc_LBH, None, None, *dws


def _state_gradients(d_LBG: Tensor, w_4HP: Tensor, masks: Tensor | None) -> Tensor:
    """Return the gradients of the states before the first step, given the gradients of the first step's gates."""
    layers, rows, gates = d_LBG.shape
    d_L4BH = d_LBG.view(layers, rows, 4, -1).transpose(1, 2)
    w_L4HH = w_4HP[:layers, ..., : gates // 4]
    dh_L4BH = at_least_float32(d_L4BH) @ at_least_float32(w_L4HH)
    if masks is not None:
        dh_L4BH = dh_L4BH * masks.view(layers, -1, rows, gates // 4)
    return dh_L4BH.sum(1)


def _weight_gradients(d_LTB4P: Tensor, states_LTBMP: Tensor, units: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """Return the gradients of each layer's weights, given those of all gates and the masked states that they read."""
    layers, _, _, masks, padded = states_LTBMP.shape
    d_NGT = d_LTB4P.reshape(layers, -1, masks, 4 * padded // masks).permute(0, 2, 3, 1).flatten(0, 1)
    states_NTP = states_LTBMP.reshape(layers, -1, masks, padded).transpose(1, 2).flatten(0, 1)
    dw_NGP = _products(d_NGT, states_NTP, dtype)
    return dw_NGP.view(layers, 4, padded, padded)[:, :, :units, :units].reshape(layers, -1, units).unbind()


def _products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products of several pairs of matrices, rounded once: to `dtype`, or to float32 or wider."""
    if a.dtype in (dtype, accumulation_dtype(a.dtype)):
        return torch.bmm(a, b)
    if widened(a, a.dtype):
        return torch.bmm(at_least_float32(a), at_least_float32(b))
    return torch.bmm(a, b, out_dtype=torch.float32)
