"""Find the best classes of a linear classifier, or of a mixture of softmaxes, without storing the N x V scores.

    log_probs, ids = rk.linear_topk(hidden, head.weight, k=10)     # (B, T, D), (V, D) -> (B, T, 10) each

`linear_topk` is the public function: a `topk` of log-probabilities, for beam search, sampling and nearest classes. Like
the losses, it computes the scores in blocks, and keeps the best classes of each block.

Shapes: N tokens, K experts of a mixture (1 without), R = N x K rows, D dimensions, V classes, k best classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.arguments import (
    check_classifier,
    check_devices,
    check_float_tensor,
    check_integer,
    choose,
    score_transform,
)
from reefknot.kernels.blocks import BlockCosts, BlockSize, choose_block_size
from reefknot.kernels.choice import Choice, Impl
from reefknot.kernels.losses import row_results
from reefknot.kernels.reference import compute_dtype, linear_scores, transform_scores
from reefknot.kernels.scores import IGNORE, ScoreTransform, SummaryRequest, accumulation_dtype

_FUNCTION = "linear_topk"


class TopK(NamedTuple):
    """The best classes of each row, best first, (..., k) each."""

    log_probs: Tensor
    """Log-probabilities, at least in float32."""
    ids: Tensor
    """Class ids."""


def linear_topk(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    log_prior: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    impl: Impl | None = None,
    memory: float | None = None,
) -> TopK:
    """Return the log-probabilities and ids of the k best classes of each row, best first.

        log_probs, ids = rk.linear_topk(hidden[:, -1], head.weight, k=10)     # the ten best next words

    The softmax is over the scores z = softcap(logit_scale (h . w + b)) / temperature of all classes. The
    log-probabilities have gradients. If a gradient is needed, all scores are kept for the backward pass.

    Args:
        input: Hidden states h, with shape (..., D). For a mixture, (N * K, D), with K consecutive rows per token.
        linear_weight: One vector w per class, with shape (V, D).
        k: Number of classes to return, at most V.
        linear_bias: One number b per class, with shape (V,), or None.
        log_prior: For a mixture of K softmaxes, the logarithms of their weights, (N, K); otherwise None.
        temperature: The scores are divided by this number last.
        softcap: If given, the scaled scores x become softcap * tanh(x / softcap).
        logit_scale: The scores are multiplied by this number first.
        impl: The implementation, as in `linear_cross_entropy`.
        memory: Working memory in MiB, as in `linear_cross_entropy`.
    """
    check_classifier(_FUNCTION, input, linear_weight, linear_bias)
    if log_prior is not None:
        check_float_tensor(_FUNCTION, "log_prior", log_prior)
    check_devices(_FUNCTION, input, linear_weight, linear_bias, log_prior)
    transform = score_transform(_FUNCTION, logit_scale, softcap, temperature)
    check_integer(_FUNCTION, "k", k)
    if not 0 < k <= linear_weight.shape[0]:
        raise ArgumentError(
            f"{_FUNCTION}: k = {k!r}: must be from 1 to {linear_weight.shape[0]}, the number of classes"
        )
    hidden_RD = input.reshape(-1, input.shape[-1])
    if log_prior is not None and (log_prior.dim() != 2 or log_prior.numel() != len(hidden_RD)):
        raise ArgumentError(
            f"{_FUNCTION}: log_prior is {tuple(log_prior.shape)} and input has {len(hidden_RD)} rows; they must be "
            "(N, K) and (N * K, dim)"
        )
    choice = choose(impl, memory)
    best = _topk(hidden_RD, linear_weight, linear_bias, k, log_prior, transform, choice)
    if log_prior is not None:
        return best
    return TopK(*(tensor_Nk.view(*input.shape[:-1], k) for tensor_Nk in best))


def _topk(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    k: int,
    log_prior_NK: Tensor | None,
    transform: ScoreTransform,
    choice: Choice,
) -> TopK:
    """Return the best classes of each token, (N, k), searching one block of rows after the other.

    The best classes of a mixture need not be among the best classes of any expert, so a first pass computes all
    normalisers.
    """
    num_rows, num_classes, device = hidden_RD.shape[0], weight_VD.shape[0], hidden_RD.device
    num_experts = 1
    offset_R = None
    if log_prior_NK is not None:
        num_experts = log_prior_NK.shape[1]
        no_targets = torch.full((num_rows,), IGNORE, device=device)
        lse_R = row_results(hidden_RD, weight_VD, bias_V, no_targets, SummaryRequest(), transform, choice=choice).lse
        # score + offset = log(prior of the expert x probability of the class)
        offset_R = log_prior_NK.flatten() - lse_R
    # As for the losses (`TorchBackend.bytes_per_score`): a score and two temporaries.
    bytes_per_score = 3 * accumulation_dtype(compute_dtype(hidden_RD, weight_VD)).itemsize
    costs = BlockCosts(bytes_per_score=bytes_per_score)
    block_size = choose_block_size(num_rows, num_classes, costs, choice.budget(device), group=num_experts)
    values, ids = [], []
    # Without rows, an empty block gives empty results that are part of the graph.
    for rows in list(block_size.row_slices(num_rows)) or [slice(0, 0)]:
        offset_NK1 = None if offset_R is None else offset_R[rows].view(-1, num_experts, 1)
        block = _topk_of_rows(hidden_RD[rows], weight_VD, bias_V, k, offset_NK1, transform, block_size)
        values.append(block.log_probs)
        ids.append(block.ids)
    return TopK(torch.cat(values), torch.cat(ids))


def _topk_of_rows(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    k: int,
    offset_NK1: Tensor | None,
    transform: ScoreTransform,
    block_size: BlockSize,
) -> TopK:
    """Return the best classes of some rows, searching one block of classes after the other.

    If `offset_NK1` is given, the experts of a mixture are combined first.
    """
    best_values, best_ids, normalisers = [], [], []
    for classes in block_size.class_slices(weight_VD.shape[0]):
        scores_NV = linear_scores(hidden_RD, weight_VD[classes], None if bias_V is None else bias_V[classes])
        if not transform.is_identity:
            scores_NV = transform_scores(scores_NV, transform)
        if offset_NK1 is None:
            normalisers.append(_log_sum_exp(scores_NV, dim=-1))
        else:
            scores_NKV = scores_NV.view(*offset_NK1.shape[:2], scores_NV.shape[1])
            scores_NV = _log_sum_exp(scores_NKV + offset_NK1, dim=1)
        values_Nk, ids_Nk = scores_NV.topk(min(k, scores_NV.shape[1]))
        best_values.append(values_Nk)
        best_ids.append(ids_Nk + classes.start)
    # The best of all classes are among the best of the blocks.
    values_Nk, index_Nk = torch.cat(best_values, dim=-1).topk(k)
    if normalisers:
        values_Nk = values_Nk - torch.logsumexp(torch.stack(normalisers), dim=0)[:, None]
    return TopK(values_Nk, torch.cat(best_ids, dim=-1).gather(1, index_Nk))


def _log_sum_exp(scores: Tensor, dim: int) -> Tensor:
    """Return the log-sum-exps of scores.

    The gradient of `torch.logsumexp` is NaN if all scores are minus infinity. Here it is zero.
    """
    least = torch.finfo(scores.dtype).min
    result = torch.logsumexp(scores.clamp(min=least), dim)
    return result.masked_fill(result == least, -torch.inf)
