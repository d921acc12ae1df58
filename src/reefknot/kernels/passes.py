"""The passes over blocks of scores that make losses and gradients without ever holding all scores.

Shapes: N rows (tokens), D width, V classes, K experts of a mixture.
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
    """Rows against classes, as a pass sees them."""

    h: Tensor
    w: Tensor
    b: Tensor | None
    y: Tensor
    dtype: torch.dtype
    """What products are made in."""
    scores: Scores
    budget: int
    """Bytes of working memory."""
    centre: Tensor | None = None
    """Subtracted from every class vector before it is rounded. The scores of a row all fall by the same, which no
    softmax sees; but where the vectors have a large mean, as trained ones do, half precision spends its digits on it,
    and a tempered softmax has few to lose."""

    def mean(self) -> Tensor:
        """The mean of the class vectors."""
        if wide(self.w.dtype) == self.w.dtype:
            return self.w.mean(0)
        # Matrix units add up half precision faster than a reduction does.
        return product(self.w.new_ones(8, self.w.shape[0]), self.w)[0] / self.w.shape[0]

    def centred(self, mean: Tensor) -> LossInputs:
        """The same with the mean taken off the class vectors, where they are rounded to half precision or not rounded
        at all. Those that come in half precision would be rounded once more."""
        return self if wide(self.w.dtype) != self.w.dtype else replace(self, centre=mean)

    def shift(self, mean: Tensor) -> Tensor:
        """The mean score of each row, without the bias."""
        return at_least_float32(self.h.to(self.dtype)) @ mean.to(wide(self.dtype))

    def rows(self, rows: slice) -> Tensor:
        return self.h[rows].to(self.dtype).contiguous()

    def classes(self, classes: slice) -> tuple[Tensor, Tensor | None]:
        """Vectors and biases of some classes, in the types of the computation: a copy only where they differ."""
        if self.centre is None:
            w = self.w[classes].to(self.dtype).contiguous()
        else:
            w = self.w.new_empty(self.w[classes].shape, dtype=self.dtype)
            torch.sub(self.w[classes], self.centre, out=w)
        return w, None if self.b is None else self.b[classes].to(wide(self.dtype))

    def scored(self, rows: slice) -> Tensor:
        """Which of the rows have a target."""
        return is_class(self.y[rows], self.w.shape[0])

    def blocks(self, group: int = 1, gradients: bool = True, matrices: int = 1) -> Blocks:
        """Blocks within the budget, for gradients (so many matrices of them at once) or for losses alone."""
        width, narrow, broad = self.h.shape[1], self.dtype.itemsize, wide(self.dtype).itemsize
        copied = self.dtype != self.w.dtype or self.centre is not None
        copy = (narrow if copied else 0) + (broad if self.scores.widens(self.h, self.dtype) else 0)
        # Beside the gradient of the classes, which must exist, and exists only when the blocks are gone.
        accumulator = wide(self.w.dtype).itemsize - self.w.dtype.itemsize
        costs = Costs(
            score=matrices * self.scores.bytes_per_score(self.dtype, gradients),
            row=width * (broad + 2 * narrow),
            one_class=width * copy,
            accumulator=width * self.w.shape[0] * accumulator if gradients else 0,
            fewest_rows=self.scores.fewest_rows(self.dtype),
            multiple=self.scores.multiple,
        )
        return plan_blocks(self.h.shape[0], self.w.shape[0], costs, self.budget, group)


class Gradients:
    """What a pass adds up: gradients of rows, classes and biases, each None where nobody asks for it."""

    def __init__(self, inputs: LossInputs, needs: tuple[bool, bool, bool], blocks: Blocks) -> None:
        h, w, b = inputs.h, inputs.w, inputs.b
        self.h = torch.empty_like(h, memory_format=torch.contiguous_format) if needs[0] else None
        self.w = room_for(w, h.shape[0], blocks) if needs[1] else None
        biased = needs[2] and b is not None
        self.b = torch.zeros(w.shape[0], dtype=wide(inputs.dtype), device=w.device) if biased else None
        self.inputs = inputs

    def add_exponentials(self, rows: slice, h: Tensor, w: Tensor, found: Exponentials, weights: Tensor | None) -> None:
        """Add those of a block that holds all classes, each row weighed. The weight goes to the narrow matrices: no
        pass over the scores."""
        scale = (found.scale if weights is None else found.scale * weights)[:, None]
        if self.h is not None:
            dh = h.new_empty(h.shape, dtype=wide(h.dtype))
            add_to_rows(dh, found.values, w, first=True)
            torch.mul(dh, scale, out=self.h[rows])
        if self.w is not None:
            add_to_classes(self.w, found.values, torch.mul(h, scale, out=torch.empty_like(h)), first=rows.start == 0)
        if self.b is not None:
            # A product with one column goes a slow way on a GPU.
            self.b += product(found.values.T, scale.to(h.dtype).expand(-1, 8).contiguous())[:, 0]

    def add_recomputed(self, rows: slice, terms: RowTerms, blocks: Blocks) -> None:
        """Add those of some rows, block of classes after block of classes, from normalisers that are known."""
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
            del g  # before the next block is made
        if self.h is not None and dh is not None:
            self.h[rows] = dh

    def add_shift(self, weights_N: Tensor) -> None:
        """Add what the normalisers owe to the centre, which was taken off the scores."""
        if self.h is not None and self.inputs.centre is not None:
            self.h += weights_N[:, None] * self.inputs.centre

    def finished(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """In the types of what they are gradients of."""
        w = None if self.w is None else self.w.to(self.inputs.w.dtype)
        b = None if self.b is None or self.inputs.b is None else self.b.to(self.inputs.b.dtype)
        return self.h, w, b


def room_for(x: Tensor, rows: int, blocks: Blocks) -> Tensor:
    """For a gradient that is summed over blocks of rows: in half precision several of them would lose digits, a single
    one is summed in one product. Zeros only where there is none to write it."""
    kept = x.dtype if blocks.rows >= rows else wide(x.dtype)
    return (torch.empty if rows else torch.zeros)(x.shape, dtype=kept, device=x.device)


Weigh = Callable[[slice, Tensor], Tensor | None]
"""Given some rows and their losses, what each of these weighs in the objective, zero without a target; None: one."""


def losses_with_gradients(
    inputs: LossInputs, weigh: Weigh, needs: tuple[bool, bool, bool], group: int = 1
) -> Gradients:
    """One walk over the rows for losses and gradients: weights are known as soon as the losses of `group` rows are."""
    blocks = inputs.blocks(group)
    found = Gradients(inputs, needs, blocks)
    every = slice(0, inputs.w.shape[0])
    one_pass = blocks.classes >= inputs.w.shape[0]
    w, b = inputs.classes(every) if one_pass else (inputs.w, inputs.b)
    for rows in blocks.over_rows(inputs.h.shape[0]):
        if one_pass:
            h = inputs.rows(rows)
            block = inputs.scores.exponentials(h, w, b, inputs.y[rows])
            found.add_exponentials(rows, h, w, block, weigh(rows, block.nll))
            del block  # before the next one is made
        else:
            nll, lse, _ = _losses(inputs, rows, blocks, None)
            weights = weigh(rows, nll)
            weights = inputs.scored(rows).to(lse.dtype) if weights is None else weights
            found.add_recomputed(rows, RowTerms(lse, weights, weights), blocks)
    return found


def losses(inputs: LossInputs, tau: float | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses and log-sum-exps of all rows, that at `tau` of the scores less their mean; without gradients."""
    mean = None
    if tau is not None:
        mean = inputs.mean()
        inputs = inputs.centred(mean)
    blocks = inputs.blocks(gradients=False)
    found = [_losses(inputs, rows, blocks, tau) for rows in blocks.over_rows(inputs.h.shape[0])]
    nll, lse, lse_tau = (_joined(inputs, [each[part] for each in found]) for part in range(3))
    if tau is None or mean is None:
        return nll, lse, None
    if inputs.centre is None:
        return nll, lse, lse_tau - inputs.shift(mean) / tau
    return nll, lse + inputs.shift(mean), lse_tau


def gradients(
    inputs: LossInputs, terms: RowTerms, needs: tuple[bool, bool, bool], tau: float | None = None
) -> Gradients:
    """Gradients from what `losses` found, at `tau` or without, and weights that came with the backward pass."""
    if tau is not None and terms.lse is not None:
        mean = inputs.mean()
        inputs = inputs.centred(mean)
        shift = inputs.shift(mean)
        if inputs.centre is not None:
            terms = replace(terms, lse=terms.lse - shift)
        elif terms.lse_tau is not None:
            terms = replace(terms, lse_tau=terms.lse_tau + shift / tau)
    blocks = inputs.blocks()
    found = Gradients(inputs, needs, blocks)
    for rows in blocks.over_rows(inputs.h.shape[0]):
        found.add_recomputed(rows, terms.of(rows), blocks)
    if terms.plain is not None and terms.target is not None and terms.plain is not terms.target:
        found.add_shift(terms.plain - terms.target)
    return found


def _losses(inputs: LossInputs, rows: slice, blocks: Blocks, tau: float | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of some rows, one block of classes after the other."""
    h = inputs.rows(rows)
    found = [
        inputs.scores.normalisers(h, *inputs.classes(classes), tau)
        for classes in blocks.over_classes(inputs.w.shape[0])
    ]
    lse, lse_tau = added([block for block, _ in found]), added([block for _, block in found])
    assert lse is not None
    y = inputs.y[rows]
    nll = lse - inputs.scores.target_scores(h, inputs.w, inputs.b, y, inputs.centre).to(lse.dtype)
    return mask_ignored(nll, y, inputs.w.shape[0]), lse, lse_tau


def added(normalisers: list[Tensor | None]) -> Tensor | None:
    """Log-sum-exps of blocks of classes as one; None where nobody asked for them."""
    found = [each for each in normalisers if each is not None]
    if len(found) < 2:
        return found[0] if found else None
    return torch.logsumexp(torch.stack(found), dim=0)


def _joined(inputs: LossInputs, parts: list[Tensor | None]) -> Tensor:
    """What blocks of rows gave, in one piece; nothing where there are no rows, or nobody asked."""
    found = [part for part in parts if part is not None]
    if not found:
        return inputs.h.new_zeros(0, dtype=wide(inputs.dtype))
    return found[0] if len(found) == 1 else torch.cat(found)
