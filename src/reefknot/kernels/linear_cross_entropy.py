"""Cross-entropy of a linear classifier, per row: the one primitive under every output end.

Shapes: N rows (tokens), D width, V classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
"""A target with this value is scored as zero and sends no gradient."""


def at_least_float32(x: Tensor) -> Tensor:
    """Probabilities over many classes need more digits than half precision has."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear_scores(h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None) -> Tensor:
    """h W^T + b, at least in float32. The bias is added there: rounded with the product in half precision, scores would
    depend on which function made them."""
    scores_NV = at_least_float32(F.linear(h_ND, w_VD))
    return scores_NV if b_V is None else scores_NV + b_V


def linear_cross_entropy(
    h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, y_N: Tensor, tau: float | None = None
) -> tuple[Tensor, Tensor | None]:
    """Negative log-likelihood of each row's target under softmax(h W^T + b).

    Arguments:
        h_ND: contexts.
        w_VD: one vector per class.
        b_V: bias per class, or None.
        y_N: target ids; `IGNORE` rows cost nothing.
        tau: where given, also return the log-sum-exp of (h W^T) / tau, without the bias.

    Returns:
        `nll_N` and `lse_tau_N` (None without tau), at least in float32. Both are per row, so that callers weigh
        rows as they like: the gradient of a weighted sum is the weighted gradient.
    """
    logits_NV = linear_scores(h_ND, w_VD, None)
    lse_tau_N = None if tau is None else torch.logsumexp(logits_NV / tau, dim=-1)
    if b_V is not None:
        logits_NV = logits_NV + b_V
    nll_N = F.cross_entropy(logits_NV, y_N, reduction="none", ignore_index=IGNORE)
    return nll_N, lse_tau_N
