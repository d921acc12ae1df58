"""Every end as people write it in plain torch, which is a competitor and, in float64, what all are judged by.

The plain head stores its logits, the augmented loss two distributions over V for every row, the mixture one for every
row and expert; the adaptive softmax finds the rows of its clusters by masks on the device. Each loss is a sum over
rows, so that the reference can be made a few rows at a time.

Shapes: N rows (tokens), D width, V classes, K experts, R rows of a tail, S classes of a tail.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.lab.bench.problems import ALPHA, DEPTH, EXPERTS, TAU, Problem, Weights

Loss = Callable[[Tensor, Tensor, Weights], Tensor]
"""(h_ND, y_N, weights) -> the loss summed over the rows."""
_AT_ONCE = {"cuda": 2**27, "cpu": 2**24}
"""Scores of the reference that are held at once, in float64: 1 GiB, 128 MiB."""


def plain(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    return F.cross_entropy(F.linear(h_ND, weights["table"]), y_N, reduction="sum")


def adaptive(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    tails = sum(name.startswith("band") for name in weights)
    stop = len(weights["head"]) - tails
    head_N, loss = y_N.clone(), h_ND.new_zeros(())
    for tail in range(1, tails + 1):
        start, stop = stop, stop + len(weights[f"band{tail}"])
        inside_N = (y_N >= start) & (y_N < stop)
        head_N[inside_N] = len(weights["head"]) - tails + tail - 1
        rows_R = inside_N.nonzero().squeeze(-1)
        scores_RS = F.linear(F.linear(h_ND[rows_R], weights[f"down{tail}"]), weights[f"band{tail}"])
        loss = loss + F.cross_entropy(scores_RS, y_N[rows_R] - start, reduction="sum")
    return loss + F.cross_entropy(F.linear(h_ND, weights["head"]), head_N, reduction="sum")


def augmented(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    return _augmented(h_ND, y_N, weights["table"], weights["table"])


def augmented_detached(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    return _augmented(h_ND, y_N, weights["table"], weights["table"].detach())


def _augmented(h_ND: Tensor, y_N: Tensor, table_VD: Tensor, soft_VD: Tensor) -> Tensor:
    scores_NV = _wide(F.linear(h_ND, table_VD))
    soft_NV = torch.softmax(_wide(F.linear(soft_VD[y_N], soft_VD)) / TAU, dim=-1)
    kl = F.kl_div(torch.log_softmax(scores_NV / TAU, dim=-1), soft_NV, reduction="sum")
    return F.cross_entropy(scores_NV, y_N, reduction="sum") + ALPHA * kl


def mixture(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    latent_NKD, log_prior_NK = experts(h_ND, weights)
    p_NKV = torch.softmax(_wide(F.linear(latent_NKD, weights["table"])), dim=-1)
    p_NV = (log_prior_NK.exp()[..., None] * p_NKV).sum(1)
    return F.nll_loss(p_NV.log(), y_N, reduction="sum")


def drill(h_ND: Tensor, y_N: Tensor, weights: Weights) -> Tensor:
    return F.cross_entropy(F.linear(h_ND, label_encoder(weights)), y_N, reduction="sum")


def experts(h_ND: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
    """What the experts of a mixture read, and the logarithm of what each weighs."""
    latent_NKD = torch.tanh(F.linear(h_ND, weights["latent"], weights["latent_bias"])).view(len(h_ND), EXPERTS, -1)
    return latent_NKD, torch.log_softmax(_wide(F.linear(h_ND, weights["prior"])), dim=-1)


def label_encoder(weights: Weights) -> Tensor:
    """DRILL's class vectors."""
    e_VD = table_VD = weights["table"]
    for layer in range(1, DEPTH + 1):
        e_VD = torch.sigmoid(F.linear(e_VD, weights[f"layer{layer}"], weights[f"layer{layer}_bias"])) + table_VD
    return e_VD


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


LOSSES: dict[str, Loss] = {
    "plain": plain,
    "adaptive": adaptive,
    "augmented": augmented,
    "augmented-detached": augmented_detached,
    "mixture": mixture,
    "drill": drill,
}


def reference(problem: Problem) -> dict[str, Tensor]:
    """Every gradient of the mean loss in float64, a few rows at a time so that it fits beside any vocabulary."""
    weights = {name: weight.double().requires_grad_() for name, weight in problem.weights.items()}
    hidden_ND = problem.hidden.double().requires_grad_()
    y_N = problem.targets.to(hidden_ND.device)
    per_row = problem.shape.words * (EXPERTS if problem.end == "mixture" else 1)
    loss = LOSSES[problem.end]
    at_once = max(1, _AT_ONCE[y_N.device.type] // per_row)
    for rows_ND, rows_N in zip(torch.split(hidden_ND, at_once), torch.split(y_N, at_once), strict=True):
        torch.autograd.backward(loss(rows_ND, rows_N, weights) / problem.shape.rows)
    return {name: _gradient(leaf) for name, leaf in {"hidden": hidden_ND, **weights}.items()}


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
