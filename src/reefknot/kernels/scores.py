"""Compute one block of a linear classifier's scores, h W^T + b, and what a loss needs from it, in plain torch.

`TorchBackend` is the class to start from. Its methods each compute one block of scores and reduce it to log-sum-exps,
losses or gradients; `_compute_scores` is where the scores themselves come from. `passes` loops over the blocks.
`TritonBackend` in `triton_scores` is a faster subclass for GPUs, and `get_backend` chooses between the two. The rest of
the file defines what the methods take and return, masks for targets, and matrix products that sum in float32.

`weight` holds one vector per class. `nll` stands for negative log-likelihoods (the losses), `lse` for log-sum-exps, and
`tau` for a temperature. The gradient of `x` is `grad_x`.
Shapes: N rows of the block, D dimensions, V classes of the block, C dimensions of the values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

IGNORE = -100
"""A target with this value has a loss of zero and no gradient."""


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32, because probabilities over many classes need more digits."""
    return x.to(accumulation_dtype(x.dtype))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums over many classes or rows are computed."""
    return dtype if dtype == torch.float64 else torch.float32


class LossAndGradient(NamedTuple):
    """Losses of a block that holds all classes, and their gradient: d nll / d scores = scale[:, None] * unscaled."""

    unscaled: Tensor
    """(N, V), in the type of the matrix products."""
    nll: Tensor
    """(N,)"""
    scale: Tensor
    """(N,)"""


class KeptBlock(NamedTuple):
    """A block of scores in memory that the caller provides (see `kept_scores`)."""

    scores: Tensor
    """What the backend keeps of each score, (N, V)."""
    reference: Tensor | None
    """The score of each row that `scores` are relative to, (N,). None if they are not relative."""


# MKL chooses its code for exp() at the first call. If two threads make the first call at the same time, they may get
# different code, whose results differ in the last digit. This happened in one run in twenty. So exp() is called once
# here.
torch.zeros(1).exp_()


@dataclass(frozen=True)
class ScoreTransform:
    """Maps the scores s = h W^T + b to z = softcap(scale * s) / temperature, with softcap(x) = cap * tanh(x / cap)."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @property
    def is_identity(self) -> bool:
        return self.softcap is None and self.scale == 1 and self.temperature == 1

    def apply_in_place(self, scores: Tensor) -> Tensor:
        """Transform scores in place, and return them."""
        if self.softcap is not None:
            scores.mul_(self.scale / self.softcap).tanh_()
            return scores.mul_(self.softcap / self.temperature)
        factor = self.scale / self.temperature
        return scores if factor == 1 else scores.mul_(factor)

    def multiply_by_slope_in_place(self, grad: Tensor, transformed: Tensor) -> Tensor:
        """Multiply `grad`, the gradient of the transformed scores z, by dz / ds, given z."""
        if self.softcap is not None:
            capped = transformed * (self.temperature / self.softcap)  # the tanh
            grad.mul_(capped.square_().neg_().add_(1))
        factor = self.scale / self.temperature
        return grad if factor == 1 else grad.mul_(factor)


IDENTITY = ScoreTransform()


@dataclass(frozen=True)
class SummaryRequest:
    """What `summarise` computes of each row's transformed scores z."""

    lse: bool = True
    """The log-sum-exp of z."""
    tau: float | None = None
    """The log-sum-exp of s' / tau, where s' are the scores without bias and without the transform."""
    expected: bool = False
    """The expected score, sum_v p_v z_v, from which the entropy follows."""
    total: bool = False
    """The sum of z over the classes, weighted by the classes' weights."""
    best: bool = False
    """The largest z and its class."""


class RowSummary(NamedTuple):
    """What `SummaryRequest` asks for, (N,) each. None if not requested."""

    lse: Tensor | None = None
    lse_tau: Tensor | None = None
    expected: Tensor | None = None
    total: Tensor | None = None
    best_score: Tensor | None = None
    best_class: Tensor | None = None


@dataclass(frozen=True)
class GradientTerms:
    """The terms of the gradient of a block's scores, one number per row.

    With the transformed scores z, p = exp(z - lse), and the scores s' without bias, the gradient of z is

        plain_weight p - target_weight [class is the target]
            - entropy_weight p (z - expected) + total_weight class_weight
            + tempered_weight (exp(s' / tau - lse_tau) - uniform)

    The second line holds the gradients of the entropy and of the (weighted) sum of the scores. The third is the
    gradient of the log-sum-exp of (s' - mean(s')) / tau. A tempered softmax is nearly uniform, and the gradient is its
    difference from uniform. With `uniform` subtracted, half precision keeps the digits of that difference.
    """

    lse: Tensor | None = None
    plain_weight: Tensor | None = None
    target_weight: Tensor | None = None
    entropy_weight: Tensor | None = None
    expected: Tensor | None = None
    total_weight: Tensor | None = None
    lse_tau: Tensor | None = None
    tempered_weight: Tensor | None = None
    tau: float = 1.0
    uniform: float = 0.0
    """1 / V, with V the number of all classes, or 0 without the last term."""
    transform: ScoreTransform = IDENTITY

    def select(self, rows: slice) -> GradientTerms:
        """Return the terms of some rows."""
        per_row: dict[str, Any] = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **per_row)


@dataclass(frozen=True)
class SoftTargetTerms:
    """The terms of `soft_target_gradients`, one number per row."""

    lse_tau: Tensor
    negentropy_gradient: Tensor
    expected_gradient: Tensor
    """The mean, under the softmax, of the gradients that arrive at the classes."""
    tau: float
    uniform: float
    """1 / V, with V the number of all classes."""

    def select(self, rows: slice) -> SoftTargetTerms:
        """Return the terms of some rows."""
        return replace(
            self,
            lse_tau=self.lse_tau[rows],
            negentropy_gradient=self.negentropy_gradient[rows],
            expected_gradient=self.expected_gradient[rows],
        )


class TorchBackend:
    """Computes blocks of scores h W^T + b in plain torch, on any device.

    Hidden states and class vectors have the type of the matrix products, and biases have the type of the sums. A target
    may lie outside the block; then no class of the block is the target. Every method computes its scores again, so that
    no block outlives the call.
    """

    size_multiple = 8
    """Block sizes are multiples of this number where possible (see `BlockCosts`)."""

    def min_rows(self, dtype: torch.dtype) -> int:
        """Return the least number of rows for which a block with all classes is worth it (see `BlockCosts`)."""
        return 64

    def needs_widening(self, hidden_ND: Tensor, dtype: torch.dtype) -> bool:
        """Return whether class vectors are copied to a wider type to compute scores."""
        return needs_widening(hidden_ND, dtype)

    def bytes_per_score(self, dtype: torch.dtype, gradients: bool) -> float:
        """Return the bytes per score of a block: here for the score, its softmax and a temporary."""
        return 3 * accumulation_dtype(dtype).itemsize

    def operations_per_byte(self, dtype: torch.dtype) -> float | None:
        """Return how many operations of a product take as long as moving a byte of memory (see `choose_kept_layout`).

        None: blocks with all classes are always faster, because a few rows stay in the cache.
        """
        return None

    def target_scores(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        centre_D: Tensor | None = None,
        transform: ScoreTransform = IDENTITY,
    ) -> Tensor:
        """Return the transformed score of each row's target, or of class 0 if the row has none.

        `weight` may have any type. If `centre` is given, it is subtracted from every class vector.
        """
        targets_N = safe_class_ids(targets_N, weight_VD.shape[0])
        target_ND = weight_VD[targets_N] if centre_D is None else weight_VD[targets_N] - centre_D
        scores_N = (at_least_float32(hidden_ND) * target_ND.to(hidden_ND.dtype)).sum(-1)
        if bias_V is not None:
            scores_N = scores_N + bias_V[targets_N].to(scores_N.dtype)
        return transform.apply_in_place(scores_N)

    def loss_and_gradient(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        transform: ScoreTransform = IDENTITY,
    ) -> LossAndGradient:
        """Return losses and gradients of rows, given all classes. A row without a target has scale 0."""
        transformed_NV = transform.apply_in_place(self._compute_scores(hidden_ND, weight_VD, bias_V))
        log_probs_NV = torch.log_softmax(transformed_NV, dim=-1)
        num_classes = weight_VD.shape[0]
        index_N1 = safe_class_ids(targets_N, num_classes)[:, None]
        nll_N = -log_probs_NV.gather(1, index_N1)[:, 0]
        # The gradient of the loss is p - 1 at the target and p elsewhere.
        grad_NV = log_probs_NV.exp_().scatter_add_(1, index_N1, nll_N.new_full((targets_N.shape[0], 1), -1.0))
        grad_NV = transform.multiply_by_slope_in_place(grad_NV, transformed_NV)
        scale_N = is_class(targets_N, num_classes).to(nll_N.dtype)
        return LossAndGradient(grad_NV.to(hidden_ND.dtype), mask_ignored(nll_N, targets_N, num_classes), scale_N)

    def kept_bytes(self, num_rows: int, num_classes: int, dtype: torch.dtype) -> int:
        """Return the bytes of memory that `keep_block` needs for a block."""
        return num_rows * num_classes * accumulation_dtype(dtype).itemsize

    def keep_block(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        target_score_N: Tensor,
        transform: ScoreTransform,
        memory: Tensor,
    ) -> tuple[KeptBlock, Tensor]:
        """Keep the scores of a block for `kept_gradient`. Return the block, and the log-sum-exps of its scores, (N,).

        Args:
            hidden_ND: Hidden states.
            weight_VD: Class vectors of the block.
            bias_V: Biases of the block, or None.
            targets_N: Targets, counted from the first class of the block.
            target_score_N: The transformed scores of the targets, whether they are in the block or not.
            transform: Applied to the scores.
            memory: Where the block is kept: `kept_bytes` bytes, uint8.
        """
        shape = hidden_ND.shape[0], weight_VD.shape[0]
        kept_NV = memory.view(accumulation_dtype(hidden_ND.dtype)).view(shape)
        kept_NV.copy_(transform.apply_in_place(self._compute_scores(hidden_ND, weight_VD, bias_V)))
        return KeptBlock(kept_NV, None), torch.logsumexp(kept_NV, dim=-1)

    def kept_gradient(
        self, block: KeptBlock, reference_N: Tensor, transform: ScoreTransform, dtype: torch.dtype, in_place: bool
    ) -> Tensor:
        """Return exp(z - reference) dz / ds for the transformed scores z of a kept block, (N, V).

        The entries of the targets may have any value.

        Args:
            block: What `keep_block` returned.
            reference_N: A number per row that is not smaller than `block.reference`.
            transform: The transform of the scores.
            dtype: The type of the result.
            in_place: Whether the result may be in the memory of the block.
        """
        exponentials_NV = torch.sub(block.scores, reference_N[:, None]).exp_()
        return transform.multiply_by_slope_in_place(exponentials_NV, block.scores).to(dtype)

    def summarise(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        request: SummaryRequest,
        transform: ScoreTransform = IDENTITY,
        class_weight_V: Tensor | None = None,
    ) -> RowSummary:
        """Return what `request` asks for, of each row's scores in this block. `best_class` counts from the block."""
        scores_NV = self._compute_scores(hidden_ND, weight_VD, None)
        lse_tau_N = None if request.tau is None else torch.logsumexp(scores_NV / request.tau, dim=-1)
        if bias_V is not None:
            scores_NV += bias_V
        transformed_NV = transform.apply_in_place(scores_NV)

        lse_N = expected_N = total_N = best_score_N = best_class_N = None
        if request.best:
            best_score_N, best_class_N = transformed_NV.max(dim=-1)
        if request.total:
            total_N = transformed_NV.sum(-1) if class_weight_V is None else transformed_NV @ class_weight_V
        if request.expected:
            lse_N, expected_N = _log_sum_exp_and_mean(transformed_NV, best_score_N)
        elif request.lse:
            lse_N = torch.logsumexp(transformed_NV, dim=-1)
        return RowSummary(lse_N, lse_tau_N, expected_N, total_N, best_score_N, best_class_N)

    def score_gradient(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        terms: GradientTerms,
        bias_gradient: bool,
        class_weight_V: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the block's scores, (N, V), and, if `bias_gradient`, of its biases, (V,)."""
        scores_NV = self._compute_scores(hidden_ND, weight_VD, None)
        tempered_NV = None
        if terms.tempered_weight is not None and terms.lse_tau is not None:
            tempered_NV = (scores_NV / terms.tau).sub_(terms.lse_tau[:, None]).exp_().sub_(terms.uniform)
            tempered_NV *= terms.tempered_weight[:, None]
        if terms.lse is None or terms.plain_weight is None or terms.target_weight is None:
            assert tempered_NV is not None
            return tempered_NV.to(hidden_ND.dtype), None
        if bias_V is not None:
            scores_NV += bias_V
        grad_NV = self._transformed_gradient(
            terms.transform.apply_in_place(scores_NV), targets_N, terms, class_weight_V
        )
        grad_bias_V = grad_NV.sum(0) if bias_gradient else None
        if tempered_NV is not None:
            grad_NV += tempered_NV
        return grad_NV.to(hidden_ND.dtype), grad_bias_V

    def _transformed_gradient(
        self, transformed_NV: Tensor, targets_N: Tensor, terms: GradientTerms, class_weight_V: Tensor | None
    ) -> Tensor:
        """Return the terms of the gradient without the tempered one, given the transformed scores (overwritten)."""
        assert terms.lse is not None
        assert terms.plain_weight is not None
        assert terms.target_weight is not None
        needs_scores = terms.entropy_weight is not None or not terms.transform.is_identity
        log_probs_NV = transformed_NV - terms.lse[:, None] if needs_scores else transformed_NV.sub_(terms.lse[:, None])
        probs_NV = log_probs_NV.exp_()

        if terms.entropy_weight is not None and terms.expected is not None:
            # Below the bound, and for ruled-out classes, the probability is zero.
            excess_NV = (transformed_NV - terms.expected[:, None]).clamp_(min=_MIN_EXCESS)
            plain_weight_N1, entropy_weight_N1 = terms.plain_weight[:, None], terms.entropy_weight[:, None]
            torch.addcmul(plain_weight_N1, excess_NV, entropy_weight_N1, value=-1, out=excess_NV)
            grad_NV = probs_NV.mul_(excess_NV)
        else:
            grad_NV = probs_NV.mul_(terms.plain_weight[:, None])
        num_classes = transformed_NV.shape[1]
        weight_N = terms.target_weight.where(is_class(targets_N, num_classes), 0.0).to(grad_NV.dtype)
        grad_NV.scatter_add_(1, safe_class_ids(targets_N, num_classes)[:, None], -weight_N[:, None])
        if terms.total_weight is not None:
            total_weight_N1 = terms.total_weight[:, None].to(grad_NV.dtype)
            grad_NV += total_weight_N1 if class_weight_V is None else total_weight_N1 * class_weight_V
        return terms.transform.multiply_by_slope_in_place(grad_NV, transformed_NV)

    def soft_target_gradients(
        self, queries_ND: Tensor, grad_mean_NC: Tensor, keys_VD: Tensor, values_VC: Tensor, terms: SoftTargetTerms
    ) -> Tensor:
        """Return two matrices as one, (2N, V): q - uniform, and below it the gradient of the scores.

        q is the tempered softmax of the scores queries keys^T. The gradient of the scores has two sources: the mean of
        the values under q, whose gradient is `grad_mean`, and the negative entropy of q. See `soft_target`.
        """
        log_probs_NV = self._compute_scores(queries_ND, keys_VD, None).div_(terms.tau).sub_(terms.lse_tau[:, None])
        grad_scores_NV = matmul_wide(grad_mean_NC, values_VC.T)
        grad_scores_NV.addcmul_(log_probs_NV, terms.negentropy_gradient[:, None]).sub_(terms.expected_gradient[:, None])
        probs_NV = log_probs_NV.exp_()
        grad_scores_NV.mul_(probs_NV).div_(terms.tau)
        dtype = queries_ND.dtype
        return torch.cat([probs_NV.sub_(terms.uniform).to(dtype), grad_scores_NV.to(dtype)])

    def scale_in_place(self, x: Tensor, factor: Tensor) -> None:
        """Multiply x by a factor in place. The factor is not rounded to the type of x."""
        if x.is_cuda:
            # Reading the factor on the host would wait for the device. Parts keep the float32 copies small.
            for part in torch.split(x, 2**12):
                torch.mul(at_least_float32(part), factor, out=part)
            return
        value = factor.item()
        if value != 1:
            x.mul_(value)

    def _compute_scores(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        """Return the scores as a new tensor, at least in float32.

        The bias is added in that type. If it were rounded to half precision with the product, scores would depend on
        which function computes them.
        """
        if bias_V is not None and bias_V.dtype == hidden_ND.dtype:
            return torch.addmm(bias_V, hidden_ND, weight_VD.T)
        scores_NV = matmul_wide(hidden_ND, weight_VD.T)
        return scores_NV if bias_V is None else scores_NV.add_(bias_V)


_MIN_EXCESS = -1e5
"""Smaller differences of a score from the expected score do not count, because exp() of them is zero in any type."""


def _log_sum_exp_and_mean(scores_NV: Tensor, max_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row's scores, and their mean under the softmax. Overwrites the scores.

    Args:
        scores_NV: The scores, which are minus infinity for ruled-out classes.
        max_N: The largest score of each row, or None.
    """
    if max_N is None:
        max_N = scores_NV.amax(-1)
    max_N = max_N.where(max_N.isfinite(), 0.0)
    exponentials_NV = (scores_NV - max_N[:, None]).exp_()
    sum_N = exponentials_NV.sum(-1)
    scores_NV.clamp_(min=torch.finfo(scores_NV.dtype).min)  # the product with a probability of zero is not NaN
    return sum_N.log() + max_N, exponentials_NV.mul_(scores_NV).sum(-1) / sum_N


def multiply_where_positive(probs: Tensor, factor: Tensor) -> Tensor:
    """Return probs * factor, and zero where a probability is zero, whose factor may be infinite. Overwrites both."""
    return probs.mul_(factor.masked_fill_(probs == 0, 0.0))


def is_class(targets_N: Tensor, num_classes: int) -> Tensor:
    """Return a mask of the targets that are classes: neither ignored nor out of range."""
    return (targets_N >= 0) & (targets_N < num_classes)


def safe_class_ids(targets_N: Tensor, num_classes: int) -> Tensor:
    """Return the targets, with any class in place of a target that is not a class, to be used as indices."""
    return targets_N.clamp(0, num_classes - 1)


def mask_ignored(nll_N: Tensor, targets_N: Tensor, num_classes: int) -> Tensor:
    """Return the losses with zero for ignored targets, and NaN for targets that are out of range."""
    return nll_N.where(is_class(targets_N, num_classes), torch.where(targets_N == IGNORE, 0.0, torch.nan))


# -- products ------------------------------------------------------------------------------------------------------


def needs_widening(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether matrices of this type on the device of `x` are copied to a wider type to compute scores.

    On a GPU, newer versions of torch can write the product of two half-precision matrices in float32.
    """
    return accumulation_dtype(dtype) != dtype and not (x.is_cuda and _HAS_WIDE_MATMUL)


_HAS_WIDE_MATMUL = hasattr(torch.ops.aten.mm, "dtype_out")


def matmul_wide(a: Tensor, b: Tensor) -> Tensor:
    """Return the product a b, at least in float32. Scores in half precision would have errors of several percent."""
    if accumulation_dtype(a.dtype) == a.dtype:
        return torch.mm(a, b)
    if needs_widening(a, a.dtype):
        return torch.mm(at_least_float32(a), at_least_float32(b))
    return torch.mm(a, b, out_dtype=torch.float32)


def matmul_into(out_NV: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute out = a b, in the type of `out`. The stride between rows of `out` may be larger than their length."""
    aligned = _count_aligned_classes(out_NV)
    if aligned == out_NV.shape[1]:
        add_matmul(out_NV, a, b, overwrite=True)
        return
    add_matmul(out_NV[:, :aligned], a, b[:, :aligned], overwrite=True)
    add_matmul(out_NV[:, aligned:], a, b[:, aligned:], overwrite=True)


def padded_classes(num_classes: int) -> int:
    """Return the number of entries in a row of a stored block. It aligns the rows for a GPU's matrix units."""
    return -(-num_classes // 64) * 64


def add_matmul(out: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    """Compute out = a b if `overwrite`, else out += a b, summed in the type of `out`.

    If half-precision matrices cannot be multiplied into a wider type, each product is rounded once.
    """
    beta = 0 if overwrite else 1
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif out.dtype == accumulation_dtype(a.dtype) != a.dtype and not needs_widening(a, a.dtype):
        torch.addmm(out, a, b, beta=beta, out_dtype=torch.float32, out=out)
    elif overwrite:
        out.copy_(torch.mm(a, b))
    else:
        out.add_(torch.mm(a, b))


def add_row_gradient(out_ND: Tensor, grad_NV: Tensor, weight_VD: Tensor, overwrite: bool) -> None:
    """Compute out = g W if `overwrite`, else out += g W: the gradient of the rows."""
    aligned = _count_aligned_classes(grad_NV)
    if aligned == weight_VD.shape[0]:
        add_matmul(out_ND, grad_NV, weight_VD, overwrite)
        return
    add_matmul(out_ND, grad_NV[:, :aligned], weight_VD[:aligned], overwrite)
    add_matmul(out_ND, grad_NV[:, aligned:], weight_VD[aligned:], overwrite=False)


def add_class_gradient(out_VD: Tensor, grad_NV: Tensor, hidden_ND: Tensor, overwrite: bool) -> None:
    """Compute out = g^T h if `overwrite`, else out += g^T h: the gradient of the classes."""
    aligned = _count_aligned_classes(grad_NV)
    if aligned == out_VD.shape[0]:
        add_matmul(out_VD, grad_NV.T, hidden_ND, overwrite)
        return
    add_matmul(out_VD[:aligned], grad_NV[:, :aligned].T, hidden_ND, overwrite)
    add_matmul(out_VD[aligned:], grad_NV[:, aligned:].T, hidden_ND, overwrite)


def _count_aligned_classes(grad_NV: Tensor) -> int:
    """Return the number of classes that a GPU's matrix units process at full speed.

    If their rows are not a multiple of 16 bytes, the whole product is slow, so the last few classes get a product of
    their own.
    """
    num_classes, size = grad_NV.shape[1], grad_NV.element_size()
    multiple = 16 // size  # classes per 16 bytes
    # If float32 rows are not aligned, the whole product is slow anyway.
    if not grad_NV.is_cuda or size > 4 or num_classes < multiple or (size == 4 and grad_NV.stride(0) % multiple):
        return num_classes
    return num_classes // multiple * multiple


def get_backend(impl: str) -> TorchBackend:
    """Return the object that computes blocks of scores for an implementation: `chunked` or `triton`."""
    if impl == "triton":
        from reefknot.kernels.triton_scores import TritonBackend

        return TritonBackend()
    return TorchBackend()
