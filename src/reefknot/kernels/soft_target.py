"""Softmax-weighted means for the augmented loss: attention of some words over a table.

    q_u = softmax(K l_u / tau),   mean_u = sum_v (q_uv - 1 / V) w_v,   negentropy_u = sum_v q_uv log q_uv

The queries l are the input vectors of the targets, the keys K are all input vectors, and the values w are all class
vectors. The mean of all values is subtracted, because a divergence between softmaxes over the values does not depend on
it. The U x V weights are computed in blocks, and computed again in the backward pass.

Shapes: U queries (distinct targets), V classes, D dimensions of queries and keys, C dimensions of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reefknot.kernels.autograd import reject_second_derivatives
from reefknot.kernels.blocks import Blocks
from reefknot.kernels.choice import current, resolve
from reefknot.kernels.passes import LossInputs, allocate_gradient, combine_normalisers
from reefknot.kernels.reference import compute_dtype, reference_soft_targets
from reefknot.kernels.scores import (
    RowTerms,
    Scores,
    SoftTerms,
    accumulation_dtype,
    add_to_classes,
    add_to_rows,
    scores_for,
)


class SoftTargets(NamedTuple):
    """Means of the values, (U, C), and negative entropies, (U,), at least in float32."""

    mean: Tensor
    negentropy: Tensor


def soft_targets(queries_UD: Tensor, keys_VD: Tensor, values_VC: Tensor, tau: float) -> SoftTargets:
    """Return the means of the values under each query's softmax over the keys, and the softmaxes' negative entropies.

    Args:
        queries_UD: One query per distinct target.
        keys_VD: One key per class.
        values_VC: One value per class. It may be the same tensor as the keys.
        tau: Temperature of the softmax.
    """
    choice = current()
    dtype = compute_dtype(queries_UD, keys_VD)
    # If the same tensor is keys and values, its gradient is summed in one tensor.
    values = None if values_VC is keys_VD else values_VC
    if torch.compiler.is_compiling() and choice.impl != "reference":
        from reefknot.kernels import ops

        return ops.soft_targets(queries_UD, keys_VD, values, tau, dtype, choice)
    impl = resolve(choice, queries_UD.device, dtype)
    if impl == "reference":
        return SoftTargets(*reference_soft_targets(queries_UD, keys_VD, values_VC, tau))
    options = tau, dtype, scores_for(impl), choice.budget(queries_UD.device)
    return SoftTargets(*_SoftTargets.apply(queries_UD, keys_VD, values, *options))  # type: ignore[no-untyped-call]


class _SoftTargets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None,
        tau: float,
        dtype: torch.dtype,
        scores: Scores,
        budget: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.options = tau, dtype, scores, budget
        with torch.autocast(queries.device.type, enabled=False):
            mean, negentropy, lse = Attention(queries, keys, values, *ctx.options).forward()
        ctx.save_for_backward(queries, keys, values, mean, negentropy, lse)
        return mean, negentropy

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Any, ...]:
        reject_second_derivatives()
        queries, keys, values, *results = ctx.saved_tensors
        with torch.autocast(queries.device.type, enabled=False):
            attention = Attention(queries, keys, values, *ctx.options)
            gradients = attention.backward(results, g, ctx.needs_input_grad[:3])
        return (*gradients, None, None, None, None)


class Attention:
    """The passes over blocks of scores of queries and keys. The keys are also the values if `values` is None."""

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor | None,
        tau: float,
        dtype: torch.dtype,
        scores: Scores,
        budget: int,
    ) -> None:
        no_targets = queries.new_full((len(queries),), -1, dtype=torch.long)
        scoring = LossInputs(queries, keys, None, no_targets, dtype, scores, budget)
        self.keys_mean = scoring.mean()
        self.scoring = scoring.centred(self.keys_mean)
        self.values = values
        self.valuing = self.scoring
        if values is not None and not _same_memory(values, keys):
            valuing = replace(scoring, w=values)
            self.valuing = valuing.centred(valuing.mean())
        self.tau = tau
        self.uniform = 1 / keys.shape[0]

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return means, negative entropies and normalisers."""
        scoring = self.scoring
        blocks = scoring.blocks()
        blockwise = [self._soft_targets(rows, blocks) for rows in blocks.over_rows(scoring.h.shape[0])]
        if not blockwise:
            empty = scoring.h.new_zeros(0, dtype=accumulation_dtype(scoring.dtype))
            return empty.new_zeros(0, self.valuing.w.shape[1]), empty, empty.clone()
        mean, negentropy, lse = (torch.cat(parts) for parts in zip(*blockwise, strict=True))
        return mean, negentropy, lse

    def _soft_targets(self, rows: slice, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of `forward` for some queries, in two passes over the classes: normalisers, then means."""
        scoring, scores = self.scoring, self.scoring.scores
        h = scoring.rows(rows)
        lse = combine_normalisers(
            [
                scores.normalisers(h, scoring.classes(classes)[0], None, self.tau, plain=False)[1]
                for classes in blocks.over_classes(scoring.w.shape[0])
            ]
        )
        assert lse is not None
        keys_m = h.new_empty(h.shape, dtype=accumulation_dtype(h.dtype))
        separate = self.valuing is not self.scoring
        values_m = keys_m.new_empty(h.shape[0], self.valuing.w.shape[1]) if separate else keys_m
        for classes in blocks.over_classes(scoring.w.shape[0]):
            w, _ = scoring.classes(classes)
            q, _ = scores.gradient(h, w, None, scoring.y[rows], self._terms(lse), bias_gradient=False)
            add_to_rows(keys_m, q, w, first=classes.start == 0)
            if separate:
                add_to_rows(values_m, q, self.valuing.classes(classes)[0], first=classes.start == 0)
            del q  # free it before the next block is computed
        # The mean of the keys gives the mean score: sum_v q_v log q_v = sum_v q_v z_v / tau - lse.
        mean_key = keys_m if scoring.centre is not None else keys_m + self.keys_mean
        return values_m, (h * mean_key).sum(-1) / self.tau - lse, lse

    def backward(
        self, results: Sequence[Tensor], output_grads: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of queries, keys and values. If the keys are also the values, the second is for both.

        Args:
            results: The results of `forward`.
            output_grads: The gradients of means and negative entropies.
            needs: Whether the gradients of queries, keys and values are needed.
        """
        (mean, negentropy, lse), (g_mean, g_negentropy) = results, output_grads
        whole_mean = mean if self.valuing.centre is not None else mean + self.valuing.mean()
        expected = (g_mean * whole_mean).sum(-1) + g_negentropy * negentropy
        terms = SoftTerms(lse, g_negentropy, expected, self.tau, self.uniform)
        scoring = self.scoring
        to_scores = needs[0] or needs[1]
        blocks = scoring.blocks(matrices=2 if to_scores else 1)
        dq = torch.empty_like(scoring.h, memory_format=torch.contiguous_format) if needs[0] else None
        dk = allocate_gradient(scoring.w, scoring.h.shape[0], blocks) if needs[1] else None
        dv = (
            allocate_gradient(self.values, scoring.h.shape[0], blocks) if self.values is not None and needs[2] else None
        )
        for rows in blocks.over_rows(scoring.h.shape[0]):
            h, m = scoring.rows(rows), g_mean[rows].to(scoring.dtype).contiguous()
            dh = h.new_empty(h.shape, dtype=accumulation_dtype(h.dtype)) if dq is not None else None
            for classes in blocks.over_classes(scoring.w.shape[0]):
                w, _ = scoring.classes(classes)
                q, dz = self._block(h, m, w, classes, terms.select(rows), to_scores)
                first = rows.start == 0
                if dk is not None and self.values is None:
                    # Softmax and gradient are in one matrix, one below the other, so one product adds both.
                    add_to_classes(dk[classes], q, torch.cat([m, h]), first)
                elif dk is not None and dz is not None:
                    add_to_classes(dk[classes], dz, h, first)
                if dv is not None:
                    add_to_classes(dv[classes], q[: h.shape[0]], m, first)
                if dh is not None and dz is not None:
                    add_to_rows(dh, dz, w, first=classes.start == 0)
                del q, dz
            if dq is not None and dh is not None:
                dq[rows] = dh
        dk = None if dk is None else dk.to(scoring.w.dtype)
        return dq, dk, None if self.values is None or dv is None else dv.to(self.values.dtype)

    def _block(
        self, h: Tensor, m: Tensor, w: Tensor, classes: slice, terms: SoftTerms, to_scores: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the softmax of a block, and the gradient of its scores if `to_scores`.

        If `to_scores`, the first result has both matrices, the gradient below the softmax.
        """
        if to_scores:
            values = w if self.valuing is self.scoring else self.valuing.classes(classes)[0]
            both = self.scoring.scores.soft_gradients(h, m, w, values, terms)
            return both, both[h.shape[0] :]
        no_targets = self.scoring.y[: h.shape[0]]
        q, _ = self.scoring.scores.gradient(h, w, None, no_targets, self._terms(terms.lse_tau), bias_gradient=False)
        return q, None

    def _terms(self, lse: Tensor) -> RowTerms:
        return RowTerms(lse_tau=lse, tempered=torch.ones_like(lse), tau=self.tau, uniform=self.uniform)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same memory, although autograd sees two different tensors."""
    alike = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return alike and one.data_ptr() == other.data_ptr()
