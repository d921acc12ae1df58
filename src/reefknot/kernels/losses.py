"""Losses of a linear classifier without the N x V scores, as the output layers of models (`nn/outputs`) call them.

    summed_loss    the sum of all losses. The weights of the rows are known in the forward pass, which computes the
                   gradients too: three matrix products, or four if memory is short.
    row_losses     one loss per row. The weights of the rows are known only in the backward pass, which computes the
                   scores again: four matrix products. `row_results` returns more, such as entropies.

Both choose an implementation (`choice`) and pass the work on to an autograd function (`autograd`), which loops over
blocks of scores (`passes`). A backend (`scores`, or `triton_scores` on a GPU) computes each block.
`linear_cross_entropy` and `linear_log_probs` are the public functions; they check their arguments first.

    z_nv = h_n . w_v + b_v              the score (logit) of class v for row n
    nll_n = logsumexp_v(z_nv) - z_ny    the loss of row n, with y the target of the row

`weight` holds one vector per class, w_v. `nll` stands for negative log-likelihoods (the losses), and `lse` for
log-sum-exps.
Shapes: N rows (tokens), D dimensions, V classes, K experts of a mixture, R = N x K rows of a mixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.kernels.arguments import needs_operators
from reefknot.kernels.autograd import LossOptions, RowLossesFunction, RowResults, SummedLossFunction, mixture_losses
from reefknot.kernels.choice import Choice, current_choice, resolve_impl
from reefknot.kernels.columns import ClassVectors, JoinedColumns, column_parts, join_columns
from reefknot.kernels.reference import compute_dtype, no_autocast, reference_results
from reefknot.kernels.scores import (
    IDENTITY,
    IGNORE,
    ScoreTransform,
    SummaryRequest,
    accumulation_dtype,
    at_least_float32,
    get_backend,
    safe_class_ids,
)
from reefknot.kernels.small import (
    is_small_problem,
    small_summed_loss,
    stored_losses,
    stored_mixture_loss,
    stores_scores,
)

if TYPE_CHECKING:
    from reefknot.kernels.parallel import ClassShard

DIMENSION_MULTIPLE = 8
"""Rows of half-precision matrices with a multiple of 8 dimensions begin at multiples of 16 bytes."""


class RowLosses(NamedTuple):
    """Losses and normalisers, one per row, (N,), at least in float32. See `RowResults`."""

    nll: Tensor
    lse: Tensor
    lse_tau: Tensor | None


def row_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    tau: float | None = None,
    transform: ScoreTransform = IDENTITY,
    choice: Choice | None = None,
    shard: ClassShard | None = None,
) -> RowLosses:
    """Return the negative log-likelihood of each row's target under softmax(h W^T + b), and the normalisers.

    Args:
        hidden_ND: Hidden states.
        weight_VD: One vector per class.
        bias_V: One bias per class, or None.
        targets_N: Target ids, from 0 to V - 1. Rows with `IGNORE` have a loss of zero.
        tau: If given, the log-sum-exp at this temperature is returned too.
        transform: Applied to the scores.
        choice: Implementation and working memory. The default is the choice of `using`.
        shard: Where the classes lie, if other processes have more classes.
    """
    request = SummaryRequest(tau=tau)
    results = _own_row_results(hidden_ND, weight_VD, bias_V, targets_N, request, transform, choice, shard)
    return RowLosses(results.nll, results.lse, results.lse_tau)


def _own_row_results(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    request: SummaryRequest,
    transform: ScoreTransform,
    choice: Choice | None,
    shard: ClassShard | None,
) -> RowResults:
    """Return the results of this process's rows, over all classes, which may be divided among processes."""
    if shard is None:
        return row_results(hidden_ND, weight_VD, bias_V, targets_N, request, transform, choice=choice)
    from reefknot.kernels.parallel_rows import parallel_row_results  # few models divide their vocabulary

    return parallel_row_results(hidden_ND, weight_VD, bias_V, targets_N, request, shard, transform, choice)


def row_results(
    hidden_ND: Tensor,
    weight_VD: ClassVectors,
    bias_V: Tensor | None,
    targets_N: Tensor,
    request: SummaryRequest,
    transform: ScoreTransform = IDENTITY,
    class_weight_V: Tensor | None = None,
    choice: Choice | None = None,
) -> RowResults:
    """Return losses and summaries of each row's scores.

    Args:
        hidden_ND: Hidden states.
        weight_VD: One vector per class.
        bias_V: One bias per class, or None.
        targets_N: Target ids, from 0 to V - 1. Rows with `IGNORE` have a loss of zero.
        request: Which summaries to compute.
        transform: Applied to the scores.
        class_weight_V: The weights of the classes in the sum of the scores, `total`. None stands for weights of 1.
        choice: Implementation and working memory. The default is the choice of `using`.
    """
    choice = choice or current_choice()
    if isinstance(weight_VD, Tensor) and stores_scores(hidden_ND, len(weight_VD), choice):
        choice = Choice("reference")
    dtype = compute_dtype(hidden_ND, weight_VD)
    if choice.impl != "reference":
        hidden_ND, weight_VD = align_dimensions(hidden_ND, weight_VD)
    weight_VD, *more_columns = _matrices(weight_VD, hidden_ND, choice)
    tensors = (hidden_ND, weight_VD, bias_V, targets_N, class_weight_V)
    if needs_operators(hidden_ND) and choice.impl != "reference":
        from reefknot.kernels import ops  # it imports this module

        return ops.row_results(*tensors, request, transform, dtype, choice)
    impl = resolve_impl(choice, hidden_ND.device, dtype)
    if impl == "reference":
        return RowResults(*reference_results(*tensors, request, transform))  # type: ignore[arg-type]
    options = LossOptions(dtype, get_backend(impl), choice.budget(hidden_ND.device), transform)
    return RowResults(*RowLossesFunction.apply(*tensors, request, options, *more_columns))  # type: ignore[no-untyped-call]


def summed_loss(
    hidden_ND: Tensor,
    weight_VD: ClassVectors,
    bias_V: Tensor | None,
    targets_N: Tensor,
    log_prior_NK: Tensor | None = None,
    row_weight_N: Tensor | None = None,
    transform: ScoreTransform = IDENTITY,
    choice: Choice | None = None,
    shard: ClassShard | None = None,
    has_checked_targets: bool = False,
) -> Tensor:
    """Return the sum of the negative log-likelihoods of all targets, under one softmax or a mixture of softmaxes.

    A mixture has K softmaxes over the same classes. Its loss of a target is -logsumexp_k(log_prior_k - nll_k).

    Args:
        hidden_ND: Hidden states. For a mixture, K consecutive rows per target.
        weight_VD: One vector per class.
        bias_V: One bias per class, or None.
        targets_N: Target ids, from 0 to V - 1. Targets with `IGNORE` have a loss of zero.
        log_prior_NK: For a mixture, the logarithms of the experts' weights; otherwise None.
        row_weight_N: The weight of each target in the sum, zero for ignored targets. None stands for weights of 1. Not
            for mixtures.
        transform: Applied to the scores.
        choice: Implementation and working memory. The default is the choice of `using`.
        shard: Where the classes lie, if other processes have more classes. Not with a mixture or weights of rows.
        has_checked_targets: Whether every target is a class or `IGNORE`. If so, small problems on a GPU are faster.
            Otherwise the loss of any other target is NaN.
    """
    if shard is not None:
        assert isinstance(weight_VD, Tensor)
        results = row_losses(hidden_ND, weight_VD, bias_V, targets_N, transform=transform, choice=choice, shard=shard)
        return results.nll.sum()
    choice = choice or current_choice()
    is_checked = has_checked_targets and row_weight_N is None
    if is_checked and isinstance(weight_VD, Tensor) and stores_scores(hidden_ND, len(weight_VD), choice):
        if log_prior_NK is not None:
            return stored_mixture_loss(hidden_ND, weight_VD, bias_V, targets_N, log_prior_NK)
        return stored_losses(hidden_ND, weight_VD, bias_V, targets_N, transform)
    dtype = compute_dtype(hidden_ND, weight_VD)
    dtypes = [part.dtype for part in (*column_parts(weight_VD), bias_V) if part is not None]
    if torch.float16 in dtypes or choice.impl == "reference":
        # The gradients of a sum over many rows would overflow float16 before a later operation scales them down.
        tensors = (hidden_ND, weight_VD, bias_V, targets_N, log_prior_NK, row_weight_N)
        return _sum_row_losses(*tensors, transform, choice)
    hidden_ND, weight_VD = align_dimensions(hidden_ND, weight_VD)
    is_plain = log_prior_NK is None and row_weight_N is None and transform.is_identity
    if is_plain and is_small_problem(hidden_ND, weight_VD, targets_N, bias_V, choice):
        assert isinstance(weight_VD, Tensor)
        return small_summed_loss(hidden_ND, weight_VD, bias_V, targets_N)
    weight_VD, *more_columns = _matrices(weight_VD, hidden_ND, choice)
    tensors = (hidden_ND, weight_VD, bias_V, targets_N, log_prior_NK, row_weight_N)
    needs_hidden, needs_bias, needs_prior, *needs_columns = (
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (hidden_ND, bias_V, log_prior_NK, weight_VD, *more_columns)
    )
    needs_grad = (needs_hidden, any(needs_columns), needs_bias, needs_prior)
    if needs_operators(hidden_ND):
        from reefknot.kernels import ops  # it imports this module

        return ops.summed_loss(*tensors, transform, dtype, choice, needs_grad)
    impl = resolve_impl(choice, hidden_ND.device, dtype)
    budget = choice.budget(hidden_ND.device)
    options = LossOptions(dtype, get_backend(impl), budget, transform, needs_grad, tuple(needs_columns))
    total: Tensor = SummedLossFunction.apply(*tensors, options, *more_columns)[0]  # type: ignore[no-untyped-call]
    return total


def _matrices(weight_VD: ClassVectors, hidden_ND: Tensor, choice: Choice) -> tuple[Tensor, ...]:
    """Return the matrices that hold the class vectors. Compiled graphs and the reference get one matrix."""
    if isinstance(weight_VD, JoinedColumns) and (needs_operators(hidden_ND) or choice.impl == "reference"):
        return (weight_VD[:],)
    return column_parts(weight_VD)


def _sum_row_losses(
    hidden_RD: Tensor,
    weight_VD: ClassVectors,
    bias_V: Tensor | None,
    targets_N: Tensor,
    log_prior_NK: Tensor | None,
    row_weight_N: Tensor | None,
    transform: ScoreTransform,
    choice: Choice,
) -> Tensor:
    """Compute `summed_loss` from individual losses, whose gradients are computed in the backward pass."""
    targets_R = targets_N
    if log_prior_NK is not None:
        targets_R = targets_N[:, None].expand(log_prior_NK.shape).flatten()
    nll_R = row_results(hidden_RD, weight_VD, bias_V, targets_R, SummaryRequest(), transform, choice=choice).nll
    if log_prior_NK is not None:
        return mixture_losses(log_prior_NK, nll_R.view(log_prior_NK.shape), targets_N).sum()
    return nll_R.sum() if row_weight_N is None else (nll_R * row_weight_N).sum()


def align_dimensions(hidden_ND: Tensor, weight_VD: ClassVectors) -> tuple[Tensor, ClassVectors]:
    """Pad the dimensions with zeros to a multiple of 8 on a GPU, whose matrix units and copy engine need aligned rows.

    Zeros do not change the scores. Without padding, odd dimensions take several times longer.
    """
    padding = -hidden_ND.shape[1] % DIMENSION_MULTIPLE
    if not padding or not hidden_ND.is_cuda:
        return hidden_ND, weight_VD
    *others, last = column_parts(weight_VD)
    return F.pad(hidden_ND, (0, padding)), join_columns((*others, F.pad(last, (0, padding))))


def smoothing_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    target_score_N: Tensor | None = None,
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
    with no_autocast(hidden_ND):
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


def smoothed_losses(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    transform: ScoreTransform = IDENTITY,
    shard: ClassShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses and the label-smoothing terms of each row, (N,) each, from the same scores.

    `smoothing_losses` needs less arithmetic. It cannot transform scores, whose mean is then not the score of the mean
    class vector, or divide the classes among processes.

    Args:
        hidden_ND: Hidden states.
        weight_VD: One vector per class.
        bias_V: One bias per class, or None.
        targets_N: Target ids, or `IGNORE`.
        transform: Applied to the scores.
        shard: Where the classes lie, if other processes have more classes.
    """
    request = SummaryRequest(total=True)
    results = _own_row_results(hidden_ND, weight_VD, bias_V, targets_N, request, transform, None, shard)
    assert results.total is not None
    num_classes = weight_VD.shape[0] if shard is None else shard.num_classes
    # nll = lse - z_y
    smoothing_N = results.lse - results.nll - results.total / num_classes
    return results.nll, smoothing_N.where(targets_N != IGNORE, 0.0)
