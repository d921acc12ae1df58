"""The sum or the mean of the losses of a small problem on a GPU, with as few operations as possible.

If there are few scores, a GPU computes them faster than Python can launch the kernels of `TritonBackend`. So
`linear_cross_entropy` calls `small_mean_loss` instead, and `losses.summed_loss` calls `small_summed_loss`: torch
computes all scores in float32, one kernel turns them into losses and gradients, and two products give the gradients of
the hidden states and of the classes. Like `SummedLossFunction`, they compute the gradients in the forward pass.

`is_small_problem` decides. A loss with a bias or with other options is computed by the general code. So are captured
steps, which do not wait for Python, and all steps inside `general_kernels`.
Shapes: N rows (tokens), D dimensions, V classes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from reefknot.kernels.arguments import check_target_values
from reefknot.kernels.autograd import scale_gradients
from reefknot.kernels.choice import Choice, current_choice, resolve_impl
from reefknot.kernels.reference import compute_dtype
from reefknot.kernels.scores import (
    IGNORE,
    add_class_gradient,
    add_row_gradient,
    get_backend,
    matmul_into,
)

MAX_SCORES = 2**27
"""With more scores than this, the kernels of `TritonBackend`, which do not store them, are faster."""
_BYTES_PER_SCORE = 6
"""A score in float32, and its gradient in bfloat16."""
_THREAD = threading.local()


@contextmanager
def general_kernels() -> Iterator[None]:
    """Compute small problems by the general code, so that a step has the same bits whether or not it is captured."""
    previous = getattr(_THREAD, "uses_general_kernels", False)
    _THREAD.uses_general_kernels = True
    try:
        yield
    finally:
        _THREAD.uses_general_kernels = previous


def is_small_problem(hidden: Any, weight: Any, target: Any, choice: Choice | None = None) -> bool:
    """Return whether the functions below can compute this loss. If not, the general code also checks the arguments.

    Args:
        hidden: The hidden states.
        weight: The class vectors.
        target: The target ids.
        choice: Implementation and working memory. The default is the choice of `using`.
    """
    if type(hidden) is not Tensor or not hidden.is_cuda or torch.compiler.is_compiling():
        return False
    if getattr(_THREAD, "uses_general_kernels", False):
        return False
    if not isinstance(weight, Tensor) or type(target) is not Tensor or not hidden.dim():
        return False
    if weight.dim() != 2 or not target.numel() or target.numel() * weight.shape[0] > MAX_SCORES:
        return False
    has_shapes = weight.shape[1] == hidden.shape[-1] and target.shape == hidden.shape[:-1] and weight.shape[0] > 0
    is_aligned = weight.shape[1] % 8 == 0 and weight.is_contiguous()
    has_types = target.dtype == torch.int64 and weight.dtype in (torch.bfloat16, torch.float32)
    if not (has_shapes and is_aligned and has_types and weight.device == hidden.device == target.device):
        return False
    choice = choice or current_choice()
    return (
        choice.impl == "auto"
        and torch.is_grad_enabled()
        and (hidden.requires_grad or weight.requires_grad)
        and type(weight) in (Tensor, torch.nn.Parameter)
        and compute_dtype(hidden, weight) == torch.bfloat16
        and target.numel() * weight.shape[0] * _BYTES_PER_SCORE <= choice.budget(hidden.device)
        and not torch._C._are_functorch_transforms_active()
        and not torch.cuda.is_current_stream_capturing()
        and resolve_impl(choice, hidden.device, torch.bfloat16) == "triton"
    )


def small_mean_loss(hidden: Tensor, weight_VD: Tensor, target: Tensor, check_targets: bool) -> Tensor:
    """Return the mean loss of the targets that are not ignored."""
    targets_N = target.reshape(-1)
    num_classes = weight_VD.shape[0]
    if check_targets:
        smallest, largest = torch.stack(torch.aminmax(targets_N)).tolist()
        if smallest < 0 or largest >= num_classes:  # ignored, or out of range
            check_target_values("linear_cross_entropy", targets_N, target, num_classes, IGNORE)
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    loss: Tensor = _SmallLossFunction.apply(hidden_ND, weight_VD, targets_N, True)  # type: ignore[no-untyped-call]
    return loss


def small_summed_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Return the sum of the losses of the targets that are not ignored."""
    loss: Tensor = _SmallLossFunction.apply(hidden_ND, weight_VD, targets_N, False)  # type: ignore[no-untyped-call]
    return loss


class _SmallLossFunction(torch.autograd.Function):
    """The sum or the mean of the losses, and its gradients, which the forward pass computes."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, is_mean: bool) -> Tensor:
        sums_2N, ctx.gradients = _compute(hidden_ND, weight_VD, targets_N, ctx.needs_input_grad)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N)
        ctx.count = None
        if not is_mean:
            return sums_2N[0].sum()
        total, count = sums_2N.sum(1)
        ctx.count = count.clamp(min=1)
        mean: Tensor = total / ctx.count
        return mean

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients are scaled in place, so they are used once. A second backward pass computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            hidden_ND, weight_VD, targets_N = ctx.saved_tensors
            gradients = _compute(hidden_ND, weight_VD, targets_N, ctx.needs_input_grad)[1]
        factor = grad_loss if ctx.count is None else grad_loss / ctx.count
        gradients = scale_gradients(gradients, factor, ctx.saved_tensors, get_backend("triton"))
        return (*gradients, None, None)


def _compute(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, needs_grad: tuple[bool, ...]
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Return the losses and whether each target counts, (2, N), and the gradients of hidden and weight."""
    from reefknot.kernels.triton_row_kernels import small_loss_kernel

    hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()  # a second backward pass may record operations
    num_rows, num_classes = hidden_ND.shape[0], weight_VD.shape[0]
    half_hidden_ND = hidden_ND.to(torch.bfloat16)
    half_weight_VD = weight_VD.to(torch.bfloat16)
    padded_classes = -(-num_classes // 64) * 64  # aligns the rows for the matrix units
    scores_NV = half_hidden_ND.new_empty(num_rows, padded_classes, dtype=torch.float32)[:, :num_classes]
    grad_NV = half_hidden_ND.new_empty(num_rows, padded_classes)[:, :num_classes]
    sums_2N = scores_NV.new_empty(2, num_rows)
    matmul_into(scores_NV, half_hidden_ND, half_weight_VD.T)
    small_loss_kernel[(num_rows,)](
        scores_NV,
        targets_N,
        grad_NV,
        sums_2N,
        num_rows,
        num_classes,
        padded_classes,
        padded_classes,
        BLOCK_V=1024,
        num_warps=4,
    )
    grad_hidden_ND = grad_weight_VD = None
    if needs_grad[0]:
        grad_hidden_ND = torch.empty_like(half_hidden_ND, dtype=hidden_ND.dtype)
        add_row_gradient(grad_hidden_ND, grad_NV, half_weight_VD, overwrite=True)
    if needs_grad[1]:
        grad_weight_VD = torch.empty_like(weight_VD)
        add_class_gradient(grad_weight_VD, grad_NV, half_hidden_ND, overwrite=True)
    return sums_2N, (grad_hidden_ND, grad_weight_VD)
