"""The losses of small problems on a GPU, with as few operations as possible.

If there are few scores, a GPU computes them faster than Python can launch the kernels of `TritonBackend`. So small
problems have functions of their own, which store all scores:

    small_mean_loss, small_summed_loss    the cross-entropy, with or without a bias
    stored_losses, stored_mixture_loss    for fewer scores, the cross-entropy with any options, and that of a mixture
    stored_augmented_losses               the augmented loss

In the first two functions, torch computes the scores in float32, one kernel turns them into losses and gradients, and
two products give the gradients of the hidden states and of the classes. Like `SummedLossFunction`, the forward pass
does all this. The other functions consist of torch's operations and their gradients.

`is_small_problem` and `stores_scores` decide. A loss with other options is computed by the general code. So are
captured steps, which do not wait for Python, and all steps inside `general_kernels`.
Shapes: N rows (tokens), D dimensions, V classes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.kernels.arguments import check_target_values
from reefknot.kernels.autograd import mixture_losses, scale_gradients
from reefknot.kernels.choice import Choice, current_choice, resolve_impl
from reefknot.kernels.reference import compute_dtype, linear_scores, transform_scores
from reefknot.kernels.scores import (
    IDENTITY,
    IGNORE,
    ScoreTransform,
    accumulation_dtype,
    add_class_gradient,
    add_row_gradient,
    get_backend,
    matmul_into,
    padded_classes,
)

MAX_STORED_SCORES = 2**25
"""Up to so many scores, torch's operations on stored scores take less time than Python needs to launch the kernels of
`TritonBackend`."""
MAX_UNALIGNED_SCORES = 2**22
"""The same if the rows of the scores do not begin at multiples of 16 bytes. Torch's products are then slow."""
_STORED_BYTES_PER_SCORE = 32
"""The largest peak that was measured, of the augmented loss with gradients: seven matrices in float32."""
MAX_SCORES = 2**27
"""With more scores than this, the kernels of `TritonBackend`, which do not store them, are faster."""
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


def is_small_problem(hidden: Any, weight: Any, target: Any, bias: Any = None, choice: Choice | None = None) -> bool:
    """Return whether the functions below can compute this loss. If not, the general code also checks the arguments.

    Args:
        hidden: The hidden states.
        weight: The class vectors.
        target: The target ids.
        bias: The biases of the classes, or None.
        choice: Implementation and working memory. The default is the choice of `using`.
    """
    if type(hidden) is not Tensor or not _waits_for_python(hidden):
        return False
    if type(weight) not in (Tensor, torch.nn.Parameter) or type(target) is not Tensor:
        return False
    if not hidden.dim() or weight.dim() != 2 or not 0 < target.numel() * weight.shape[0] <= MAX_SCORES:
        return False
    has_shapes = weight.shape[1] == hidden.shape[-1] and target.shape == hidden.shape[:-1]
    is_aligned = weight.shape[1] % 8 == 0 and weight.is_contiguous()
    has_types = target.dtype == torch.int64 and weight.dtype in (torch.bfloat16, torch.float32)
    if not (has_shapes and is_aligned and has_types and weight.device == hidden.device == target.device):
        return False
    if bias is not None and not _is_bias(bias, weight):
        return False
    choice = choice or current_choice()
    dtype = compute_dtype(hidden, weight)
    return (
        choice.impl == "auto"
        and torch.is_grad_enabled()
        and (hidden.requires_grad or weight.requires_grad)
        and (dtype == torch.bfloat16 or (dtype == torch.float32 and not torch.is_autocast_enabled("cuda")))
        and target.numel() * padded_classes(weight.shape[0]) * _bytes_per_score(dtype) <= choice.budget(hidden.device)
        and resolve_impl(choice, hidden.device, dtype) == "triton"
    )


def _is_bias(bias: Any, weight_VD: Tensor) -> bool:
    has_type = type(bias) in (Tensor, torch.nn.Parameter) and bias.dtype in (torch.bfloat16, torch.float32)
    return has_type and bias.shape == weight_VD.shape[:1] and bias.device == weight_VD.device and bias.is_contiguous()


def _bytes_per_score(dtype: torch.dtype) -> int:
    """Return the bytes of a score in float32 and, unless it overwrites the score, of its gradient."""
    return 4 if dtype == torch.float32 else 4 + dtype.itemsize


def stores_scores(hidden_ND: Tensor, num_classes: int, choice: Choice | None = None) -> bool:
    """Return whether the loss of these rows is computed by torch from all scores."""
    num_scores = hidden_ND.shape[0] * num_classes
    max_scores = MAX_UNALIGNED_SCORES if num_classes % 8 else MAX_STORED_SCORES
    if type(hidden_ND) is not Tensor or not _waits_for_python(hidden_ND) or num_scores > max_scores:
        return False
    choice = choice or current_choice()
    return (
        choice.impl == "auto"
        and torch.is_grad_enabled()
        and num_scores * _STORED_BYTES_PER_SCORE <= choice.budget(hidden_ND.device)
    )


def _waits_for_python(tensor: Tensor) -> bool:
    """Return whether an operation takes longer to launch than to run. Tests without a GPU replace this function."""
    return (
        not torch.compiler.is_compiling()
        and tensor.is_cuda
        and not getattr(_THREAD, "uses_general_kernels", False)
        and not torch._C._are_functorch_transforms_active()
        and not torch.cuda.is_current_stream_capturing()
    )


def stored_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    transform: ScoreTransform = IDENTITY,
    reduction: Literal["sum", "none"] = "sum",
    class_weight_V: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross-entropies of all rows or their sum, with all scores stored.

    Args:
        hidden_ND: Hidden states.
        weight_VD: One vector per class.
        bias_V: One bias per class, or None.
        targets_N: Target ids. Every target must be a class or ignored.
        transform: Applied to the scores.
        reduction: `sum`, or `none` for one loss per row.
        class_weight_V: The weight of each class in the loss, or None. It gets no gradient.
        label_smoothing: The share of every target that is spread over all classes.
    """
    scores_NV = linear_scores(hidden_ND, weight_VD, bias_V)
    if not transform.is_identity:
        scores_NV = transform_scores(scores_NV, transform)
    if class_weight_V is not None:
        class_weight_V = class_weight_V.detach().to(scores_NV.dtype)
    return F.cross_entropy(
        scores_NV, targets_N, class_weight_V, ignore_index=IGNORE, reduction=reduction, label_smoothing=label_smoothing
    )


def stored_mixture_loss(
    hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, log_prior_NK: Tensor
) -> Tensor:
    """Return the summed loss of a mixture of softmaxes, with all scores stored. See `losses.summed_loss`."""
    targets_R = targets_N[:, None].expand(log_prior_NK.shape).flatten()
    nll_R = stored_losses(hidden_RD, weight_VD, bias_V, targets_R, reduction="none")
    return mixture_losses(log_prior_NK, nll_R.view(log_prior_NK.shape), targets_N).sum()


def stored_augmented_losses(
    context_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    queries_ND: Tensor,
    keys_VD: Tensor,
    tau: float,
) -> tuple[Tensor, Tensor]:
    """Return the sums of the negative log-likelihoods and of the divergences from soft targets, with all scores stored.

    Autograd adds up the gradients of the scores in float32, so the difference of two nearly uniform softmaxes keeps its
    digits.

    Args:
        context_ND: Hidden states.
        weight_VD: One vector per class.
        bias_V: One bias per class, or None. The divergence does not depend on it.
        targets_N: Target ids, all of them classes.
        queries_ND: The vector of each target in the table of the soft targets.
        keys_VD: All vectors of that table.
        tau: Temperature of the soft targets and of their predictions.
    """
    centred_VD = _subtract_mean(weight_VD)
    centred_keys_VD = centred_VD if keys_VD is weight_VD else _subtract_mean(keys_VD)
    scores_NV = linear_scores(context_ND, centred_VD, None)
    biased_NV = scores_NV if bias_V is None else scores_NV + bias_V
    nll_sum = F.cross_entropy(biased_NV, targets_N, reduction="sum")
    log_soft_targets_NV = torch.log_softmax(linear_scores(queries_ND, centred_keys_VD, None) / tau, dim=-1)
    log_predictions_NV = torch.log_softmax(scores_NV / tau, dim=-1)
    divergence_sum = F.kl_div(log_predictions_NV, log_soft_targets_NV, reduction="sum", log_target=True)
    return nll_sum, divergence_sum


def _subtract_mean(weight_VD: Tensor) -> Tensor:
    """Subtract the mean of all vectors, as `LossInputs.subtract_mean` does. No loss and no gradient depends on it."""
    if accumulation_dtype(weight_VD.dtype) != weight_VD.dtype:
        return weight_VD
    return weight_VD - weight_VD.detach().mean(0)


def small_mean_loss(
    hidden: Tensor, weight_VD: Tensor, target: Tensor, bias_V: Tensor | None, check_targets: bool
) -> Tensor:
    """Return the mean loss of the targets that are not ignored."""
    hidden_ND, targets_N = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    num_classes = weight_VD.shape[0]
    if check_targets:
        smallest, largest = torch.stack(torch.aminmax(targets_N)).tolist()
        has_others = smallest < 0 or largest >= num_classes  # ignored targets, or targets out of range
        if has_others:
            check_target_values("linear_cross_entropy", targets_N, target, num_classes, IGNORE)
        if stores_scores(hidden_ND, num_classes):
            count = (targets_N != IGNORE).sum().clamp(min=1) if has_others else len(targets_N)
            return stored_losses(hidden_ND, weight_VD, bias_V, targets_N) / count
    loss: Tensor = _SmallLossFunction.apply(hidden_ND, weight_VD, bias_V, targets_N, True)  # type: ignore[no-untyped-call]
    return loss


def small_summed_loss(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor) -> Tensor:
    """Return the sum of the losses of the targets that are not ignored."""
    loss: Tensor = _SmallLossFunction.apply(hidden_ND, weight_VD, bias_V, targets_N, False)  # type: ignore[no-untyped-call]
    return loss


class _SmallLossFunction(torch.autograd.Function):
    """The sum or the mean of the losses, and its gradients, which the forward pass computes."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, is_mean: bool
    ) -> Tensor:
        ctx.dtype = compute_dtype(hidden_ND, weight_VD)
        sums_2N, ctx.gradients = _compute(hidden_ND, weight_VD, bias_V, targets_N, ctx.dtype, ctx.needs_input_grad)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N)
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
            hidden_ND, weight_VD, bias_V, targets_N = ctx.saved_tensors
            gradients = _compute(hidden_ND, weight_VD, bias_V, targets_N, ctx.dtype, ctx.needs_input_grad)[1]
        factor = grad_loss if ctx.count is None else grad_loss / ctx.count
        gradients = scale_gradients(gradients, factor, ctx.saved_tensors, get_backend("triton"))
        return (*gradients, None, None)


def _compute(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    dtype: torch.dtype,
    needs_grad: tuple[bool, ...],
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """Return the losses and whether each target counts, (2, N), and the gradients of hidden, weight and bias."""
    from reefknot.kernels.triton_row_kernels import small_loss_kernel

    hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()  # a second backward pass may record operations
    num_rows, num_classes = hidden_ND.shape[0], weight_VD.shape[0]
    rounded_hidden_ND, rounded_weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
    stride = padded_classes(num_classes)
    scores_NV = hidden_ND.new_empty(num_rows, stride, dtype=torch.float32)[:, :num_classes]
    grad_NV = scores_NV  # in float32, the gradients overwrite the scores
    if dtype != torch.float32:
        grad_NV = hidden_ND.new_empty(num_rows, stride, dtype=dtype)[:, :num_classes]
    sums_2N = scores_NV.new_empty(2, num_rows)
    matmul_into(scores_NV, rounded_hidden_ND, rounded_weight_VD.T)
    small_loss_kernel[(num_rows,)](
        scores_NV,
        bias_V,
        targets_N,
        grad_NV,
        sums_2N,
        num_rows,
        num_classes,
        stride,
        BIAS=bias_V is not None,
        BLOCK_V=1024,
        num_warps=4,
    )
    grad_hidden_ND = grad_weight_VD = grad_bias_V = None
    if needs_grad[0]:
        grad_hidden_ND = torch.empty_like(rounded_hidden_ND, dtype=hidden_ND.dtype)
        add_row_gradient(grad_hidden_ND, grad_NV, rounded_weight_VD, overwrite=True)
    if needs_grad[1]:
        grad_weight_VD = torch.empty_like(weight_VD)
        add_class_gradient(grad_weight_VD, grad_NV, rounded_hidden_ND, overwrite=True)
    if bias_V is not None and needs_grad[2]:
        grad_bias_V = grad_NV.sum(0, dtype=torch.float32).to(bias_V.dtype)
    return sums_2N, (grad_hidden_ND, grad_weight_VD, grad_bias_V)
