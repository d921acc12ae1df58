"""Find the best classes of a linear classifier, or of a mixture of softmaxes, without storing the N x V scores.

`linear_topk` is the public function: a `topk` of log-probabilities, for beam search, sampling and nearest classes. Like
the losses, it computes the scores in blocks, and keeps the best classes of each block.

Shapes: N tokens, K experts of a mixture (1 without), R = N x K rows, D dimensions, V classes, k best classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.kernels.blocks import BlockCosts, BlockSize, choose_block_size
from reefknot.kernels.choice import current_choice
from reefknot.kernels.linear_cross_entropy import row_losses
from reefknot.kernels.reference import linear_scores
from reefknot.kernels.scores import IGNORE, accumulation_dtype

_BYTES_PER_SCORE = 12
"""As for the losses (`TorchBackend.bytes_per_score`): a score in float32 and two temporaries."""


def linear_topk(
    hidden_RD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, k: int, log_prior_NK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and ids of each token's k best classes, (N, k) each, best first.

    The best classes of a mixture need not be among the best classes of any expert, so a first pass computes all
    normalisers.

    Args:
        hidden_RD: Hidden states. For a mixture, K consecutive rows per token.
        weight_VD: One vector per class.
        bias_V: One bias per class, or None.
        k: Number of classes to return.
        log_prior_NK: For a mixture, the logarithms of the experts' weights; otherwise None.
    """
    num_rows, num_classes, device = hidden_RD.shape[0], weight_VD.shape[0], hidden_RD.device
    num_experts = 1
    offset_R = None
    if log_prior_NK is not None:
        num_experts = log_prior_NK.shape[1]
        no_targets = torch.full((num_rows,), IGNORE, device=device)
        # score + offset = log(prior of the expert x probability of the class)
        offset_R = log_prior_NK.flatten() - row_losses(hidden_RD, weight_VD, bias_V, no_targets).lse
    costs = BlockCosts(bytes_per_score=_BYTES_PER_SCORE)
    block_size = choose_block_size(num_rows, num_classes, costs, current_choice().budget(device), group=num_experts)
    values, ids = [], []
    for rows in block_size.row_slices(num_rows):
        offset_NK1 = None if offset_R is None else offset_R[rows].view(-1, num_experts, 1)
        block_values, block_ids = _topk_of_rows(hidden_RD[rows], weight_VD, bias_V, k, offset_NK1, block_size)
        values.append(block_values)
        ids.append(block_ids)
    if not values:
        no_values = hidden_RD.new_zeros(0, k, dtype=accumulation_dtype(hidden_RD.dtype))
        return no_values, torch.zeros(0, k, dtype=torch.long, device=device)
    return torch.cat(values), torch.cat(ids)


def _topk_of_rows(
    hidden_RD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    k: int,
    offset_NK1: Tensor | None,
    block_size: BlockSize,
) -> tuple[Tensor, Tensor]:
    """Return the best classes of some rows, searching one block of classes after the other.

    If `offset_NK1` is given, the experts of a mixture are combined first.
    """
    best_values, best_ids, normalisers = [], [], []
    for classes in block_size.class_slices(weight_VD.shape[0]):
        scores_NV = linear_scores(hidden_RD, weight_VD[classes], None if bias_V is None else bias_V[classes])
        if offset_NK1 is None:
            normalisers.append(torch.logsumexp(scores_NV, dim=-1))
        else:
            scores_NV = torch.logsumexp(scores_NV.view(*offset_NK1.shape[:2], -1) + offset_NK1, dim=1)
        values_Nk, ids_Nk = scores_NV.topk(min(k, scores_NV.shape[1]))
        best_values.append(values_Nk)
        best_ids.append(ids_Nk + classes.start)
    # The best of all classes are among the best of the blocks.
    values_Nk, index_Nk = torch.cat(best_values, dim=-1).topk(k)
    if normalisers:
        values_Nk = values_Nk - torch.logsumexp(torch.stack(normalisers), dim=0)[:, None]
    return values_Nk, torch.cat(best_ids, dim=-1).gather(1, index_Nk)
