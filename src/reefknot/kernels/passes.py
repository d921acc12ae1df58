"""Loop over blocks of scores to compute losses and gradients, without ever storing all N x V scores.

Three functions make a pass over the rows of `LossInputs`:

    compute_losses                   losses and log-sum-exps of all rows
    compute_losses_with_gradients    losses and gradients in one pass, if the weights of the rows are known
    compute_gradients                gradients in the backward pass, from the log-sum-exps of `compute_losses`

If memory is short, the second computes scores twice, except those that `kept_scores` has memory for.

The autograd functions in `autograd` call them. A backend (`scores`, `triton_scores`) computes each block, and
`GradientSums` adds up the gradients of the blocks.

`weight` holds one vector per class. `nll` stands for negative log-likelihoods (the losses), `lse` for log-sum-exps of
the scores, and `lse_tau` for log-sum-exps at temperature tau. The gradient of `x` is `grad_x`.
Shapes: N rows (tokens), D dimensions, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reefknot.kernels.blocks import MIN_CLASSES, BlockCosts, BlockSize, choose_block_size
from reefknot.kernels.columns import ClassVectors, JoinedColumns
from reefknot.kernels.kept_scores import KeptScores, choose_kept_layout
from reefknot.kernels.scores import (
    IDENTITY,
    GradientTerms,
    LossAndGradient,
    RowSummary,
    ScoreTransform,
    SummaryRequest,
    TorchBackend,
    accumulation_dtype,
    add_class_gradient,
    add_row_gradient,
    at_least_float32,
    is_class,
    mask_ignored,
    matmul_wide,
    multiply_where_positive,
    safe_class_ids,
)

NeedsGrad = tuple[bool, bool, bool]
"""Whether the gradients of hidden, weight and bias are needed."""


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a pass, and how to compute the scores."""

    hidden: Tensor
    """Hidden states, (N, D)."""
    weight: ClassVectors
    """Class vectors, (V, D)."""
    bias: Tensor | None
    """Biases, (V,)."""
    targets: Tensor
    """Targets, (N,)."""
    dtype: torch.dtype
    """The type of the matrix products."""
    backend: TorchBackend
    budget: int
    """Working memory in bytes."""
    centre: Tensor | None = None
    """A vector that is subtracted from every class vector before rounding. This lowers all scores of a row by the same
    amount, which does not change a softmax. Trained class vectors have a large mean. Without the subtraction, half
    precision would spend its digits on the mean, and a tempered softmax needs all digits."""
    transform: ScoreTransform = IDENTITY
    class_weight: Tensor | None = None
    """The weight of each class in `RowSummary.total`, (V,). None stands for weights of 1."""
    mean: Tensor | None = None
    """The mean of all class vectors, (D,), if other processes have some of them. None: it is computed from `weight`."""

    @property
    def num_rows(self) -> int:
        return self.hidden.shape[0]

    @property
    def num_classes(self) -> int:
        return self.weight.shape[0]

    def mean_class_vector(self) -> Tensor:
        """Return the mean of the class vectors, (D,)."""
        if self.mean is not None:
            return self.mean
        assert isinstance(self.weight, Tensor)
        if accumulation_dtype(self.weight.dtype) == self.weight.dtype:
            return self.weight.mean(0)
        # Matrix units sum half-precision numbers faster than a reduction does.
        return matmul_wide(self.weight.new_ones(8, self.num_classes), self.weight)[0] / self.num_classes

    def subtract_mean(self, mean_D: Tensor) -> LossInputs:
        """Return inputs whose class vectors have this mean subtracted.

        Class vectors that are already in half precision are not changed, because the difference would have to be
        rounded again.
        """
        if accumulation_dtype(self.weight.dtype) != self.weight.dtype:
            return self
        return replace(self, centre=mean_D)

    def mean_scores(self, mean_D: Tensor) -> Tensor:
        """Return the mean score of each row, without the bias, (N,), given the mean of the class vectors."""
        return at_least_float32(self.hidden.to(self.dtype)) @ mean_D.to(accumulation_dtype(self.dtype))

    def hidden_block(self, rows: slice) -> Tensor:
        """Return some of the hidden states in the type of the matrix products."""
        return self.hidden[rows].to(self.dtype).contiguous()

    def class_block(self, classes: slice) -> tuple[Tensor, Tensor | None]:
        """Return vectors and biases of some classes in the types of the computation, copied only if necessary."""
        if self.centre is None:
            weight = self.weight[classes].to(self.dtype).contiguous()
        else:
            vectors = self.weight[classes]
            weight = torch.sub(vectors, self.centre, out=vectors.new_empty(vectors.shape, dtype=self.dtype))
        bias = None if self.bias is None else self.bias[classes].to(accumulation_dtype(self.dtype))
        return weight, bias

    def trained_hidden(self, hidden: Tensor) -> Tensor:
        """Return the columns of some hidden states that the gradient of the class vectors needs."""
        return hidden[:, self.weight.trained].contiguous() if isinstance(self.weight, JoinedColumns) else hidden

    def class_weight_block(self, classes: slice) -> Tensor | None:
        """Return the weights of some classes in the type of the sums."""
        return None if self.class_weight is None else self.class_weight[classes].to(accumulation_dtype(self.dtype))

    def target_scores(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the transformed scores of the targets of some rows, with any value for a row without a target."""
        if isinstance(self.weight, Tensor):
            return self.backend.target_scores(hidden, self.weight, self.bias, targets, self.centre, self.transform)
        # Join only the vectors of the targets.
        classes = safe_class_ids(targets, self.num_classes)
        scores = (at_least_float32(hidden) * self.weight[classes].to(hidden.dtype)).sum(-1)
        if self.bias is not None:
            scores = scores + self.bias[classes].to(scores.dtype)
        return self.transform.apply_in_place(scores)

    def has_target(self, rows: slice) -> Tensor:
        """Return a mask of the rows whose target is a class."""
        return is_class(self.targets[rows], self.num_classes)

    def block_size(
        self, group: int = 1, gradients: bool = True, matrices: int = 1, all_rows: bool = False
    ) -> BlockSize:
        """Return a block size that fits into the budget.

        Args:
            group: Number of consecutive rows that must be in the same block.
            gradients: The blocks are for gradients and not only for losses.
            matrices: Number of matrices of the size of the block that exist at the same time.
            all_rows: Prefer blocks with all rows, for gradients with known normalisers (see `choose_block_size`).
        """
        costs = self.block_costs(gradients, matrices)
        return choose_block_size(self.num_rows, self.num_classes, costs, self.budget, group, all_rows)

    def block_costs(self, gradients: bool = True, matrices: int = 1) -> BlockCosts:
        """Return the memory that a block takes. See `block_size` for the arguments."""
        dim = self.hidden.shape[1]
        compute_bytes, sum_bytes = self.dtype.itemsize, accumulation_dtype(self.dtype).itemsize
        copy_bytes = 0
        if self.dtype != self.weight.dtype or self.centre is not None:
            copy_bytes += compute_bytes
        if isinstance(self.weight, JoinedColumns):
            copy_bytes += self.weight.dtype.itemsize
        if self.backend.needs_widening(self.hidden, self.dtype):
            copy_bytes += sum_bytes
        # The gradient in the type of the classes does not count: it is needed anyway, and is made after the blocks are
        # freed.
        accumulator_bytes = accumulation_dtype(self.weight.dtype).itemsize - self.weight.dtype.itemsize
        return BlockCosts(
            bytes_per_score=matrices * self.backend.bytes_per_score(self.dtype, gradients),
            bytes_per_row=dim * (sum_bytes + 2 * compute_bytes),
            bytes_per_class=dim * copy_bytes,
            accumulator_bytes=dim * self.num_classes * accumulator_bytes if gradients else 0,
            min_rows=self.backend.min_rows(self.dtype),
            size_multiple=self.backend.size_multiple,
        )


# -- the passes ----------------------------------------------------------------------------------------------------


def compute_losses(inputs: LossInputs, request: SummaryRequest) -> tuple[Tensor, RowSummary]:
    """Return the losses of all rows, (N,), and what `request` asks for, which must include the log-sum-exps."""
    mean_D = None
    if request.tau is not None:
        mean_D = inputs.mean_class_vector()
        inputs = inputs.subtract_mean(mean_D)
    block_size = inputs.block_size(gradients=False)
    blocks = [
        _compute_losses_of_rows(inputs, rows, block_size, request) for rows in block_size.row_slices(inputs.num_rows)
    ]
    nll = _concatenate(inputs, [block_nll for block_nll, _ in blocks])
    summary = RowSummary(
        *(
            _concatenate_if_computed(inputs, request, [block for _, block in blocks], name)
            for name in RowSummary._fields
        )
    )
    if request.tau is None or mean_D is None:
        return nll, summary
    assert summary.lse is not None
    assert summary.lse_tau is not None
    # `lse` is for the scores, and `lse_tau` for the scores minus their mean. With a centre, both were computed for the
    # scores minus their mean, and without a centre, both for the scores. So one of them is corrected here.
    if inputs.centre is None:
        return nll, summary._replace(lse_tau=summary.lse_tau - inputs.mean_scores(mean_D) / request.tau)
    return nll, summary._replace(lse=summary.lse + inputs.mean_scores(mean_D))


RowWeigher = Callable[[slice, Tensor], Tensor | None]
"""A function of (rows, losses of the rows) that returns the weight of each row in the objective. The weight is zero for
a row without a target. None stands for weights of 1."""


def compute_losses_with_gradients(
    inputs: LossInputs, weigh_rows: RowWeigher, needs_grad: NeedsGrad, group: int = 1
) -> GradientSums:
    """Compute losses and gradients in one pass over the rows.

    Args:
        inputs: The inputs of the pass.
        weigh_rows: Called with the losses of each block of rows. It returns the weights of the rows.
        needs_grad: Whether the gradients of hidden, weight and bias are needed.
        group: Number of consecutive rows that `weigh_rows` needs at once.
    """
    block_size, spare_blocks = _choose_layout(inputs, needs_grad, group)
    sums = GradientSums(inputs, needs_grad, block_size)
    if block_size.classes >= inputs.num_classes:
        weight, bias = inputs.class_block(slice(0, inputs.num_classes))
        for rows in block_size.row_slices(inputs.num_rows):
            hidden = inputs.hidden_block(rows)
            block = inputs.backend.loss_and_gradient(hidden, weight, bias, inputs.targets[rows], inputs.transform)
            sums.add_block(rows, hidden, weight, block, weigh_rows(rows, block.nll))
            del block  # free it before the next one is computed
        return sums
    for rows in block_size.row_slices(inputs.num_rows):
        kept = None
        if sums.grad_weight is not None and rows.start == 0:
            kept = KeptScores(inputs, rows, sums.grad_weight, block_size, spare_blocks)
        nll, summary = _compute_losses_of_rows(inputs, rows, block_size, SummaryRequest(), kept)
        lse = summary.lse
        assert lse is not None
        row_weights = weigh_rows(rows, nll)
        if row_weights is None:
            row_weights = inputs.has_target(rows).to(lse.dtype)
        terms = GradientTerms(lse, row_weights, row_weights, transform=inputs.transform)
        sums.add_recomputed_rows(rows, terms, block_size, kept)
    return sums


def _choose_layout(inputs: LossInputs, needs_grad: NeedsGrad, group: int) -> tuple[BlockSize, int]:
    """Return the size of blocks for losses and gradients, and how many blocks of scores `KeptScores` may allocate."""
    block_size = inputs.block_size(group)
    operations_per_byte = inputs.backend.operations_per_byte(inputs.dtype)
    _, needs_weight, _ = needs_grad
    if block_size.classes >= inputs.num_classes or operations_per_byte is None or not needs_weight:
        return block_size, 0
    layout = choose_kept_layout(
        inputs.num_rows,
        inputs.num_classes,
        inputs.hidden.shape[1],
        inputs.block_costs(),
        inputs.budget,
        inputs.backend.kept_bytes(1, MIN_CLASSES, inputs.dtype) / MIN_CLASSES,
        _gradient_dim(inputs.weight) * _gradient_dtype(inputs.weight).itemsize,
        operations_per_byte,
    )
    return (block_size, 0) if layout is None else (layout.block_size, layout.spare_blocks)


def compute_gradients(
    inputs: LossInputs, terms: GradientTerms, needs_grad: NeedsGrad, tau: float | None = None
) -> GradientSums:
    """Compute gradients from the results of `compute_losses` and the weights that the backward pass receives."""
    if tau is not None and terms.lse is not None:
        mean_D = inputs.mean_class_vector()
        inputs = inputs.subtract_mean(mean_D)
        shift = inputs.mean_scores(mean_D)
        # Undo what `compute_losses` did last, so that both log-sum-exps match the scores that are computed again.
        if inputs.centre is not None:
            terms = replace(terms, lse=terms.lse - shift)
        elif terms.lse_tau is not None:
            terms = replace(terms, lse_tau=terms.lse_tau + shift / tau)
    block_size = inputs.block_size(all_rows=True)
    sums = GradientSums(inputs, needs_grad, block_size)
    for rows in block_size.row_slices(inputs.num_rows):
        sums.add_recomputed_rows(rows, terms.select(rows), block_size)
    plain, target = terms.plain_weight, terms.target_weight
    if plain is not None and target is not None and plain is not target:
        sums.add_centre_gradient(plain - target)
    return sums


def _compute_losses_of_rows(
    inputs: LossInputs, rows: slice, block_size: BlockSize, request: SummaryRequest, kept: KeptScores | None = None
) -> tuple[Tensor, RowSummary]:
    """Return losses and summaries of some rows, computed one block of classes after the other.

    If `kept` is given, the blocks that it has memory for are added to it. Then `request` must ask for nothing but the
    log-sum-exps.
    """
    hidden = inputs.hidden_block(rows)
    blocks = []
    for classes in block_size.class_slices(inputs.num_classes):
        weight, bias = inputs.class_block(classes)
        kept_lse = None if kept is None else kept.add(classes, hidden, weight, bias)
        if kept_lse is not None:
            blocks.append(RowSummary(kept_lse))
            continue
        class_weight = inputs.class_weight_block(classes)
        block = inputs.backend.summarise(hidden, weight, bias, request, inputs.transform, class_weight)
        if block.best_class is not None:
            block = block._replace(best_class=block.best_class + classes.start)
        blocks.append(block)
    summary = combine_summaries(blocks)
    assert summary.lse is not None
    targets = inputs.targets[rows]
    target_scores = inputs.target_scores(hidden, targets)
    nll = summary.lse - target_scores.to(summary.lse.dtype)
    return mask_ignored(nll, targets, inputs.num_classes), summary


def combine_summaries(blocks: list[RowSummary]) -> RowSummary:
    """Return the summary of all classes, given the summaries of blocks of classes."""
    if len(blocks) == 1:
        return blocks[0]
    lse = combine_normalisers([block.lse for block in blocks])
    lse_tau = combine_normalisers([block.lse_tau for block in blocks])
    expected = total = best_score = best_class = None
    if blocks[0].expected is not None and lse is not None:
        # A block counts by its share of the probability. It has no share if all its scores are minus infinity. The
        # shares have rounding errors, so they multiply differences from the log-sum-exp, which are small.
        shares = torch.stack([block.lse - lse for block in blocks if block.lse is not None]).exp_()
        differences = torch.stack([block.expected - lse for block in blocks if block.expected is not None])
        expected = lse + multiply_where_positive(shares, differences).sum(0)
    if blocks[0].total is not None:
        total = torch.stack([block.total for block in blocks if block.total is not None]).sum(0)
    if blocks[0].best_score is not None:
        best_scores = torch.stack([block.best_score for block in blocks if block.best_score is not None])
        best_classes = torch.stack([block.best_class for block in blocks if block.best_class is not None])
        best_score, best_block = best_scores.max(0)
        best_class = best_classes.gather(0, best_block[None])[0]
    return RowSummary(lse, lse_tau, expected, total, best_score, best_class)


def combine_normalisers(normalisers: list[Tensor | None]) -> Tensor | None:
    """Return the log-sum-exps over all classes, given those of blocks of classes. None if they were not computed."""
    computed = [lse for lse in normalisers if lse is not None]
    if len(computed) < 2:
        return computed[0] if computed else None
    return torch.logsumexp(torch.stack(computed), dim=0)


def _concatenate_if_computed(
    inputs: LossInputs, request: SummaryRequest, blocks: list[RowSummary], name: str
) -> Tensor | None:
    """Concatenate one field of the summaries of blocks of rows. None if `request` does not ask for it."""
    is_requested = {
        "lse": request.lse,
        "lse_tau": request.tau is not None,
        "expected": request.expected,
        "total": request.total,
        "best_score": request.best,
        "best_class": request.best,
    }[name]
    if not is_requested:
        return None
    concatenated = _concatenate(inputs, [getattr(block, name) for block in blocks])
    return concatenated.long() if name == "best_class" else concatenated


def _concatenate(inputs: LossInputs, results: list[Tensor]) -> Tensor:
    """Concatenate the results of blocks of rows. Return an empty tensor if there are no rows."""
    if not results:
        return inputs.hidden.new_zeros(0, dtype=accumulation_dtype(inputs.dtype))
    return results[0] if len(results) == 1 else torch.cat(results)


# -- sums of gradients ---------------------------------------------------------------------------------------------


class GradientSums:
    """Gradients of hidden, weight and bias, summed over the blocks of a pass; None if not needed."""

    def __init__(self, inputs: LossInputs, needs_grad: NeedsGrad, block_size: BlockSize) -> None:
        needs_hidden, needs_weight, needs_bias = needs_grad
        hidden, weight = inputs.hidden, inputs.weight
        self.inputs = inputs
        self.grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        self.grad_weight = allocate_gradient(weight, inputs.num_rows, block_size) if needs_weight else None
        self.grad_bias = None
        if needs_bias and inputs.bias is not None:
            self.grad_bias = torch.zeros(
                inputs.num_classes, dtype=accumulation_dtype(inputs.dtype), device=weight.device
            )

    def add_block(
        self, rows: slice, hidden: Tensor, weight: Tensor, block: LossAndGradient, row_weights: Tensor | None
    ) -> None:
        """Add the gradients of a block that has all classes, with a weight for each row."""
        scale = block.scale if row_weights is None else block.scale * row_weights
        grad_hidden = self._new_row_gradient(hidden)
        scaled_hidden = self._scale_hidden(hidden, scale)
        classes = slice(0, self.inputs.num_classes)
        self._add_products(classes, block.unscaled, weight, grad_hidden, scaled_hidden, scale, first=rows.start == 0)
        if self.grad_hidden is not None and grad_hidden is not None:
            torch.mul(grad_hidden, scale[:, None], out=self.grad_hidden[rows])

    def add_recomputed_rows(
        self, rows: slice, terms: GradientTerms, block_size: BlockSize, kept: KeptScores | None = None
    ) -> None:
        """Add the gradients of some rows, one block of classes after the other, with known normalisers.

        Scores in `kept` are not computed again. Then `terms` must have nothing but weights of the rows.
        """
        inputs = self.inputs
        hidden = inputs.hidden_block(rows)
        grad_hidden = self._new_row_gradient(hidden)
        num_kept = 0
        if kept is not None and kept.num_classes:
            num_kept = kept.num_classes
            self._add_kept_blocks(kept, terms, hidden, grad_hidden)
        trained_hidden = inputs.trained_hidden(hidden)
        for classes in block_size.class_slices(inputs.num_classes):
            if classes.start < num_kept:
                continue
            weight, bias = inputs.class_block(classes)
            targets = inputs.targets[rows] - classes.start
            class_weight = inputs.class_weight_block(classes) if terms.total_weight is not None else None
            grad_scores, grad_bias = inputs.backend.score_gradient(
                hidden, weight, bias, targets, terms, self.grad_bias is not None, class_weight
            )
            if grad_hidden is not None:
                add_row_gradient(grad_hidden, grad_scores, weight, overwrite=classes.start == 0)
            if self.grad_weight is not None:
                add_class_gradient(self.grad_weight[classes], grad_scores, trained_hidden, overwrite=rows.start == 0)
            if self.grad_bias is not None and grad_bias is not None:
                self.grad_bias[classes] += grad_bias
            del grad_scores  # free it before the next block is computed
        if self.grad_hidden is not None and grad_hidden is not None:
            self.grad_hidden[rows] = grad_hidden

    def _add_kept_blocks(
        self, kept: KeptScores, terms: GradientTerms, hidden: Tensor, grad_hidden: Tensor | None
    ) -> None:
        """Add the gradients of the first rows through the kept blocks."""
        assert terms.lse is not None
        scale = kept.scale(terms.lse)
        if terms.plain_weight is not None:
            scale *= terms.plain_weight
        scaled_hidden = self._scale_hidden(hidden, scale)
        for classes, grad_scores in kept.gradients(terms.lse):
            weight, _ = self.inputs.class_block(classes)
            self._add_products(classes, grad_scores, weight, grad_hidden, scaled_hidden, scale, first=True)
        if grad_hidden is not None:
            grad_hidden *= scale[:, None]

    def _new_row_gradient(self, hidden: Tensor) -> Tensor | None:
        """Allocate the gradient of some rows, in the type of the sums. None if it is not needed."""
        if self.grad_hidden is None:
            return None
        return hidden.new_empty(hidden.shape, dtype=accumulation_dtype(hidden.dtype))

    def _scale_hidden(self, hidden: Tensor, scale: Tensor) -> Tensor | None:
        """Return the scaled hidden states that the gradient of the classes needs. None if it is not needed."""
        if self.grad_weight is None:
            return None
        trained_hidden = self.inputs.trained_hidden(hidden)
        return torch.mul(trained_hidden, scale[:, None], out=torch.empty_like(trained_hidden))

    def _add_products(
        self,
        classes: slice,
        unscaled: Tensor,
        weight: Tensor,
        grad_hidden: Tensor | None,
        scaled_hidden: Tensor | None,
        scale: Tensor,
        first: bool,
    ) -> None:
        """Add the gradients of a block whose rows have a common scale for all classes.

        The scale is multiplied into the hidden states, and by the caller into their gradient, not into the scores,
        which saves a pass over them.

        Args:
            classes: The classes of the block.
            unscaled: The gradient of the scores, divided by `scale`.
            weight: The class vectors of the block.
            grad_hidden: The sum over the classes of the gradient of the rows, divided by `scale`.
            scaled_hidden: The hidden states times `scale`.
            scale: One factor per row.
            first: Whether these are the first rows of these classes.
        """
        if grad_hidden is not None:
            add_row_gradient(grad_hidden, unscaled, weight, overwrite=classes.start == 0)
        if self.grad_weight is not None and scaled_hidden is not None:
            add_class_gradient(self.grad_weight[classes], unscaled, scaled_hidden, overwrite=first)
        if self.grad_bias is not None:
            # A product with a single column is slow on a GPU.
            scale_N8 = scale.to(unscaled.dtype)[:, None].expand(-1, 8).contiguous()
            self.grad_bias[classes] += matmul_wide(unscaled.T, scale_N8)[:, 0]

    def add_centre_gradient(self, weights_N: Tensor) -> None:
        """Add the gradient that reaches the rows through the centre, which was subtracted from the class vectors."""
        if self.grad_hidden is not None and self.inputs.centre is not None:
            self.grad_hidden += weights_N[:, None] * self.inputs.centre

    def in_input_dtypes(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden, weight (its trained columns) and bias in the types of the inputs."""
        grad_weight = None if self.grad_weight is None else self.grad_weight.to(_gradient_dtype(self.inputs.weight))
        grad_bias = (
            None if self.grad_bias is None or self.inputs.bias is None else self.grad_bias.to(self.inputs.bias.dtype)
        )
        return self.grad_hidden, grad_weight, grad_bias


def allocate_gradient(x: ClassVectors, num_rows: int, block_size: BlockSize) -> Tensor:
    """Allocate the gradient of `x`, or of its trained columns, which is summed over blocks of rows.

    The sum of several blocks would lose digits in half precision, so it has a wider type. A single block is one product
    and needs no sum. The tensor is filled with zeros only if there are no rows, because nothing else would write it.
    """
    dtype = _gradient_dtype(x)
    dtype = dtype if block_size.rows >= num_rows else accumulation_dtype(dtype)
    allocate = torch.empty if num_rows else torch.zeros
    return allocate(x.shape[0], _gradient_dim(x), dtype=dtype, device=x.device)


def _gradient_dim(weight: ClassVectors) -> int:
    """Return the number of columns that get a gradient."""
    return weight.trained.stop - weight.trained.start if isinstance(weight, JoinedColumns) else weight.shape[1]


def _gradient_dtype(weight: ClassVectors) -> torch.dtype:
    return weight.gradient_dtype if isinstance(weight, JoinedColumns) else weight.dtype
