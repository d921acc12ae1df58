"""Softmax-weighted means for the augmented loss: attention of some words over a table.

    q_u = softmax(K l_u / tau),   mean_u = sum_v (q_uv - 1 / V) w_v,   negentropy_u = sum_v q_uv log q_uv

with queries l, keys K and values w: the input vectors of the targets, all input vectors, and all class vectors. The
mean of all values is subtracted, because a divergence between softmaxes over the values does not depend on it. The
U x V weights are computed in blocks, and again in the backward pass.

Shapes: U queries (distinct targets), V classes, D dimensions of queries and keys, C dimensions of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reefknot.kernels.autograd import refuse_second_derivatives
from reefknot.kernels.blocks import Blocks
from reefknot.kernels.choice import current, resolve
from reefknot.kernels.passes import LossInputs, added, room_for
from reefknot.kernels.reference import compute_dtype, reference_soft_targets
from reefknot.kernels.scores import (
    RowTerms,
    Scores,
    SoftTerms,
    add_to_classes,
    add_to_rows,
    scores_for,
    wide,
)


class SoftTargets(NamedTuple):
    """Means and negative entropies, one per query, at least in float32."""

    mean: Tensor
    negentropy: Tensor


def soft_targets(queries_UD: Tensor, keys_VD: Tensor, values_VC: Tensor, tau: float) -> SoftTargets:
    """Return means of the values and negative entropies under each query's softmax over the keys."""
    choice = current()
    dtype = compute_dtype(queries_UD, keys_VD)
    # If one table is both, its gradient is summed in one tensor.
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
        refuse_second_derivatives()
        queries, keys, values, *results = ctx.saved_tensors
        with torch.autocast(queries.device.type, enabled=False):
            attention = Attention(queries, keys, values, *ctx.options)
            gradients = attention.backward(results, g, ctx.needs_input_grad[:3])
        return (*gradients, None, None, None, None)


class Attention:
    """Queries, keys and values, and the passes over blocks of their scores."""

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
            empty = scoring.h.new_zeros(0, dtype=wide(scoring.dtype))
            return empty.new_zeros(0, self.valuing.w.shape[1]), empty, empty.clone()
        mean, negentropy, lse = (torch.cat(parts) for parts in zip(*blockwise, strict=True))
        return mean, negentropy, lse

    def _soft_targets(self, rows: slice, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
        """Return the results of `forward` for some queries, in two passes over the classes: normalisers, then means."""
        scoring, scores = self.scoring, self.scoring.scores
        h = scoring.rows(rows)
        lse = added(
            [
                scores.normalisers(h, scoring.classes(classes)[0], None, self.tau, plain=False)[1]
                for classes in blocks.over_classes(scoring.w.shape[0])
            ]
        )
        assert lse is not None
        keys_m = h.new_empty(h.shape, dtype=wide(h.dtype))
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
        """Return the gradients of queries, keys and values. If keys are also values, the second gradient is for both.

        Args:
            results: What `forward` returned.
            output_grads: The gradients of means and negative entropies.
            needs: Which of the three gradients are needed.
        """
        (mean, negentropy, lse), (g_mean, g_negentropy) = results, output_grads
        whole_mean = mean if self.valuing.centre is not None else mean + self.valuing.mean()
        expected = (g_mean * whole_mean).sum(-1) + g_negentropy * negentropy
        terms = SoftTerms(lse, g_negentropy, expected, self.tau, self.uniform)
        scoring = self.scoring
        to_scores = needs[0] or needs[1]
        blocks = scoring.blocks(matrices=2 if to_scores else 1)
        dq = torch.empty_like(scoring.h, memory_format=torch.contiguous_format) if needs[0] else None
        dk = room_for(scoring.w, scoring.h.shape[0], blocks) if needs[1] else None
        dv = room_for(self.values, scoring.h.shape[0], blocks) if self.values is not None and needs[2] else None
        for rows in blocks.over_rows(scoring.h.shape[0]):
            h, m = scoring.rows(rows), g_mean[rows].to(scoring.dtype).contiguous()
            dh = h.new_empty(h.shape, dtype=wide(h.dtype)) if dq is not None else None
            for classes in blocks.over_classes(scoring.w.shape[0]):
                w, _ = scoring.classes(classes)
                q, dz = self._block(h, m, w, classes, terms.of(rows), to_scores)
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
        """Return the softmax of a block. With `to_scores` the gradient of the scores follows below it, and is also
        returned alone."""
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
    """Return whether two tensors share the same memory, although they are different tensors to autograd."""
    alike = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return alike and one.data_ptr() == other.data_ptr()
