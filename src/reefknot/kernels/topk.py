"""The best classes of a linear classifier, or of a mixture of them, without the N x V scores.

Shapes: N rows (tokens), K experts of a mixture (1 without), D width, V classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.kernels.blocks import Blocks, Costs, plan_blocks
from reefknot.kernels.choice import current
from reefknot.kernels.linear_cross_entropy import row_losses
from reefknot.kernels.reference import linear_scores
from reefknot.kernels.scores import IGNORE


def linear_topk(
    h_RD: Tensor, w_VD: Tensor, b_V: Tensor | None, k: int, log_prior_NK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of each row's k best classes under softmax(h W^T + b), best first.

    With `log_prior_NK` those of a mixture: h has K consecutive rows for each. Its best classes need not be among the
    best of any expert, so all normalisers are found first, in a pass of their own.
    """
    experts = 1 if log_prior_NK is None else log_prior_NK.shape[1]
    nobody = torch.full((h_RD.shape[0],), IGNORE, device=h_RD.device)
    offset_R = -row_losses(h_RD, w_VD, b_V, nobody).lse
    if log_prior_NK is not None:
        offset_R = offset_R + log_prior_NK.flatten()
    blocks = plan_blocks(h_RD.shape[0], w_VD.shape[0], Costs(score=12), current().budget(h_RD.device), group=experts)
    found = [
        _best(h_RD[rows], w_VD, b_V, k, offset_R[rows], experts, blocks) for rows in blocks.over_rows(h_RD.shape[0])
    ]
    if not found:
        return offset_R.new_zeros(0, k), nobody.new_zeros(0, k)
    return torch.cat([best for best, _ in found]), torch.cat([ids for _, ids in found])


def _best(
    h_RD: Tensor, w_VD: Tensor, b_V: Tensor | None, k: int, offset_R: Tensor, experts: int, blocks: Blocks
) -> tuple[Tensor, Tensor]:
    """Of some rows, one block of classes after the other."""
    best_NK, ids_NK = [], []
    for classes in blocks.over_classes(w_VD.shape[0]):
        logp_RV = linear_scores(h_RD, w_VD[classes], None if b_V is None else b_V[classes]) + offset_R[:, None]
        logp_NV = logp_RV if experts == 1 else torch.logsumexp(logp_RV.view(-1, experts, logp_RV.shape[1]), dim=1)
        values, ids = logp_NV.topk(min(k, logp_NV.shape[1]))
        best_NK.append(values)
        ids_NK.append(ids + classes.start)
    values, places = torch.cat(best_NK, dim=-1).topk(k)
    return values, torch.cat(ids_NK, dim=-1).gather(1, places)
