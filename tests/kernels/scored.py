"""Every quantity of a linear classifier in plain torch with all scores in memory: the reference for these tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.kernels.log_probs import LogProbs

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


def dense_log_probs(p: Problem, transform: Transform) -> LogProbs:
    """Return what `linear_log_probs` returns."""
    scores_NV = transformed_scores(p, transform)
    log_probs_NV = torch.log_softmax(scores_NV, -1)
    is_scored_N = p.y != IGNORE
    target_log_probs_N = log_probs_NV.gather(1, p.y.where(is_scored_N, 0)[:, None])[:, 0]
    entropy_N = -(log_probs_NV.exp() * log_probs_NV).sum(-1)
    return LogProbs(
        target_log_probs_N.where(is_scored_N, 0.0), entropy_N, torch.logsumexp(scores_NV, -1), scores_NV.argmax(-1)
    )


def objective(results: LogProbs, which: str) -> Tensor:
    """Return a weighted sum of some of the differentiable results."""
    factors_N = torch.linspace(-0.5, 1.5, len(results.lse), dtype=torch.float64)
    fields = {"log_probs": results.log_probs, "entropy": results.entropy, "lse": results.lse}
    chosen = fields.values() if which == "all" else [fields[which]]
    return torch.stack([(factors_N * value.to(torch.float64)).sum() * 1.3**n for n, value in enumerate(chosen)]).sum()
