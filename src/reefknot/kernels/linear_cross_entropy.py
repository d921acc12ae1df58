"""Cross-entropy of a linear classifier, computed in blocks of scores, so that the logits are never all in memory.

`linear_cross_entropy` is the public function: it checks its arguments and returns a mean, a sum or one loss per target.
The output ends (classifier and loss of a model, `nn/outputs`) call the two functions below it directly:

    summed_loss    the sum of all losses. The weights of the rows are known in the forward pass, which computes the
                   gradients too: three matrix products, or four if memory is short.
    row_losses     one loss per row. The weights of the rows are known only in the backward pass, which computes the
                   scores again: four matrix products.

Both choose an implementation (`choice`) and pass the work on to an autograd function (`autograd`), which loops over
blocks of scores (`passes`). A backend (`scores`, or `triton_scores` on a GPU) computes each block.

    z_nv = h_n . w_v + b_v              the score (logit) of class v for row n
    nll_n = logsumexp_v(z_nv) - z_ny    the loss of row n, with y the target of the row

`weight` holds one vector per class, w_v. `nll` stands for negative log-likelihoods (the losses), and `lse` for
log-sum-exps.
Shapes: N rows (tokens), D dimensions, V classes, K experts of a mixture, R = N x K rows of a mixture.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.autograd import RowLossesFunction, SummedLossFunction, mixture_losses
from reefknot.kernels.choice import Choice, Impl, current_choice, resolve_impl
from reefknot.kernels.reference import compute_dtype, reference_losses
from reefknot.kernels.scores import IGNORE, accumulation_dtype, at_least_float32, get_backend, is_class, safe_class_ids

Reduction = Literal["mean", "sum", "none"]
_FUNCTION = "linear_cross_entropy"
"""The name of the public function, with which error messages begin."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = IGNORE,
    check_targets: bool = True,
    impl: Impl | None = None,
    memory: float | None = None,
) -> Tensor:
    """Compute the cross-entropy of a linear classifier without storing all scores at once.

        loss = rk.linear_cross_entropy(hidden, weight, targets)     # (B, T, D), (V, D), (B, T) -> ()

    This replaces `F.cross_entropy(F.linear(hidden, weight, bias), targets)` and returns the same loss, with three
    differences. At any time, only as many scores exist as fit into `memory`. Sums over classes and over blocks of rows
    are computed at least in float32, whatever the input types. If all targets are ignored, the mean is zero and not
    NaN.

    The gradients of a sum or a mean are computed in the forward pass and stored for the backward pass. Second
    derivatives are available only with `impl = "reference"`. Targets must be class ids, and all classes have the same
    weight.

    Args:
        hidden: Hidden states, with shape (..., D).
        weight: One vector per class, with shape (V, D), in any floating-point type. Its gradient has the same type.
        targets: Class ids, with the shape of `hidden` without its last dimension, (...).
        bias: One number per class, with shape (V,), or None.
        reduction: `mean` over the targets that are not ignored, `sum`, or `none` for one loss per target. Training
            with `none` takes a third more arithmetic, and so does training with label smoothing, the z-loss or float16.
        label_smoothing: The share of every target that is spread over all classes, from 0 to 1.
        z_loss: Weight of the z-loss, the squared log-sum-exp of a row's scores.
        ignore_index: Targets with this value have a loss of zero and no gradient.
        check_targets: Raise an error if a target is out of range. On a GPU this check synchronises with the device.
            Without it, and in a compiled or captured graph, the loss of such a target is NaN.
        impl: The implementation: `reference`, `chunked`, `triton` or `auto` (see `using`). The default is the choice
            of `using`.
        memory: Working memory in MiB, not counting inputs and gradients. More memory is faster on a GPU. The default
            is the choice of `using`.

    Returns:
        The mean or the sum, with shape (), or one loss per target, with the shape of `targets`; at least in float32.
    """
    _check_types(hidden, weight, targets, bias)
    _check_shapes(hidden, weight, targets, bias)
    _check_settings(reduction, label_smoothing, z_loss, ignore_index)
    hidden_ND = hidden.reshape(-1, hidden.shape[-1])
    targets_N = _replace_ignore_index(targets.reshape(-1).long(), ignore_index, weight.shape[0])
    if check_targets and not _is_tracing(targets):
        _check_targets(targets_N, targets, weight.shape[0], ignore_index)
    choice = current_choice()
    if impl is not None or memory is not None:
        choice = Choice(impl or choice.impl, choice.memory if memory is None else memory)
    if reduction != "none" and not label_smoothing and not z_loss:
        total = summed_loss(hidden_ND, weight, bias, targets_N, choice=choice)
    else:
        loss_N = _regularised_losses(hidden_ND, weight, bias, targets_N, label_smoothing, z_loss, choice)
        if reduction == "none":
            return loss_N.view(targets.shape)
        total = loss_N.sum()
    if reduction == "sum":
        return total
    num_targets = (targets_N != IGNORE).sum().clamp(min=1)
    return total / num_targets


def _regularised_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    label_smoothing: float,
    z_loss: float,
    choice: Choice,
) -> Tensor:
    """Return one loss per row, with label smoothing and the z-loss unless their weights are 0."""
    nll_N, lse_N, _ = row_losses(hidden_ND, weight_VD, bias_V, targets_N, choice=choice)
    loss_N = nll_N
    if label_smoothing:
        loss_N = loss_N + label_smoothing * smoothing_losses(
            hidden_ND, weight_VD, bias_V, targets_N, target_score_N=lse_N - nll_N
        )
    if z_loss:
        loss_N = loss_N + z_loss * lse_N.square().where(targets_N != IGNORE, 0.0)
    return loss_N


class RowLosses(NamedTuple):
    """Losses and normalisers, one per row, (N,), at least in float32."""

    nll: Tensor
    """The negative log-likelihood of the target. It is zero if the target is `IGNORE`."""
    lse: Tensor
    """The log-sum-exp of the scores."""
    lse_tau: Tensor | None
    """The log-sum-exp of (s - mean(s)) / tau over the classes, where s are the scores without bias. None if tau is not
    given. The mean is subtracted because a divergence between two tempered softmaxes does not depend on it.
    """


def row_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    tau: float | None = None,
    choice: Choice | None = None,
) -> RowLosses:
    """Return the negative log-likelihood of each row's target under softmax(h W^T + b), and the normalisers.

    Args:
        hidden_ND: Hidden states.
        weight_VD: One vector per class.
        bias_V: One bias per class, or None.
        targets_N: Target ids, from 0 to V - 1. Rows with `IGNORE` have a loss of zero.
        tau: If given, the log-sum-exp at this temperature is returned too.
        choice: Implementation and working memory. The default is the choice of `using`.
    """
    choice = choice or current_choice()
    dtype = compute_dtype(hidden_ND, weight_VD)
    if torch.compiler.is_compiling() and choice.impl != "reference":
        from reefknot.kernels import ops  # it imports this module

        return ops.row_losses(hidden_ND, weight_VD, bias_V, targets_N, tau, dtype, choice)
    impl = resolve_impl(choice, hidden_ND.device, dtype)
    if impl == "reference":
        return RowLosses(*reference_losses(hidden_ND, weight_VD, bias_V, targets_N, tau))
    backend, budget = get_backend(impl), choice.budget(hidden_ND.device)
    losses = RowLossesFunction.apply(hidden_ND, weight_VD, bias_V, targets_N, tau, dtype, backend, budget)  # type: ignore[no-untyped-call]
    return RowLosses(*losses)


def summed_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    log_prior_NK: Tensor | None = None,
    choice: Choice | None = None,
) -> Tensor:
    """Return the sum of the negative log-likelihoods of all targets, under one softmax or a mixture of softmaxes.

    A mixture has K softmaxes over the same classes. Its loss of a target is -logsumexp_k(log_prior_k - nll_k).

    Args:
        hidden_ND: Hidden states. For a mixture, K consecutive rows per target.
        weight_VD: One vector per class.
        bias_V: One bias per class, or None.
        targets_N: Target ids, from 0 to V - 1. Targets with `IGNORE` have a loss of zero.
        log_prior_NK: For a mixture, the logarithms of the experts' weights; otherwise None.
        choice: Implementation and working memory. The default is the choice of `using`.
    """
    choice = choice or current_choice()
    if torch.float16 in (weight_VD.dtype, None if bias_V is None else bias_V.dtype):
        # The gradients of a sum over many rows would overflow float16 before a later operation scales them down.
        return _sum_row_losses(hidden_ND, weight_VD, bias_V, targets_N, log_prior_NK, choice)
    dtype = compute_dtype(hidden_ND, weight_VD)
    if torch.compiler.is_compiling() and choice.impl != "reference":
        from reefknot.kernels import ops  # it imports this module

        return ops.summed_loss(hidden_ND, weight_VD, bias_V, targets_N, log_prior_NK, dtype, choice)
    impl = resolve_impl(choice, hidden_ND.device, dtype)
    if impl == "reference":
        return _sum_row_losses(hidden_ND, weight_VD, bias_V, targets_N, log_prior_NK, choice)
    training, backend, budget = torch.is_grad_enabled(), get_backend(impl), choice.budget(hidden_ND.device)
    arguments = (hidden_ND, weight_VD, bias_V, targets_N, log_prior_NK, training, dtype, backend, budget)
    return cast(Tensor, SummedLossFunction.apply(*arguments))  # type: ignore[no-untyped-call]


def _sum_row_losses(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    log_prior_NK: Tensor | None,
    choice: Choice,
) -> Tensor:
    """Compute `summed_loss` by `row_losses`, whose gradients are computed in the backward pass."""
    if log_prior_NK is None:
        return row_losses(hidden_RD, weight_VD, bias_V, targets_N, choice=choice).nll.sum()
    targets_R = targets_N[:, None].expand(log_prior_NK.shape).flatten()
    nll_R = row_losses(hidden_RD, weight_VD, bias_V, targets_R, choice=choice).nll
    return mixture_losses(log_prior_NK, nll_R.view(log_prior_NK.shape), targets_N).sum()


def smoothing_losses(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, target_score_N: Tensor | None = None
) -> Tensor:
    """Return the label-smoothing term z_y - mean_v z_v of each row, (N,), at least in float32.

    If a share s of every target is spread over all classes, its loss is (1 - s) nll + s mean_v(-log p_v). This equals
    nll + s (z_y - mean_v z_v), so the log-probabilities of the other classes are not needed. The term is zero for
    ignored targets.

    Args:
        hidden_ND: Hidden states.
        weight_VD: One vector per class.
        bias_V: One bias per class, or None.
        targets_N: Target ids, or `IGNORE`.
        target_score_N: The scores of the targets, z_y. By default they are computed from the targets' vectors, whose
            gradient is then summed in the type of `weight_VD`.
    """
    with torch.autocast(hidden_ND.device.type, enabled=False):
        hidden_ND = at_least_float32(hidden_ND)
        if target_score_N is None:
            classes_N = safe_class_ids(targets_N, weight_VD.shape[0])
            # Rows share targets. The gradient of an embedding is summed in a fixed order, that of indexing in any.
            target_score_N = (hidden_ND * F.embedding(classes_N, weight_VD)).sum(-1)
            if bias_V is not None:
                target_score_N = target_score_N + F.embedding(classes_N, bias_V[:, None])[:, 0]
        mean_vector_D = weight_VD.mean(0, dtype=accumulation_dtype(weight_VD.dtype)).to(hidden_ND.dtype)
        mean_score_N = hidden_ND @ mean_vector_D
        if bias_V is not None:
            mean_score_N = mean_score_N + bias_V.mean(dtype=accumulation_dtype(bias_V.dtype))
    return (target_score_N - mean_score_N).where(targets_N != IGNORE, 0.0)


# -- checks --------------------------------------------------------------------------------------------------------


def _replace_ignore_index(targets_N: Tensor, ignore_index: int, num_classes: int) -> Tensor:
    """Replace `ignore_index` by `IGNORE`, and targets that happen to equal `IGNORE` by an id that is out of range."""
    if ignore_index == IGNORE:
        return targets_N
    other_targets_N = torch.where(targets_N == IGNORE, num_classes, targets_N)
    return torch.where(targets_N == ignore_index, IGNORE, other_targets_N)


def _check_types(hidden: Any, weight: Any, targets: Any, bias: Any) -> None:
    for name, argument in (("hidden", hidden), ("weight", weight), ("targets", targets), ("bias", bias)):
        if name == "bias" and argument is None:
            continue
        if not isinstance(argument, Tensor):
            hint = f"; pass its {name}, not the layer" if isinstance(argument, torch.nn.Module) else ""
            raise ArgumentError(f"{_FUNCTION}: {name} is a {type(argument).__name__}; it must be a tensor{hint}")
        if name != "targets" and not argument.is_floating_point():
            raise ArgumentError(f"{_FUNCTION}: {name} is {argument.dtype}; it must be a floating-point tensor")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ArgumentError(f"{_FUNCTION}: targets are {targets.dtype}; class ids must be integers")


def _check_settings(reduction: str, label_smoothing: float, z_loss: float, ignore_index: int) -> None:
    if not isinstance(ignore_index, int):
        raise ArgumentError(f"{_FUNCTION}: ignore_index = {ignore_index!r}: must be an integer")
    if reduction not in get_args(Reduction):
        raise ArgumentError(f"{_FUNCTION}: reduction = {reduction!r}: must be one of {', '.join(get_args(Reduction))}")
    if not (isinstance(label_smoothing, int | float) and 0 <= label_smoothing <= 1):
        raise ArgumentError(f"{_FUNCTION}: label_smoothing = {label_smoothing!r}: must be from 0 to 1")
    if not (isinstance(z_loss, int | float) and 0 <= z_loss < math.inf):
        raise ArgumentError(f"{_FUNCTION}: z_loss = {z_loss!r}: must be 0 or more, and finite")


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or not hidden.dim() or weight.shape[-1] != hidden.shape[-1]:
        raise ArgumentError(
            f"{_FUNCTION}: hidden is {tuple(hidden.shape)} and weight is {tuple(weight.shape)}; they must be "
            "(..., dim) and (classes, dim), with the same dim"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ArgumentError(
            f"{_FUNCTION}: targets is {tuple(targets.shape)} but hidden is {tuple(hidden.shape)}; pass one id per row, "
            f"{tuple(hidden.shape[:-1])}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            f"{_FUNCTION}: bias is {tuple(bias.shape)}; with {weight.shape[0]} classes it must be ({weight.shape[0]},)"
        )
    devices = {str(tensor.device) for tensor in (hidden, weight, targets, bias) if tensor is not None}
    if len(devices) > 1:
        raise ArgumentError(
            f"{_FUNCTION}: the arguments are on {' and '.join(sorted(devices))}; put them on one device"
        )


def _check_targets(targets_N: Tensor, targets: Tensor, num_classes: int, ignore_index: int) -> None:
    outside_N = (targets_N != IGNORE) & ~is_class(targets_N, num_classes)
    if bool(outside_N.any()):
        row = int(outside_N.nonzero()[0])
        raise ArgumentError(
            f"{_FUNCTION}: target {int(targets.reshape(-1)[row])} of row {row} is not a class; "
            f"use 0 to {num_classes - 1}, or {ignore_index} (ignore_index) to ignore a row"
        )


def _is_tracing(targets: Tensor) -> bool:
    """Return whether a graph is being compiled or captured. The targets then have no values that could be checked."""
    if torch.compiler.is_compiling() or targets.is_meta:
        return True
    return targets.is_cuda and torch.cuda.is_current_stream_capturing()
