"""LSTM layers with a dropout mask on their recurrent state (Gal and Ghahramani 2016), over a whole window of steps.

`lstm_scan` computes one layer and `lstm_stack_scan` a stack of layers; both return the outputs of all steps. The mask m
is the same at every step, which cuDNN does not support. On a GPU, the window is therefore processed by two Triton
kernels in `triton_recurrence`, one for the forward and one for the backward pass. On other devices, and as the
reference, `lstm_loop` computes the steps in plain torch. If each layer reads the masked states of the layer below
(Inan et al. 2017), the kernels process all layers at once. A layer without a mask can use cuDNN or these kernels
(`is_faster_than_cudnn`).

    i, f, g, o = x_t + (m * h_{t-1}) W^T        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)
                                                h_t = sigmoid(o) tanh(c_t)

`inputs_TBG` is the contribution of the inputs to the gates. Recurrent weights multiply the layer's own state, and
upward weights the state of the layer below. A variable `grad_NAME` holds the gradient of the variable `NAME`.

Shapes: L layers, T steps, B rows of the batch, H units, P units with padding, G = 4H gates in torch's order i, f, g, o,
M masks (1 for all gates together, or 4 with one per gate).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.choice import current_choice, log_once, rounds_to_tf32, should_use_triton
from reefknot.kernels.reference import compute_dtype
from reefknot.kernels.scores import accumulation_dtype, at_least_float32, needs_widening


def lstm_scan(
    inputs_TBG: Tensor, hidden_BH: Tensor, cell_BH: Tensor, weight_GH: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the outputs of all steps, hidden_TBH, and the last cells, cell_BH, at least in float32.

    Autocast applies to the matrix products.

    Args:
        inputs_TBG: The contribution of the input to the gates, including biases.
        hidden_BH: The state before the first step.
        cell_BH: The cells before the first step.
        weight_GH: Recurrent weights.
        mask: Factors of the recurrent state, (B, H), or (4, B, H) with a mask for each gate, or None. They must be
            scaled by 1 / (1 - rate). They get no gradient.
    """
    dtype = compute_dtype(inputs_TBG, weight_GH)
    mask = None if mask is None else mask.detach()
    with torch.autocast(inputs_TBG.device.type, enabled=False):
        return _scan_layer(inputs_TBG, hidden_BH, cell_BH, weight_GH, mask, dtype)


def is_faster_than_cudnn(inputs_BTD: Tensor, weight_GH: Tensor) -> bool:
    """Return whether `lstm_scan` should be used instead of cuDNN to train a layer that has no mask.

    `reefknot bench encoders` measures this. On an H200 with products in bfloat16 or TF32, a weight-dropped LSTM with
    layers of 1150, 1150 and 400 units takes 0.6 to 0.7 times as long as with cuDNN. With products in float32, a
    variational LSTM takes 1.0 to 1.4 times as long. Single layers that are narrower or wider, and passes without
    gradients, have not been measured. `using("triton")` selects our kernel for any layer.
    """
    dtype, num_units = compute_dtype(inputs_BTD, weight_GH), weight_GH.shape[1]
    if not _can_use_kernels(inputs_BTD.transpose(0, 1), weight_GH, dtype):
        return False
    if current_choice().impl == "triton":
        return True
    is_low_precision = dtype == torch.bfloat16 or (dtype == torch.float32 and rounds_to_tf32())
    is_measured = _MIN_UNITS <= num_units <= _MAX_UNITS and torch.is_grad_enabled()
    return is_low_precision and is_measured


_MIN_UNITS, _MAX_UNITS = 400, 1150
"""The range of units per layer for which `is_faster_than_cudnn` was measured."""


def lstm_stack_scan(
    inputs_TBG: Tensor,
    hidden_LBH: Tensor,
    cell_LBH: Tensor,
    recurrent_weights: Sequence[Tensor],
    upward_weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    masks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a stack of layers, each of which reads the masked states of the layer below.

    Return the outputs of the last layer for all steps without its mask, hidden_TBH, and the last states and cells of
    all layers, hidden_LBH and cell_LBH, at least in float32.

    Args:
        inputs_TBG: The contribution of the input to the gates of the first layer, including biases.
        hidden_LBH: The states before the first step.
        cell_LBH: The cells before the first step.
        recurrent_weights: weight_GH of every layer.
        upward_weights: weight_GH of every layer but the first, for the state of the layer below.
        biases: bias_G of every layer but the first.
        masks: Factors of the states, for the recurrence and for the layer above: (L, B, H), or (L, 4, B, H) with a mask
            for each gate, or None. They must be scaled by 1 / (1 - rate). They get no gradient.
    """
    dtype = compute_dtype(inputs_TBG, recurrent_weights[0])
    masks = None if masks is None else masks.detach()
    with torch.autocast(inputs_TBG.device.type, enabled=False):
        if _can_use_kernels(inputs_TBG, recurrent_weights[0], dtype, num_layers=len(recurrent_weights)):
            _log_impl("triton, all layers at once", inputs_TBG, dtype)
            return _scan_in_kernels(
                inputs_TBG, hidden_LBH, cell_LBH, masks, dtype, *recurrent_weights, *upward_weights, *biases
            )
        return _scan_layers_separately(
            inputs_TBG, hidden_LBH, cell_LBH, recurrent_weights, upward_weights, biases, masks, dtype
        )


def _scan_layers_separately(
    inputs_TBG: Tensor,
    hidden_LBH: Tensor,
    cell_LBH: Tensor,
    recurrent_weights: Sequence[Tensor],
    upward_weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    masks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    layer_masks = [None] * len(recurrent_weights) if masks is None else list(masks)
    hidden_TBH, cell_BH = _scan_layer(
        inputs_TBG, hidden_LBH[0], cell_LBH[0], recurrent_weights[0], layer_masks[0], dtype
    )
    last_h, last_c = [at_least_float32(hidden_TBH[-1])], [cell_BH]
    for layer, (weight_GH, upward_GH, bias_G) in enumerate(
        zip(recurrent_weights[1:], upward_weights, biases, strict=True), start=1
    ):
        inputs_TBG = _to_gates(hidden_TBH, upward_GH.to(dtype), layer_masks[layer - 1], bias_G.to(dtype))
        hidden_TBH, cell_BH = _scan_layer(
            inputs_TBG, hidden_LBH[layer], cell_LBH[layer], weight_GH, layer_masks[layer], dtype
        )
        last_h.append(at_least_float32(hidden_TBH[-1]))
        last_c.append(cell_BH)
    return hidden_TBH, torch.stack(last_h), torch.stack(last_c)


def _scan_layer(
    inputs_TBG: Tensor, hidden_BH: Tensor, cell_BH: Tensor, weight_GH: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    use_kernels = _can_use_kernels(inputs_TBG, weight_GH, dtype)
    _log_impl("triton" if use_kernels else "a loop", inputs_TBG, dtype)
    if not use_kernels:
        return lstm_loop(inputs_TBG, hidden_BH, cell_BH, weight_GH, mask, dtype)
    hidden_TBH, _, cell_LBH = _scan_in_kernels(
        inputs_TBG, hidden_BH[None], cell_BH[None], None if mask is None else mask[None], dtype, weight_GH
    )
    return hidden_TBH, cell_LBH[0]


def lstm_loop(
    inputs_TBG: Tensor, hidden_BH: Tensor, cell_BH: Tensor, weight_GH: Tensor, mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute `lstm_scan` step by step in plain torch, with products in `dtype`."""
    weight_GH, hidden_BH, cell_BH = weight_GH.to(dtype), hidden_BH.to(dtype), at_least_float32(cell_BH)
    outputs: list[Tensor] = []
    for inputs_BG in at_least_float32(inputs_TBG).unbind():
        i, f, g, o = (inputs_BG + _to_gates(hidden_BH, weight_GH, mask)).chunk(4, dim=-1)
        cell_BH = f.sigmoid() * cell_BH + i.sigmoid() * g.tanh()
        hidden_BH = (o.sigmoid() * cell_BH.tanh()).to(dtype)
        outputs.append(hidden_BH)
    return torch.stack(outputs), cell_BH


def _to_gates(hidden_BH: Tensor, weight_GH: Tensor, mask: Tensor | None, bias_G: Tensor | None = None) -> Tensor:
    """Return the contribution of a state, or of the states of all steps, to the gates that read it."""
    if mask is None:
        return F.linear(hidden_BH, weight_GH, bias_G)
    if mask.dim() == 2:
        return F.linear((hidden_BH * mask).to(weight_GH.dtype), weight_GH, bias_G)
    masked_4BH = (hidden_BH.unsqueeze(-3) * mask).to(weight_GH.dtype)
    gates_4BH = torch.matmul(masked_4BH, weight_GH.reshape(4, -1, weight_GH.shape[1]).mT)
    gates_BG = gates_4BH.transpose(-3, -2).flatten(-2)
    return gates_BG if bias_G is None else gates_BG + bias_G


def _log_impl(impl: str, inputs_TBG: Tensor, dtype: torch.dtype) -> None:
    if not torch.compiler.is_compiling():  # a graph cannot log
        log_once("the recurrence of an LSTM", impl, inputs_TBG.device.type, dtype)


def _can_use_kernels(inputs_TBG: Tensor, weight_GH: Tensor, dtype: torch.dtype, num_layers: int = 1) -> bool:
    """Return whether the kernels are used. They need a type other than float64, and layers that fit on the device."""
    if dtype == torch.float64 or not inputs_TBG.numel():
        return False
    if not should_use_triton(inputs_TBG.device, dtype, "LSTMs"):
        return False
    from reefknot.kernels.triton_recurrence import LaunchConfig

    return (
        LaunchConfig.choose(inputs_TBG.shape[1], weight_GH.shape[1], dtype, inputs_TBG.device, num_layers) is not None
    )


def _scan_in_kernels(
    inputs_TBG: Tensor, hidden_LBH: Tensor, cell_LBH: Tensor, masks: Tensor | None, dtype: torch.dtype, *weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    apply: Any = _ScanFunction.apply
    if torch.compiler.is_compiling():
        # A kernel whose programs wait for each other cannot be traced. `disable` is not a decorator here, because
        # that would always import the compiler, which takes longer than importing torch.
        apply = torch.compiler.disable(apply)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor, Tensor], apply(inputs_TBG, hidden_LBH, cell_LBH, masks, dtype, *weights))


class _ScanFunction(torch.autograd.Function):
    """The forward and backward passes, computed by the kernels.

    `weights` are recurrent weights, upward weights and biases. The gradients of the weights are products over all
    steps, computed after the backward kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs_TBG: Tensor,
        hidden_LBH: Tensor,
        cell_LBH: Tensor,
        masks: Tensor | None,
        dtype: torch.dtype,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from reefknot.kernels.triton_recurrence import run_forward_kernel

        num_matrices = 2 * len(hidden_LBH) - 1  # recurrent weights of all layers, upward weights of all but the first
        hidden_TBH, hidden_LBH, cell_LBH, results = run_forward_kernel(
            inputs_TBG, hidden_LBH, cell_LBH, weights[:num_matrices], weights[num_matrices:], masks, dtype
        )
        ctx.save_for_backward(masks, *results)
        ctx.set_materialize_grads(False)
        ctx.weight_dtype = weights[0].dtype
        return hidden_TBH, hidden_LBH, cell_LBH

    @staticmethod
    def backward(
        ctx: Any, grad_TBH: Tensor | None, grad_last_hidden_LBH: Tensor | None, grad_last_cell_LBH: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ArgumentError(
                "the LSTM kernels have no second derivatives, which create_graph = True asks for; "
                "use impl = 'reference'"
            )
        from reefknot.kernels.triton_recurrence import ForwardResults, run_backward_kernel

        masks, *saved = ctx.saved_tensors
        results = ForwardResults(*saved)
        num_layers, num_steps, num_rows, num_gates = results.gates.shape
        num_units = num_gates // 4
        if grad_TBH is None:
            grad_TBH = results.gates.new_zeros(num_steps, num_rows, num_units)
        grad_gates_LTB4P, grad_cell_LBH = run_backward_kernel(
            grad_TBH, grad_last_hidden_LBH, grad_last_cell_LBH, masks, results
        )
        grad_gates_LTBG = grad_gates_LTB4P[..., :num_units].flatten(-2)
        _, needs_h, _, _, _, *needs_weights = ctx.needs_input_grad
        grad_hidden_LBH = _state_gradients(grad_gates_LTBG[:, 0], results.weights, masks) if needs_h else None
        # As in `weights`, the order is: recurrent weights of L layers, upward weights of L - 1, biases of L - 1.
        d_recurrent: Sequence[Tensor | None] = [None] * num_layers
        d_upward: Sequence[Tensor | None] = [None] * (num_layers - 1)
        d_biases: Sequence[Tensor | None] = [None] * (num_layers - 1)
        if any(needs_weights[:num_layers]):
            states_before = results.states[:, :-1]
            d_recurrent = _weight_gradients(grad_gates_LTB4P, states_before, num_units, ctx.weight_dtype)
        if any(needs_weights[num_layers:]):
            states_below = results.states[:-1, 1:]
            d_upward = _weight_gradients(grad_gates_LTB4P[1:], states_below, num_units, ctx.weight_dtype)
            d_biases = grad_gates_LTBG[1:].sum((1, 2), dtype=ctx.weight_dtype).unbind()
        # The first layer's input contributes to its gates by addition, so both have the same gradient.
        return grad_gates_LTBG[0], grad_hidden_LBH, grad_cell_LBH, None, None, *d_recurrent, *d_upward, *d_biases


def _state_gradients(grad_gates_LBG: Tensor, weight_4HP: Tensor, masks: Tensor | None) -> Tensor:
    """Return the gradients of the states before the first step, given the gradients of the first step's gates."""
    num_layers, num_rows, num_gates = grad_gates_LBG.shape
    num_units = num_gates // 4
    grad_gates_L4BH = grad_gates_LBG.view(num_layers, num_rows, 4, -1).transpose(1, 2)
    weight_L4HH = weight_4HP[:num_layers, ..., :num_units]
    grad_hidden_L4BH = at_least_float32(grad_gates_L4BH) @ at_least_float32(weight_L4HH)
    if masks is not None:
        grad_hidden_L4BH = grad_hidden_L4BH * masks.view(num_layers, -1, num_rows, num_units)
    return grad_hidden_L4BH.sum(1)


def _weight_gradients(
    grad_gates_LTB4P: Tensor, states_LTBMP: Tensor, num_units: int, dtype: torch.dtype
) -> Sequence[Tensor]:
    """Return the gradients of each layer's weights, given those of all gates and the masked states that they read.

    For each layer and mask, a single matrix product sums over all steps and all rows of the batch.
    """
    num_layers, _, _, num_masks, num_padded = states_LTBMP.shape
    gates_per_mask = 4 * num_padded // num_masks
    # There are Q = L x M products, each over S = T x B steps and rows.
    grad_gates_QGS = (
        grad_gates_LTB4P.reshape(num_layers, -1, num_masks, gates_per_mask).permute(0, 2, 3, 1).flatten(0, 1)
    )
    states_QSP = states_LTBMP.reshape(num_layers, -1, num_masks, num_padded).transpose(1, 2).flatten(0, 1)
    grad_weight_QGP = _batched_matmul(grad_gates_QGS, states_QSP, dtype)
    grad_weight_L4PP = grad_weight_QGP.view(num_layers, 4, num_padded, num_padded)
    return grad_weight_L4PP[:, :, :num_units, :num_units].reshape(num_layers, -1, num_units).unbind()


def _batched_matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the products of several pairs of matrices.

    The result has the type `dtype` if the matrices do, and at least float32 otherwise, so that it is rounded only once.
    """
    if a.dtype in (dtype, accumulation_dtype(a.dtype)):
        return torch.bmm(a, b)
    if needs_widening(a, a.dtype):
        return torch.bmm(at_least_float32(a), at_least_float32(b))
    return torch.bmm(a, b, out_dtype=torch.float32)
