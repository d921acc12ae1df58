"""The best classes of a linear classifier, or of a mixture of softmaxes, without storing the N x V scores.

Shapes: N rows (tokens), K experts of a mixture (1 without), R = N x K, D dimensions, V classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.kernels.blocks import Blocks, Costs, plan_blocks
from reefknot.kernels.choice import current
from reefknot.kernels.linear_cross_entropy import row_losses
from reefknot.kernels.reference import linear_scores
from reefknot.kernels.scores import IGNORE, accumulation_dtype


def linear_topk(
    h_RD: Tensor, w_VD: Tensor, b_V: Tensor | None, k: int, log_prior_NK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities and ids of each token's k best classes, (N, k) each, best first.

    The best classes of a mixture need not be among the best classes of any expert, so a first pass computes all
    normalisers.

    Args:
        h_RD: Hidden states. For a mixture, K consecutive rows per token.
        w_VD: One vector per class.
        b_V: One bias per class, or None.
        k: Number of classes to return.
        log_prior_NK: For a mixture, the logarithms of the experts' weights; otherwise None.
    """
    experts = 1 if log_prior_NK is None else log_prior_NK.shape[1]
    offset_R = None
    if log_prior_NK is not None:
        no_targets = torch.full((h_RD.shape[0],), IGNORE, device=h_RD.device)
        offset_R = log_prior_NK.flatten() - row_losses(h_RD, w_VD, b_V, no_targets).lse
    blocks = plan_blocks(h_RD.shape[0], w_VD.shape[0], Costs(score=12), current().budget(h_RD.device), group=experts)
    parts = [
        _best(h_RD[rows], w_VD, b_V, k, None if offset_R is None else offset_R[rows].view(-1, experts, 1), blocks)
        for rows in blocks.over_rows(h_RD.shape[0])
    ]
    if not parts:
        return h_RD.new_zeros(0, k, dtype=accumulation_dtype(h_RD.dtype)), torch.zeros(
            0, k, dtype=torch.long, device=h_RD.device
        )
    return torch.cat([best for best, _ in parts]), torch.cat([ids for _, ids in parts])


def _best(
    h_RD: Tensor, w_VD: Tensor, b_V: Tensor | None, k: int, offset_NK1: Tensor | None, blocks: Blocks
) -> tuple[Tensor, Tensor]:
    """Return the best classes of some rows, searching one block of classes after the other.

    If `offset_NK1` is given, the experts of a mixture are combined first.
    """
    best_NK, ids_NK, normalisers = [], [], []
    for classes in blocks.over_classes(w_VD.shape[0]):
        z_NV = linear_scores(h_RD, w_VD[classes], None if b_V is None else b_V[classes])
        if offset_NK1 is None:
            normalisers.append(torch.logsumexp(z_NV, dim=-1))
        else:
            z_NV = torch.logsumexp(z_NV.view(*offset_NK1.shape[:2], -1) + offset_NK1, dim=1)
        values, ids = z_NV.topk(min(k, z_NV.shape[1]))
        best_NK.append(values)
        ids_NK.append(ids + classes.start)
    values, indices = torch.cat(best_NK, dim=-1).topk(k)
    if normalisers:
        values = values - torch.logsumexp(torch.stack(normalisers), dim=0)[:, None]
    return values, torch.cat(ids_NK, dim=-1).gather(1, indices)
