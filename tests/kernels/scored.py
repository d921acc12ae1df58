"""Every quantity of a linear classifier in plain torch with all scores in memory: the reference for these tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dense import IGNORE, Problem


@dataclass(frozen=True)
class Transform:
    """Arguments that transform scores."""

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def arguments(self) -> dict[str, Any]:
        return {"logit_scale": self.logit_scale, "softcap": self.softcap, "temperature": self.temperature}


TRANSFORMS = {
    "plain": Transform(),
    "scaled": Transform(logit_scale=0.25),
    "negative scale": Transform(logit_scale=-1.5, temperature=0.5),
    "capped": Transform(softcap=2.0),
    "all": Transform(logit_scale=3.0, softcap=5.0, temperature=1.7),
}


def transformed_scores(p: Problem, transform: Transform) -> Tensor:
    """Return softcap(logit_scale (h W^T + b)) / temperature."""
    scores_NV = transform.logit_scale * F.linear(p.h, p.w, p.b)
    if transform.softcap is not None:
        scores_NV = transform.softcap * torch.tanh(scores_NV / transform.softcap)
    return scores_NV / transform.temperature


def dense_cross_entropy(
    p: Problem,
    transform: Transform,
    *,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Return the loss by torch's cross_entropy, with the z-loss added."""
    scores_NV = transformed_scores(p, transform)
    loss_N = F.cross_entropy(scores_NV, p.y, weight=weight, reduction="none", label_smoothing=label_smoothing)
    is_scored_N = p.y != IGNORE
    loss_N = loss_N + z_loss * torch.logsumexp(scores_NV, -1).square().where(is_scored_N, 0.0)
    if reduction == "none":
        return loss_N
    if reduction == "sum":
        return loss_N.sum()
    divisor = is_scored_N.sum() if weight is None else weight[p.y[is_scored_N]].sum()
    return loss_N.sum() / divisor
