"""The softmax-weighted mean that the augmented loss needs: an attention of some words over a table.

    q_u = softmax(K l_u / tau),   mean_u = sum_v (q_uv - 1 / V) w_v,   negentropy_u = sum_v q_uv log q_uv

for queries l, keys K and values w: the target's input vector, all input vectors, all class vectors. The mean is told as
it departs from that of all values, by which a divergence between softmaxes over them does not change. What is U x V is
made in blocks and made again in the backward pass.

Shapes: U queries (distinct targets), V classes, D width of queries and keys, C width of the values.
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
    """Per query, at least in float32."""

    mean: Tensor
    negentropy: Tensor


def soft_targets(queries_UD: Tensor, keys_VD: Tensor, values_VC: Tensor, tau: float) -> SoftTargets:
    """Means of the values, and negative entropies, under each query's softmax over the keys."""
    choice = current()
    dtype = compute_dtype(queries_UD, keys_VD)
    # One table that is both: its gradient is added up in one place.
    values = None if values_VC is keys_VD else values_VC
    if torch.compiler.is_compiling() and choice.impl != "reference":
        from reefknot.kernels import ops

        return ops.soft_targets(queries_UD, keys_VD, values, tau, dtype, choice)
    impl = resolve(choice, queries_UD.device, dtype)
    if impl == "reference":
        return SoftTargets(*reference_soft_targets(queries_UD, keys_VD, values_VC, tau))
    how = tau, dtype, scores_for(impl), choice.budget(queries_UD.device)
    return SoftTargets(*_SoftTargets.apply(queries_UD, keys_VD, values, *how))  # type: ignore[no-untyped-call]


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
        ctx.how = tau, dtype, scores, budget
        with torch.autocast(queries.device.type, enabled=False):
            mean, negentropy, lse = Attention(queries, keys, values, *ctx.how).forward()
        ctx.save_for_backward(queries, keys, values, mean, negentropy, lse)
        return mean, negentropy

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Any, ...]:
        refuse_second_derivatives()
        queries, keys, values, *made = ctx.saved_tensors
        with torch.autocast(queries.device.type, enabled=False):
            found = Attention(queries, keys, values, *ctx.how).backward(made, g, ctx.needs_input_grad[:3])
        return (*found, None, None, None, None)


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
        nobody = queries.new_full((len(queries),), -1, dtype=torch.long)
        scoring = LossInputs(queries, keys, None, nobody, dtype, scores, budget)
        self.keys_mean = scoring.mean()
        self.scoring = scoring.centred(self.keys_mean)
        self.given = values
        self.valuing = self.scoring
        if values is not None and not _same_numbers(values, keys):
            valuing = replace(scoring, w=values)
            self.valuing = valuing.centred(valuing.mean())
        self.tau = tau
        self.uniform = 1 / keys.shape[0]

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means, negative entropies, normalisers."""
        scoring = self.scoring
        blocks = scoring.blocks()
        found = [self._soft_targets(rows, blocks) for rows in blocks.over_rows(scoring.h.shape[0])]
        if not found:
            nothing = scoring.h.new_zeros(0, dtype=wide(scoring.dtype))
            return nothing.new_zeros(0, self.valuing.w.shape[1]), nothing, nothing.clone()
        mean, negentropy, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
        return mean, negentropy, lse

    def _soft_targets(self, rows: slice, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
        """Of some queries, in two passes over the classes: normalisers, then means."""
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
        apart = self.valuing is not self.scoring
        values_m = keys_m.new_empty(h.shape[0], self.valuing.w.shape[1]) if apart else keys_m
        for classes in blocks.over_classes(scoring.w.shape[0]):
            w, _ = scoring.classes(classes)
            q, _ = scores.gradient(h, w, None, scoring.y[rows], self._terms(lse), bias_gradient=False)
            add_to_rows(keys_m, q, w, first=classes.start == 0)
            if apart:
                add_to_rows(values_m, q, self.valuing.classes(classes)[0], first=classes.start == 0)
            del q  # before the next block is made
        # The mean score, from the mean of the keys: sum_v q_v log q_v = sum_v q_v z_v / tau - lse.
        mean_key = keys_m if scoring.centre is not None else keys_m + self.keys_mean
        return values_m, (h * mean_key).sum(-1) / self.tau - lse, lse

    def backward(
        self, made: Sequence[Tensor], g: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of queries, keys and values; where keys and values are one tensor, both are the keys'. From what
        `forward` made, and the gradients of the first two of it."""
        (mean, negentropy, lse), (g_mean, g_negentropy) = made, g
        whole_mean = mean if self.valuing.centre is not None else mean + self.valuing.mean()
        expected = (g_mean * whole_mean).sum(-1) + g_negentropy * negentropy
        terms = SoftTerms(lse, g_negentropy, expected, self.tau, self.uniform)
        scoring = self.scoring
        to_scores = needs[0] or needs[1]
        blocks = scoring.blocks(matrices=2 if to_scores else 1)
        dq = torch.empty_like(scoring.h, memory_format=torch.contiguous_format) if needs[0] else None
        dk = room_for(scoring.w, scoring.h.shape[0], blocks) if needs[1] else None
        dv = room_for(self.given, scoring.h.shape[0], blocks) if self.given is not None and needs[2] else None
        for rows in blocks.over_rows(scoring.h.shape[0]):
            h, m = scoring.rows(rows), g_mean[rows].to(scoring.dtype).contiguous()
            dh = h.new_empty(h.shape, dtype=wide(h.dtype)) if dq is not None else None
            for classes in blocks.over_classes(scoring.w.shape[0]):
                w, _ = scoring.classes(classes)
                q, sent = self._block(h, m, w, classes, terms.of(rows), to_scores)
                first = rows.start == 0
                if dk is not None and self.given is None:
                    # Softmax and gradient lie one below the other, so what both send is one product.
                    add_to_classes(dk[classes], q, torch.cat([m, h]), first)
                elif dk is not None and sent is not None:
                    add_to_classes(dk[classes], sent, h, first)
                if dv is not None:
                    add_to_classes(dv[classes], q[: h.shape[0]], m, first)
                if dh is not None and sent is not None:
                    add_to_rows(dh, sent, w, first=classes.start == 0)
                del q, sent
            if dq is not None and dh is not None:
                dq[rows] = dh
        dk = None if dk is None else dk.to(scoring.w.dtype)
        return dq, dk, None if self.given is None or dv is None else dv.to(self.given.dtype)

    def _block(
        self, h: Tensor, m: Tensor, w: Tensor, classes: slice, terms: SoftTerms, to_scores: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The softmax of a block; where anybody asks for it, with the gradient of its scores below and by itself."""
        if to_scores:
            values = w if self.valuing is self.scoring else self.valuing.classes(classes)[0]
            both = self.scoring.scores.soft_gradients(h, m, w, values, terms)
            return both, both[h.shape[0] :]
        nobody = self.scoring.y[: h.shape[0]]
        q, _ = self.scoring.scores.gradient(h, w, None, nobody, self._terms(terms.lse_tau), bias_gradient=False)
        return q, None

    def _terms(self, lse: Tensor) -> RowTerms:
        return RowTerms(lse_tau=lse, tempered=torch.ones_like(lse), tau=self.tau, uniform=self.uniform)


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one place in memory, though autograd knows them apart."""
    alike = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return alike and one.data_ptr() == other.data_ptr()
