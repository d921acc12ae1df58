"""Passes over blocks of scores that compute losses and gradients without ever storing all scores.

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
    accumulation_dtype,
    add_to_classes,
    add_to_rows,
    at_least_float32,
    is_class,
    mask_ignored,
    product,
)


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a pass: hidden states h, class vectors w, biases b and targets y, and how to compute the scores."""

    h: Tensor
    w: Tensor
    b: Tensor | None
    y: Tensor
    dtype: torch.dtype
    """The type of the matrix products."""
    scores: Scores
    budget: int
    """Working memory in bytes."""
    centre: Tensor | None = None
    """The vector that is subtracted from every class vector before it is rounded. It lowers all scores of a row by the
    same amount, which does not change a softmax. Trained class vectors have a large mean. Without the subtraction, half
    precision would spend its digits on the mean, and a tempered softmax needs all digits."""

    def mean(self) -> Tensor:
        """Return the mean of the class vectors."""
        if accumulation_dtype(self.w.dtype) == self.w.dtype:
            return self.w.mean(0)
        # Matrix units sum half-precision numbers faster than a reduction does.
        return product(self.w.new_ones(8, self.w.shape[0]), self.w)[0] / self.w.shape[0]

    def centred(self, mean: Tensor) -> LossInputs:
        """Return inputs whose class vectors have this mean subtracted.

        Class vectors that are already in half precision are not changed, because the difference would have to be
        rounded again.
        """
        return self if accumulation_dtype(self.w.dtype) != self.w.dtype else replace(self, centre=mean)

    def shift(self, mean: Tensor) -> Tensor:
        """Return the mean score of each row, without the bias."""
        return at_least_float32(self.h.to(self.dtype)) @ mean.to(accumulation_dtype(self.dtype))

    def rows(self, rows: slice) -> Tensor:
        """Return some of the hidden states in the type of the matrix products."""
        return self.h[rows].to(self.dtype).contiguous()

    def classes(self, classes: slice) -> tuple[Tensor, Tensor | None]:
        """Return vectors and biases of some classes in the types of the computation, copied only if necessary."""
        if self.centre is None:
            w = self.w[classes].to(self.dtype).contiguous()
        else:
            w = self.w.new_empty(self.w[classes].shape, dtype=self.dtype)
            torch.sub(self.w[classes], self.centre, out=w)
        return w, None if self.b is None else self.b[classes].to(accumulation_dtype(self.dtype))

    def scored(self, rows: slice) -> Tensor:
        """Return a mask of the rows that have a target."""
        return is_class(self.y[rows], self.w.shape[0])

    def blocks(self, group: int = 1, gradients: bool = True, matrices: int = 1) -> Blocks:
        """Return blocks that fit into the budget.

        Args:
            group: Number of consecutive rows that must be in the same block.
            gradients: The blocks are for gradients and not only for losses.
            matrices: Number of matrices of the size of the block that exist at the same time.
        """
        dim, narrow, broad = self.h.shape[1], self.dtype.itemsize, accumulation_dtype(self.dtype).itemsize
        copied = self.dtype != self.w.dtype or self.centre is not None
        copy = (narrow if copied else 0) + (broad if self.scores.widens(self.h, self.dtype) else 0)
        # The gradient in the type of the classes does not count: it is needed anyway, and is made after the blocks are
        # freed.
        accumulator = accumulation_dtype(self.w.dtype).itemsize - self.w.dtype.itemsize
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
    """The gradients of h, w and b, summed over the blocks of a pass. A gradient that is not needed is None."""

    def __init__(self, inputs: LossInputs, needs: tuple[bool, bool, bool], blocks: Blocks) -> None:
        h, w, b = inputs.h, inputs.w, inputs.b
        self.h = torch.empty_like(h, memory_format=torch.contiguous_format) if needs[0] else None
        self.w = allocate_gradient(w, h.shape[0], blocks) if needs[1] else None
        biased = needs[2] and b is not None
        self.b = torch.zeros(w.shape[0], dtype=accumulation_dtype(inputs.dtype), device=w.device) if biased else None
        self.inputs = inputs

    def add_exponentials(self, rows: slice, h: Tensor, w: Tensor, block: Exponentials, weights: Tensor | None) -> None:
        """Add the gradients of a block that has all classes, with a weight for each row.

        The weights are multiplied into `h` and its gradient instead of the scores, which saves a pass over the scores.
        """
        scale = (block.scale if weights is None else block.scale * weights)[:, None]
        if self.h is not None:
            dh = h.new_empty(h.shape, dtype=accumulation_dtype(h.dtype))
            add_to_rows(dh, block.values, w, first=True)
            torch.mul(dh, scale, out=self.h[rows])
        if self.w is not None:
            add_to_classes(self.w, block.values, torch.mul(h, scale, out=torch.empty_like(h)), first=rows.start == 0)
        if self.b is not None:
            # A product with a single column is slow on a GPU.
            self.b += product(block.values.T, scale.to(h.dtype).expand(-1, 8).contiguous())[:, 0]

    def add_recomputed(self, rows: slice, terms: RowTerms, blocks: Blocks) -> None:
        """Add the gradients of some rows, one block of classes after the other, with known normalisers."""
        inputs = self.inputs
        h = inputs.rows(rows)
        dh = h.new_empty(h.shape, dtype=accumulation_dtype(h.dtype)) if self.h is not None else None
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


def allocate_gradient(x: Tensor, rows: int, blocks: Blocks) -> Tensor:
    """Allocate the gradient of `x`, which is summed over blocks of rows.

    The sum of several blocks would lose digits in half precision, so it has a wider type. A single block is one product
    and needs no sum. The tensor is filled with zeros only if there are no rows, because nothing else would write it.
    """
    dtype = x.dtype if blocks.rows >= rows else accumulation_dtype(x.dtype)
    return (torch.empty if rows else torch.zeros)(x.shape, dtype=dtype, device=x.device)


Weigh = Callable[[slice, Tensor], Tensor | None]
"""A function of (rows, losses of the rows) that returns the weight of each row in the objective. The weight is zero for
a row without a target. None stands for weights of 1."""


def losses_with_gradients(
    inputs: LossInputs, weigh: Weigh, needs: tuple[bool, bool, bool], group: int = 1
) -> Gradients:
    """Compute losses and gradients in one pass over the rows.

    Args:
        inputs: The inputs of the pass.
        weigh: Called with the losses of each block of rows. It returns their weights.
        needs: Whether the gradients of h, w and b are needed.
        group: Number of consecutive rows that `weigh` needs at once.
    """
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
    """Return losses and log-sum-exps of all rows and, if `tau` is given, log-sum-exps at `tau` (see `RowLosses`)."""
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
    """Compute gradients from the results of `losses` and the weights that the backward pass receives."""
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
        sums.add_recomputed(rows, terms.select(rows), blocks)
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
    lse, lse_tau = (combine_normalisers(list(parts)) for parts in zip(*normalisers, strict=True))
    assert lse is not None
    y = inputs.y[rows]
    nll = lse - inputs.scores.target_scores(h, inputs.w, inputs.b, y, inputs.centre).to(lse.dtype)
    return mask_ignored(nll, y, inputs.w.shape[0]), lse, lse_tau


def combine_normalisers(normalisers: list[Tensor | None]) -> Tensor | None:
    """Return the log-sum-exps over all classes, given those of blocks of classes. None if they were not computed."""
    computed = [lse for lse in normalisers if lse is not None]
    if len(computed) < 2:
        return computed[0] if computed else None
    return torch.logsumexp(torch.stack(computed), dim=0)


def _joined(inputs: LossInputs, parts: list[Tensor | None]) -> Tensor:
    """Concatenate the results of blocks of rows. Return an empty tensor if there are no rows or no results."""
    computed = [part for part in parts if part is not None]
    if not computed:
        return inputs.h.new_zeros(0, dtype=accumulation_dtype(inputs.dtype))
    return computed[0] if len(computed) == 1 else torch.cat(computed)
