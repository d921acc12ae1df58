"""The best classes of a linear classifier, without the N x V scores.

Shapes: N rows (tokens), D width, V classes, K best.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reefknot.kernels.blocks import Blocks, Costs, plan_blocks
from reefknot.kernels.choice import current
from reefknot.kernels.reference import linear_scores


def linear_topk(h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of each row's k best classes under softmax(h W^T + b), best first."""
    blocks = plan_blocks(len(h_ND), len(w_VD), Costs(score=12), current().budget(h_ND.device))
    found = [_best(h_ND[rows], w_VD, b_V, k, blocks) for rows in blocks.over_rows(len(h_ND))]
    if not found:
        return h_ND.new_zeros(0, k), torch.zeros(0, k, dtype=torch.long, device=h_ND.device)
    return torch.cat([best for best, _ in found]), torch.cat([ids for _, ids in found])


def _best(h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, k: int, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Of some rows, one block of classes after the other."""
    best_NK, ids_NK, normalisers = [], [], []
    for classes in blocks.over_classes(len(w_VD)):
        z_NV = linear_scores(h_ND, w_VD[classes], None if b_V is None else b_V[classes])
        normalisers.append(torch.logsumexp(z_NV, dim=-1))
        values, ids = z_NV.topk(min(k, z_NV.shape[1]))
        best_NK.append(values)
        ids_NK.append(ids + classes.start)
    values, places = torch.cat(best_NK, dim=-1).topk(k)
    lse_N = torch.logsumexp(torch.stack(normalisers), dim=0)
    return values - lse_N[:, None], torch.cat(ids_NK, dim=-1).gather(1, places)
