"""Passes over blocks of scores that compute losses and gradients without ever holding all scores.

Shapes: N rows (tokens), D dimensions, V classes, K experts of a mixture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reefknot.kernels.blocks import Blocks, Costs, plan_blocks
from reefknot.kernels.scores import (
    Exponentials,
    RowTerms,
    Scores,
    add_to_classes,
    add_to_rows,
    at_least_float32,
    is_class,
    mask_ignored,
    product,
    wide,
)


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a pass: rows and classes."""

    h: Tensor
    w: Tensor
    b: Tensor | None
    y: Tensor
    dtype: torch.dtype
    """The type of the matrix products."""
    scores: Scores
    budget: int
    """Bytes of working memory."""
    centre: Tensor | None = None
    """Subtracted from every class vector before it is rounded. It lowers all scores of a row by the same amount, which
    does not change a softmax. But trained class vectors have a large mean; half precision would spend its digits on it,
    and a tempered softmax has few digits to lose."""

    def mean(self) -> Tensor:
        """Return the mean of the class vectors."""
        if wide(self.w.dtype) == self.w.dtype:
            return self.w.mean(0)
        # Matrix units sum half-precision numbers faster than a reduction does.
        return product(self.w.new_ones(8, self.w.shape[0]), self.w)[0] / self.w.shape[0]

    def centred(self, mean: Tensor) -> LossInputs:
        """Return inputs whose class vectors have this mean subtracted. Class vectors that are already in half precision
        are left alone, because the difference would have to be rounded again."""
        return self if wide(self.w.dtype) != self.w.dtype else replace(self, centre=mean)

    def shift(self, mean: Tensor) -> Tensor:
        """Return the mean score of each row, without the bias."""
        return at_least_float32(self.h.to(self.dtype)) @ mean.to(wide(self.dtype))

    def rows(self, rows: slice) -> Tensor:
        return self.h[rows].to(self.dtype).contiguous()

    def classes(self, classes: slice) -> tuple[Tensor, Tensor | None]:
        """Return vectors and biases of some classes in the types of the computation, copied only if these differ."""
        if self.centre is None:
            w = self.w[classes].to(self.dtype).contiguous()
        else:
            w = self.w.new_empty(self.w[classes].shape, dtype=self.dtype)
            torch.sub(self.w[classes], self.centre, out=w)
        return w, None if self.b is None else self.b[classes].to(wide(self.dtype))

    def scored(self, rows: slice) -> Tensor:
        """Return which of the rows have a target."""
        return is_class(self.y[rows], self.w.shape[0])

    def blocks(self, group: int = 1, gradients: bool = True, matrices: int = 1) -> Blocks:
        """Return blocks within the budget, for gradients (this many matrices of them at once) or only for losses."""
        dim, narrow, broad = self.h.shape[1], self.dtype.itemsize, wide(self.dtype).itemsize
        copied = self.dtype != self.w.dtype or self.centre is not None
        copy = (narrow if copied else 0) + (broad if self.scores.widens(self.h, self.dtype) else 0)
        # The gradient of the classes itself does not count: it must exist, and only exists once the blocks are freed.
        accumulator = wide(self.w.dtype).itemsize - self.w.dtype.itemsize
        costs = Costs(
            score=matrices * self.scores.bytes_per_score(self.dtype, gradients),
            row=dim * (broad + 2 * narrow),
            one_class=dim * copy,
            accumulator=dim * self.w.shape[0] * accumulator if gradients else 0,
            fewest_rows=self.scores.fewest_rows(self.dtype),
            multiple=self.scores.multiple,
        )
        return plan_blocks(self.h.shape[0], self.w.shape[0], costs, self.budget, group)


class Gradients:
    """The sums of a pass: gradients of rows, classes and biases. Those that are not needed are None."""

    def __init__(self, inputs: LossInputs, needs: tuple[bool, bool, bool], blocks: Blocks) -> None:
        h, w, b = inputs.h, inputs.w, inputs.b
        self.h = torch.empty_like(h, memory_format=torch.contiguous_format) if needs[0] else None
        self.w = room_for(w, h.shape[0], blocks) if needs[1] else None
        biased = needs[2] and b is not None
        self.b = torch.zeros(w.shape[0], dtype=wide(inputs.dtype), device=w.device) if biased else None
        self.inputs = inputs

    def add_exponentials(self, rows: slice, h: Tensor, w: Tensor, block: Exponentials, weights: Tensor | None) -> None:
        """Add the gradients of a block that has all classes, with a weight for each row. The narrow matrices are
        multiplied by the weights, which saves a pass over the scores."""
        scale = (block.scale if weights is None else block.scale * weights)[:, None]
        if self.h is not None:
            dh = h.new_empty(h.shape, dtype=wide(h.dtype))
            add_to_rows(dh, block.values, w, first=True)
            torch.mul(dh, scale, out=self.h[rows])
        if self.w is not None:
            add_to_classes(self.w, block.values, torch.mul(h, scale, out=torch.empty_like(h)), first=rows.start == 0)
        if self.b is not None:
            # A product with a single column is slow on a GPU.
            self.b += product(block.values.T, scale.to(h.dtype).expand(-1, 8).contiguous())[:, 0]

    def add_recomputed(self, rows: slice, terms: RowTerms, blocks: Blocks) -> None:
        """Add the gradients of some rows, one block of classes after the other, from known normalisers."""
        inputs = self.inputs
        h = inputs.rows(rows)
        dh = h.new_empty(h.shape, dtype=wide(h.dtype)) if self.h is not None else None
        for classes in blocks.over_classes(inputs.w.shape[0]):
            w, b = inputs.classes(classes)
            y = inputs.y[rows] - classes.start
            g, db = inputs.scores.gradient(h, w, b, y, terms, self.b is not None)
            if dh is not None:
                add_to_rows(dh, g, w, first=classes.start == 0)
            if self.w is not None:
                add_to_classes(self.w[classes], g, h, first=rows.start == 0)
            if self.b is not None and db is not None:
                self.b[classes] += db
            del g  # free it before the next block is computed
        if self.h is not None and dh is not None:
            self.h[rows] = dh

    def add_shift(self, weights_N: Tensor) -> None:
        """Add the gradient that reaches the rows through the centre, which was subtracted from the scores."""
        if self.h is not None and self.inputs.centre is not None:
            self.h += weights_N[:, None] * self.inputs.centre

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients in the types of the inputs."""
        w = None if self.w is None else self.w.to(self.inputs.w.dtype)
        b = None if self.b is None or self.inputs.b is None else self.b.to(self.inputs.b.dtype)
        return self.h, w, b


def room_for(x: Tensor, rows: int, blocks: Blocks) -> Tensor:
    """Allocate the gradient of `x`, which is summed over blocks of rows.

    The sum of several blocks would lose digits in half precision, so it is wider. A single block is one product. The
    tensor is only filled with zeros if there are no rows to write it.
    """
    dtype = x.dtype if blocks.rows >= rows else wide(x.dtype)
    return (torch.empty if rows else torch.zeros)(x.shape, dtype=dtype, device=x.device)


Weigh = Callable[[slice, Tensor], Tensor | None]
"""(rows, losses of the rows) -> the weight of each row in the objective, zero without a target. None: all weigh 1."""


def losses_with_gradients(
    inputs: LossInputs, weigh: Weigh, needs: tuple[bool, bool, bool], group: int = 1
) -> Gradients:
    """Compute losses and gradients in one pass over the rows. The weights of `group` rows follow from their losses."""
    blocks = inputs.blocks(group)
    sums = Gradients(inputs, needs, blocks)
    one_pass = blocks.classes >= inputs.w.shape[0]
    w, b = inputs.classes(slice(0, inputs.w.shape[0])) if one_pass else (inputs.w, inputs.b)
    for rows in blocks.over_rows(inputs.h.shape[0]):
        if one_pass:
            h = inputs.rows(rows)
            block = inputs.scores.exponentials(h, w, b, inputs.y[rows])
            sums.add_exponentials(rows, h, w, block, weigh(rows, block.nll))
            del block  # free it before the next one is computed
        else:
            nll, lse, _ = _losses(inputs, rows, blocks, None)
            weights = weigh(rows, nll)
            weights = inputs.scored(rows).to(lse.dtype) if weights is None else weights
            sums.add_recomputed(rows, RowTerms(lse, weights, weights), blocks)
    return sums


def losses(inputs: LossInputs, tau: float | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return losses and log-sum-exps of all rows and, at `tau`, log-sum-exps of the scores less their mean."""
    mean = None
    if tau is not None:
        mean = inputs.mean()
        inputs = inputs.centred(mean)
    blocks = inputs.blocks(gradients=False)
    parts = [_losses(inputs, rows, blocks, tau) for rows in blocks.over_rows(inputs.h.shape[0])]
    nll, lse, lse_tau = (_joined(inputs, [part[index] for part in parts]) for index in range(3))
    if tau is None or mean is None:
        return nll, lse, None
    if inputs.centre is None:
        return nll, lse, lse_tau - inputs.shift(mean) / tau
    return nll, lse + inputs.shift(mean), lse_tau


def gradients(
    inputs: LossInputs, terms: RowTerms, needs: tuple[bool, bool, bool], tau: float | None = None
) -> Gradients:
    """Compute gradients from the results of `losses` and the weights that come with the backward pass."""
    if tau is not None and terms.lse is not None:
        mean = inputs.mean()
        inputs = inputs.centred(mean)
        shift = inputs.shift(mean)
        if inputs.centre is not None:
            terms = replace(terms, lse=terms.lse - shift)
        elif terms.lse_tau is not None:
            terms = replace(terms, lse_tau=terms.lse_tau + shift / tau)
    blocks = inputs.blocks()
    sums = Gradients(inputs, needs, blocks)
    for rows in blocks.over_rows(inputs.h.shape[0]):
        sums.add_recomputed(rows, terms.of(rows), blocks)
    if terms.plain is not None and terms.target is not None and terms.plain is not terms.target:
        sums.add_shift(terms.plain - terms.target)
    return sums


def _losses(inputs: LossInputs, rows: slice, blocks: Blocks, tau: float | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the results of `losses` for some rows, computed one block of classes after the other."""
    h = inputs.rows(rows)
    normalisers = [
        inputs.scores.normalisers(h, *inputs.classes(classes), tau)
        for classes in blocks.over_classes(inputs.w.shape[0])
    ]
    lse, lse_tau = (added(list(parts)) for parts in zip(*normalisers, strict=True))
    assert lse is not None
    y = inputs.y[rows]
    nll = lse - inputs.scores.target_scores(h, inputs.w, inputs.b, y, inputs.centre).to(lse.dtype)
    return mask_ignored(nll, y, inputs.w.shape[0]), lse, lse_tau


def added(normalisers: list[Tensor | None]) -> Tensor | None:
    """Combine the log-sum-exps of blocks of classes. None if they were not computed."""
    computed = [lse for lse in normalisers if lse is not None]
    if len(computed) < 2:
        return computed[0] if computed else None
    return torch.logsumexp(torch.stack(computed), dim=0)


def _joined(inputs: LossInputs, parts: list[Tensor | None]) -> Tensor:
    """Concatenate the results of blocks of rows. An empty tensor if there are no rows, or no results."""
    computed = [part for part in parts if part is not None]
    if not computed:
        return inputs.h.new_zeros(0, dtype=wide(inputs.dtype))
    return computed[0] if len(computed) == 1 else torch.cat(computed)
