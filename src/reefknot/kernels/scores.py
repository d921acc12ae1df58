"""The computations on one block of scores, in plain torch on any device. `triton_scores` has faster ones for GPUs.

Shapes: N rows of the block, D dimensions, V classes of the block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100
"""A target with this value has a loss of zero and no gradient."""


def at_least_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32, because probabilities over many classes need more digits."""
    return x.to(accumulation_dtype(x.dtype))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums over many classes or rows are computed."""
    return torch.promote_types(dtype, torch.float32)


class Exponentials(NamedTuple):
    """The softmax gradient of a block that holds all classes: d nll / d scores = scale[:, None] * values."""

    values: Tensor
    nll: Tensor
    scale: Tensor


# MKL chooses its code for exp() at the first call. If two threads make the first call at the same time, they may get
# different code, whose results differ in the last digit. This happened in one run of twenty. So call it here, once.
torch.zeros(1).exp_()


@dataclass(frozen=True)
class RowTerms:
    """The terms of the gradient of a block's scores, one number per row.

    With the scores z, and z' without the bias, the gradient is

        plain exp(z - lse) - target [class is the target] + tempered (exp(z' / tau - lse_tau) - uniform)

    The last term is the gradient of a log-sum-exp of scores less their mean. A tempered softmax is nearly uniform, and
    the gradient is its difference from uniform. With `uniform` subtracted, half precision keeps the digits of that
    difference.
    """

    lse: Tensor | None = None
    plain: Tensor | None = None
    target: Tensor | None = None
    lse_tau: Tensor | None = None
    tempered: Tensor | None = None
    tau: float = 1.0
    uniform: float = 0.0

    def select(self, rows: slice) -> RowTerms:
        """Return the terms of some rows."""
        names = ("lse", "plain", "target", "lse_tau", "tempered")
        terms: dict[str, Tensor | None] = {name: getattr(self, name) for name in names}
        selected = {name: None if term is None else term[rows] for name, term in terms.items()}
        return replace(self, **selected)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SoftTerms:
    """The terms of `soft_gradients`, one number per row."""

    lse_tau: Tensor
    negentropy: Tensor
    """The gradient of the negative entropy."""
    mean: Tensor
    """The mean, under the softmax, of the gradients that arrive at the classes."""
    tau: float
    uniform: float

    def select(self, rows: slice) -> SoftTerms:
        """Return the terms of some rows."""
        return SoftTerms(self.lse_tau[rows], self.negentropy[rows], self.mean[rows], self.tau, self.uniform)


class Scores:
    """Blocks of scores h W^T + b, in plain torch.

    `h` and `w` have the type of the matrix products, and `b` has the type of the sums. A target may lie outside the
    block; then no class of the block is the target.
    """

    multiple = 8
    """See `Costs`."""

    def fewest_rows(self, dtype: torch.dtype) -> int:
        """See `Costs`."""
        return 64

    def widens(self, h_ND: Tensor, dtype: torch.dtype) -> bool:
        """Return whether `widened` copies class vectors to a wider type to compute scores."""
        return widened(h_ND, dtype)

    def bytes_per_score(self, dtype: torch.dtype, gradients: bool) -> float:
        """Return the bytes per score of a block: here for the score, its softmax and a temporary."""
        return 3 * accumulation_dtype(dtype).itemsize

    def target_scores(
        self, h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, y_N: Tensor, centre_D: Tensor | None = None
    ) -> Tensor:
        """Return the score of each row's target, or of class 0 if the row has none.

        `w` may have any type. If `centre` is given, it is subtracted from every class vector.
        """
        y_N = classes_in_range(y_N, w_VD.shape[0])
        target_ND = w_VD[y_N] if centre_D is None else w_VD[y_N] - centre_D
        z_N = (at_least_float32(h_ND) * target_ND.to(h_ND.dtype)).sum(-1)
        return z_N if b_V is None else z_N + b_V[y_N].to(z_N.dtype)

    def exponentials(self, h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, y_N: Tensor) -> Exponentials:
        """Return losses and gradients of rows in one pass over all classes. A row without a target has scale 0."""
        logp_NV = torch.log_softmax(self._scores(h_ND, w_VD, b_V), dim=-1)
        classes = w_VD.shape[0]
        index_N1 = classes_in_range(y_N, classes)[:, None]
        nll_N = -logp_NV.gather(1, index_N1)[:, 0]
        p_NV = logp_NV.exp_().scatter_add_(1, index_N1, nll_N.new_full((y_N.shape[0], 1), -1.0))
        scale_N = is_class(y_N, classes).to(nll_N.dtype)
        return Exponentials(p_NV.to(h_ND.dtype), mask_ignored(nll_N, y_N, classes), scale_N)

    def normalisers(
        self, h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, tau: float | None, plain: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return log-sum-exps of the block, (N,): with the bias if `plain`, and without it at `tau` if given."""
        z_NV = self._scores(h_ND, w_VD, None)
        lse_tau_N = None if tau is None else torch.logsumexp(z_NV / tau, dim=-1)
        if b_V is not None:
            z_NV += b_V
        return torch.logsumexp(z_NV, dim=-1) if plain else None, lse_tau_N

    def gradient(
        self, h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None, y_N: Tensor, terms: RowTerms, bias_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the block's scores, (N, V), and, if `bias_gradient`, of its biases, (V,)."""
        z_NV = self._scores(h_ND, w_VD, None)
        tempered_NV = None
        if terms.tempered is not None and terms.lse_tau is not None:
            tempered_NV = (z_NV / terms.tau).sub_(terms.lse_tau[:, None]).exp_().sub_(terms.uniform)
            tempered_NV *= terms.tempered[:, None]
        if terms.lse is None or terms.plain is None or terms.target is None:
            assert tempered_NV is not None
            return tempered_NV.to(h_ND.dtype), None
        if b_V is not None:
            z_NV += b_V
        g_NV = z_NV.sub_(terms.lse[:, None]).exp_().mul_(terms.plain[:, None])
        classes = w_VD.shape[0]
        target_N = terms.target.where(is_class(y_N, classes), 0.0).to(g_NV.dtype)
        g_NV.scatter_add_(1, classes_in_range(y_N, classes)[:, None], -target_N[:, None])
        db_V = g_NV.sum(0) if bias_gradient else None
        if tempered_NV is not None:
            g_NV += tempered_NV
        return g_NV.to(h_ND.dtype), db_V

    def soft_gradients(self, h_ND: Tensor, m_ND: Tensor, k_VD: Tensor, v_VD: Tensor, terms: SoftTerms) -> Tensor:
        """Return two matrices as one, (2N, V): q less `uniform`, and below it dz.

        q is the tempered softmax of the scores z = h K^T. dz is the gradient of z. It has two sources: the mean of the
        values V under q, whose gradient is `m`, and the negative entropy of q.
        """
        logq_NV = self._scores(h_ND, k_VD, None).div_(terms.tau).sub_(terms.lse_tau[:, None])
        dz_NV = product(m_ND, v_VD.T).addcmul_(logq_NV, terms.negentropy[:, None]).sub_(terms.mean[:, None])
        q_NV = logq_NV.exp_()
        dz_NV.mul_(q_NV).div_(terms.tau)
        return torch.cat([q_NV.sub_(terms.uniform).to(h_ND.dtype), dz_NV.to(h_ND.dtype)])

    def scale(self, x: Tensor, factor: Tensor) -> None:
        """Multiply x by a factor in place. The factor is not rounded to the type of x."""
        if not x.is_cuda:
            if (number := factor.item()) != 1:
                x.mul_(number)
            return
        for part in torch.split(x, 2**12):
            torch.mul(at_least_float32(part), factor, out=part)

    def _scores(self, h_ND: Tensor, w_VD: Tensor, b_V: Tensor | None) -> Tensor:
        """Return the scores as a new tensor, at least in float32.

        The bias is added in that type. If it were rounded to half precision with the product, scores would depend on
        which function computes them.
        """
        if b_V is not None and b_V.dtype == h_ND.dtype:
            return torch.addmm(b_V, h_ND, w_VD.T)
        z_NV = product(h_ND, w_VD.T)
        return z_NV if b_V is None else z_NV.add_(b_V)


def is_class(y_N: Tensor, classes: int) -> Tensor:
    """Return a mask of the targets that are classes: neither ignored nor out of range."""
    return (y_N >= 0) & (y_N < classes)


def classes_in_range(y_N: Tensor, classes: int) -> Tensor:
    """Return the targets with 0 in place of those that are not classes, so that they can be used as indices."""
    return y_N.where(is_class(y_N, classes), 0)


def mask_ignored(nll_N: Tensor, y_N: Tensor, classes: int) -> Tensor:
    """Return the losses with zero for ignored targets, and NaN for targets that are out of range."""
    return nll_N.where(is_class(y_N, classes), torch.where(y_N == IGNORE, 0.0, torch.nan))


# -- products ------------------------------------------------------------------------------------------------------


def widened(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether matrices of this type on the device of `x` are copied to a wider type to compute scores.

    On a GPU, newer versions of torch can write the product of two half-precision matrices in float32.
    """
    return accumulation_dtype(dtype) != dtype and not (x.is_cuda and _WIDE_PRODUCTS)


_WIDE_PRODUCTS = hasattr(torch.ops.aten.mm, "dtype_out")


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return the product a b, at least in float32. Scores in half precision would have errors of several percent."""
    if accumulation_dtype(a.dtype) == a.dtype:
        return torch.mm(a, b)
    if widened(a, a.dtype):
        return torch.mm(at_least_float32(a), at_least_float32(b))
    return torch.mm(a, b, out_dtype=torch.float32)


def product_into(out_NV: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute out = a b, all of one type. The stride between rows of `out` may be larger than their length."""
    whole = _aligned(out_NV)
    torch.mm(a, b[:, :whole], out=out_NV[:, :whole])
    if whole < out_NV.shape[1]:
        torch.mm(a, b[:, whole:], out=out_NV[:, whole:])


def add_product(out: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Compute out = a b if `first`, else out += a b, summed in the type of `out`.

    If half-precision matrices cannot be multiplied into a wider type, each product is rounded once.
    """
    beta = 0 if first else 1
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif out.dtype == accumulation_dtype(a.dtype) != a.dtype and not widened(a, a.dtype):
        torch.addmm(out, a, b, beta=beta, out_dtype=torch.float32, out=out)
    elif first:
        out.copy_(torch.mm(a, b))
    else:
        out.add_(torch.mm(a, b))


def add_to_rows(out_ND: Tensor, g_NV: Tensor, w_VD: Tensor, first: bool) -> None:
    """Compute out = g W if `first`, else out += g W: the gradient of the rows."""
    whole = _aligned(g_NV)
    add_product(out_ND, g_NV[:, :whole], w_VD[:whole], first)
    if whole < w_VD.shape[0]:
        add_product(out_ND, g_NV[:, whole:], w_VD[whole:], first=False)


def add_to_classes(out_VD: Tensor, g_NV: Tensor, h_ND: Tensor, first: bool) -> None:
    """Compute out = g^T h if `first`, else out += g^T h: the gradient of the classes."""
    whole = _aligned(g_NV)
    add_product(out_VD[:whole], g_NV[:, :whole].T, h_ND, first)
    if whole < out_VD.shape[0]:
        add_product(out_VD[whole:], g_NV[:, whole:].T, h_ND, first)


def _aligned(g_NV: Tensor) -> int:
    """Return the number of classes that a GPU's matrix units process at full speed.

    An odd number would make the whole product slow, so the last few classes get a separate product.
    """
    classes, size = g_NV.shape[1], g_NV.element_size()
    multiple = 16 // size
    # With float32 rows that are not aligned the whole product is slow anyway.
    if not g_NV.is_cuda or size > 4 or classes < multiple or (size == 4 and g_NV.stride(0) % multiple):
        return classes
    return classes // multiple * multiple


def scores_for(impl: str) -> Scores:
    """Return the object that computes blocks of scores for an implementation."""
    if impl == "triton":
        from reefknot.kernels.triton_scores import TritonScores

        return TritonScores()
    return Scores()
