"""Reference implementation of the losses, straight from their formulas, with all scores in memory.

The block-wise implementations are tested against `reference_results` and `reference_soft_targets`, which also run if
`impl = "reference"`. `linear_scores` computes the scores, and `compute_dtype` returns the precision of their matrix
product; both are used elsewhere too.

`weight` holds one vector per class. `nll` stands for negative log-likelihoods (the losses), and `lse` for log-sum-exps.
Shapes: N rows (tokens), D dimensions, V classes; U queries, C dimensions of the values.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.kernels.autograd import without_defaults
from reefknot.kernels.columns import ClassVectors
from reefknot.kernels.scores import (
    IGNORE,
    ScoreTransform,
    SummaryRequest,
    accumulation_dtype,
    at_least_float32,
    matmul_wide,
    safe_class_ids,
)


def linear_scores(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return the scores h W^T + b, (N, V), at least in float32.

    Under autocast, the operands are rounded to the type of autocast but the scores stay in float32, as in the
    block-wise functions, so that all functions give the same scores.
    """
    dtype = compute_dtype(hidden_ND, weight_VD)
    with no_autocast(hidden_ND):
        if accumulation_dtype(dtype) == dtype:
            return F.linear(hidden_ND.to(dtype), weight_VD.to(dtype), None if bias_V is None else bias_V.to(dtype))
        scores_NV = cast(Tensor, _WideMatmul.apply(hidden_ND, weight_VD, dtype))  # type: ignore[no-untyped-call]
        return scores_NV if bias_V is None else scores_NV + bias_V


def no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on the device of a tensor. The meta device has no autocast."""
    if tensor.is_meta or not torch.is_autocast_enabled(tensor.device.type):
        return nullcontext()  # entering autocast takes several microseconds
    return torch.autocast(tensor.device.type, enabled=False)


def compute_dtype(hidden_ND: Tensor, weight_VD: ClassVectors) -> torch.dtype:
    """Return the type of the matrix products: the type of autocast, or the wider of the two operands' types.

    Gradients of scores do not fit the range of float16, so float16 is multiplied in float32.
    """
    dtype = torch.promote_types(hidden_ND.dtype, weight_VD.dtype)
    can_autocast = dtype != torch.float64 and not hidden_ND.is_meta
    if can_autocast and torch.is_autocast_enabled(hidden_ND.device.type):
        dtype = torch.get_autocast_dtype(hidden_ND.device.type)
    return torch.float32 if dtype == torch.float16 else dtype


class _WideMatmul(torch.autograd.Function):
    """The product h W^T of half-precision matrices in float32, and its gradients in the types of h and W."""

    generate_vmap_rule = True

    @staticmethod
    @without_defaults
    def forward(hidden_ND: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        return matmul_wide(hidden_ND.to(dtype), weight_VD.to(dtype).T)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype], output: Tensor) -> None:
        hidden_ND, weight_VD, ctx.dtype = inputs
        ctx.save_for_backward(hidden_ND, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_ND, weight_VD = ctx.saved_tensors
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        grad_NV = grad_NV.to(ctx.dtype)
        grad_hidden_ND = _matmul(grad_NV, weight_VD.to(ctx.dtype), hidden_ND.dtype) if needs_hidden else None
        grad_weight_VD = _matmul(grad_NV.T, hidden_ND.to(ctx.dtype), weight_VD.dtype) if needs_weight else None
        return grad_hidden_ND, grad_weight_VD, None


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product a b in this type, rounded once."""
    if torch.is_grad_enabled():  # a second derivative, which torch's product of half precision in float32 does not have
        return torch.mm(at_least_float32(a), at_least_float32(b)).to(dtype)
    return torch.mm(a, b) if a.dtype == dtype else matmul_wide(a, b).to(dtype)


def reference_results(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    class_weight_V: Tensor | None,
    request: SummaryRequest,
    transform: ScoreTransform,
) -> tuple[Tensor | None, ...]:
    """Compute the fields of `RowResults` straight from their formulas, in their order."""
    scores_NV = linear_scores(hidden_ND, weight_VD, None if request.tau is not None else bias_V)
    lse_tau_N = entropy_N = total_N = best_class_N = None
    if request.tau is not None:
        centred_NV = scores_NV - scores_NV.mean(-1, keepdim=True)
        lse_tau_N = torch.logsumexp(centred_NV / request.tau, dim=-1)
        scores_NV = scores_NV if bias_V is None else scores_NV + bias_V
    transformed_NV = scores_NV if transform.is_identity else transform_scores(scores_NV, transform)

    lse_N = torch.logsumexp(transformed_NV, dim=-1)
    if request.expected:
        log_probs_NV = transformed_NV - lse_N[:, None]
        probs_NV = log_probs_NV.exp()
        entropy_N = -(probs_NV * log_probs_NV.where(probs_NV > 0, 0.0)).sum(-1)
    if request.total:
        weighted_NV = transformed_NV if class_weight_V is None else transformed_NV * class_weight_V
        total_N = weighted_NV.sum(-1)
    if request.best:
        best_class_N = transformed_NV.argmax(-1)
    return _cross_entropy(transformed_NV, targets_N), lse_N, lse_tau_N, entropy_N, total_N, best_class_N


def transform_scores(scores: Tensor, transform: ScoreTransform) -> Tensor:
    """Return softcap(scale * scores) / temperature."""
    scaled = scores * transform.scale
    if transform.softcap is not None:
        scaled = transform.softcap * torch.tanh(scaled / transform.softcap)
    return scaled / transform.temperature


def _cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return the losses of the rows: zero for ignored targets, NaN for targets that are out of range."""
    class_N = safe_class_ids(targets_N, logits_NV.shape[1])
    nll_N = F.cross_entropy(logits_NV, class_N, reduction="none")
    return nll_N.where(class_N == targets_N, torch.where(targets_N == IGNORE, 0.0, torch.nan))


def reference_soft_targets(queries_UD: Tensor, keys_VD: Tensor, values_VC: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """Compute `soft_targets` straight from its formulas.

    Return mean_u - mean, (U, C), and the negative entropies of the softmaxes, (U,). mean_u is the mean of the values
    under q_u = softmax(keys . query_u / tau), and mean is the mean of all values.
    """
    log_q_UV = torch.log_softmax(linear_scores(queries_UD, keys_VD, None) / tau, dim=-1)
    probs_UV = log_q_UV.exp()
    with no_autocast(queries_UD):
        mean_UC = (probs_UV - 1 / len(keys_VD)) @ at_least_float32(values_VC)
    return mean_UC, (probs_UV * log_q_UV).sum(-1)
