"""Divergences of rows, computed in blocks of rows, for `linear_divergence`.

`compare_rows` has the formulas of one block in plain torch, and `triton_divergence` has them as one kernel.
`DivergenceInputs` loops over the blocks and adds up the gradients. `summed_divergence` and `row_divergences` are the
same computation for autograd. The gradients of a sum are computed in the forward pass, because the weights of the rows
are known then. Those of individual losses are computed in the backward pass, which computes the scores again.

p is the student's softmax and q the teacher's. `divergence` has the formulas.
Shapes: N rows (tokens), D dimensions, V classes. The student and the teacher may have different D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from reefknot.kernels.arguments import needs_operators
from reefknot.kernels.autograd import apply_in_loop, compute_once_differentiable, scale_gradients
from reefknot.kernels.blocks import BlockSize, even_size
from reefknot.kernels.passes import allocate_gradient
from reefknot.kernels.reference import linear_scores
from reefknot.kernels.scores import (
    accumulation_dtype,
    add_class_gradient,
    add_row_gradient,
    get_backend,
    matmul_into,
    matmul_wide,
    needs_widening,
)

Kind = Literal["forward", "reverse", "jsd"]


class Head(NamedTuple):
    """A linear classifier and the hidden states that it reads."""

    hidden: Tensor
    """Hidden states, with shape (..., D)."""
    weight: Tensor
    """One vector per class, with shape (V, D)."""
    bias: Tensor | None = None
    """One number per class, with shape (V,), or None."""


@dataclass(frozen=True)
class Options:
    """What is computed of each row."""

    kind: Kind
    beta: float
    temperature: float


# -- formulas ------------------------------------------------------------------------------------------------------


def reference_losses(student: Head, teacher: Head, options: Options) -> Tensor:
    """Return the divergence of each row, (N,), by the formulas of `divergence`, with all scores in memory."""
    student_log_probs_NV = torch.log_softmax(linear_scores(*student) / options.temperature, dim=-1)
    teacher_log_probs_NV = torch.log_softmax(linear_scores(*teacher) / options.temperature, dim=-1)
    if options.kind == "forward":
        return _reference_kl(teacher_log_probs_NV, student_log_probs_NV)
    if options.kind == "reverse":
        return _reference_kl(student_log_probs_NV, teacher_log_probs_NV)
    # The gradient of log(exp(a) + exp(b)) is NaN if both a and b are minus infinity.
    finite_student_NV, finite_teacher_NV = (
        log_probs_NV.clamp(min=torch.finfo(log_probs_NV.dtype).min)
        for log_probs_NV in (student_log_probs_NV, teacher_log_probs_NV)
    )
    log_mixture_NV = _log_mixture(finite_student_NV, finite_teacher_NV, options.beta)
    to_teacher_N = _reference_kl(teacher_log_probs_NV, log_mixture_NV)
    to_student_N = _reference_kl(student_log_probs_NV, log_mixture_NV)
    return options.beta * to_teacher_N + (1 - options.beta) * to_student_N


def _reference_kl(log_probs_NV: Tensor, other_log_probs_NV: Tensor) -> Tensor:
    """Return KL(p || q) of each row, given log p and log q. A class of probability zero under p adds zero."""
    probs_NV = log_probs_NV.exp()
    log_ratio_NV = (log_probs_NV - other_log_probs_NV).masked_fill(probs_NV == 0, 0.0)
    return (probs_NV * log_ratio_NV).sum(-1)


def _log_mixture(student_log_probs_NV: Tensor, teacher_log_probs_NV: Tensor, beta: float) -> Tensor:
    """Return log(beta q + (1 - beta) p)."""
    return torch.logaddexp(teacher_log_probs_NV + math.log(beta), student_log_probs_NV + math.log1p(-beta))


class ScoredRows(NamedTuple):
    """The scores of a block of rows of one classifier, and where to write the gradient of the scores."""

    scores: Tensor
    """h W^T without bias, (N, V), at least in float32."""
    bias: Tensor | None
    """(V,)"""
    grad_scores: Tensor | None
    """(N, V), in the type of the matrix products, not yet written. None if the gradient is not needed."""

    def log_probs(self, temperature: float) -> Tensor:
        """Return the log-probabilities, (N, V). Overwrites the scores."""
        scores_NV = self.scores if self.bias is None else self.scores.add_(self.bias)
        return torch.log_softmax(scores_NV.div_(temperature), dim=-1)

    def write_gradient(self, grad_scores_NV: Tensor | None, weight_N: Tensor | None) -> None:
        """Write the gradient of the scores, times the weight of each row."""
        if grad_scores_NV is None or weight_N is None or self.grad_scores is None:
            return
        grad_scores_NV *= weight_N[:, None]
        # A row of weight zero gets a gradient of zero, even if its scores are not finite.
        self.grad_scores.copy_(grad_scores_NV.masked_fill_((weight_N == 0)[:, None], 0.0))


def compare_rows(student: ScoredRows, teacher: ScoredRows, options: Options, weight_N: Tensor | None) -> Tensor:
    """Return the divergences of a block of rows, and write the gradients of their weighted sum. Overwrites the scores.

    Of a loss sum_v p_v f_v, where the gradient through f vanishes, the gradient of the scores is p_v (f_v - sum_v p_v
    f_v). Where only f = -log p depends on the scores, as in the forward divergence of the student, it is p - q.

    Args:
        student: The student's scores.
        teacher: The teacher's scores.
        options: What is computed of each row.
        weight_N: The weight of each row in the sum. None without gradients.
    """
    kind, beta, scale = options.kind, options.beta, 1 / options.temperature
    student_log_probs_NV = student.log_probs(options.temperature)
    teacher_log_probs_NV = teacher.log_probs(options.temperature)
    student_grad, teacher_grad = student.grad_scores is not None, teacher.grad_scores is not None
    student_probs_NV, teacher_probs_NV = student_log_probs_NV.exp(), teacher_log_probs_NV.exp()
    student_grad_NV: Tensor | None
    teacher_grad_NV: Tensor | None
    if kind == "jsd":
        log_mixture_NV = _log_mixture(student_log_probs_NV, teacher_log_probs_NV, beta)
        student_loss_N, student_grad_NV = _weigh(
            student_probs_NV, student_log_probs_NV.sub_(log_mixture_NV), (1 - beta) * scale, student_grad
        )
        teacher_loss_N, teacher_grad_NV = _weigh(
            teacher_probs_NV, teacher_log_probs_NV.sub_(log_mixture_NV), beta * scale, teacher_grad
        )
        loss_N = (1 - beta) * student_loss_N + beta * teacher_loss_N
    elif kind == "forward":
        loss_N, teacher_grad_NV = _weigh(
            teacher_probs_NV, teacher_log_probs_NV.sub_(student_log_probs_NV), scale, teacher_grad
        )
        student_grad_NV = student_probs_NV.sub_(teacher_probs_NV).mul_(scale) if student_grad else None
    else:
        loss_N, student_grad_NV = _weigh(
            student_probs_NV, student_log_probs_NV.sub_(teacher_log_probs_NV), scale, student_grad
        )
        teacher_grad_NV = teacher_probs_NV.sub_(student_probs_NV).mul_(scale) if teacher_grad else None
    student.write_gradient(student_grad_NV, weight_N)
    teacher.write_gradient(teacher_grad_NV, weight_N)
    return loss_N


def _weigh(
    student_probs_NV: Tensor, log_ratio_NV: Tensor, scale: float, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return sum_v p_v f_v and, if needed, scale p_v (f_v - sum_v p_v f_v), which overwrites f.

    A class of probability zero adds zero, although its log-ratio may not be finite.
    """
    log_ratio_NV.masked_fill_(student_probs_NV == 0, 0.0)
    mean_N = torch.linalg.vecdot(student_probs_NV, log_ratio_NV)
    return mean_N, log_ratio_NV.sub_(mean_N[:, None]).mul_(student_probs_NV).mul_(scale) if gradient else None


# -- blocks --------------------------------------------------------------------------------------------------------


class _Side:
    """One classifier in a pass over blocks of rows: its scores, and the sums of its gradients."""

    def __init__(self, classifier: Head, dtype: torch.dtype, needs_grad: Sequence[bool], block_size: BlockSize) -> None:
        hidden, weight, bias = classifier
        self.hidden, self.dtype = hidden, dtype
        self.weight, self.bias = weight.to(dtype).contiguous(), bias
        self.grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_grad[0] else None
        self.grad_weight = allocate_gradient(weight, hidden.shape[0], block_size) if needs_grad[1] else None
        self.grad_bias = None
        if needs_grad[2] and bias is not None:
            self.grad_bias = torch.zeros(bias.shape, dtype=accumulation_dtype(dtype), device=bias.device)
        self._dtypes = weight.dtype, None if bias is None else bias.dtype

    @property
    def needs_grad(self) -> bool:
        return not (self.grad_hidden is None and self.grad_weight is None and self.grad_bias is None)

    def new_gradient(self, num_rows: int) -> Tensor | None:
        """Allocate the gradient of the scores of some rows, or return None if no gradient is needed."""
        return self._new_block(num_rows, self.dtype) if self.needs_grad else None

    def scored_rows(self, rows: slice, group_grad: Tensor | None, part: slice) -> ScoredRows:
        """Return the scores of some rows, with the memory for their gradient: `part` of the rows of a group."""
        hidden_ND = self.hidden[rows].to(self.dtype)
        if needs_widening(hidden_ND, self.dtype):
            scores_NV = matmul_wide(hidden_ND, self.weight.T)
        else:
            scores_NV = self._new_block(hidden_ND.shape[0], accumulation_dtype(self.dtype))
            matmul_into(scores_NV, hidden_ND, self.weight.T)
        return ScoredRows(scores_NV, self.bias, None if group_grad is None else group_grad[part])

    def _new_block(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        """Allocate a block of rows x classes. On a GPU, padding aligns its rows for the matrix units."""
        num_classes = self.weight.shape[0]
        padded_classes = -(-num_classes // 64) * 64 if self.hidden.is_cuda else num_classes
        return self.hidden.new_empty(num_rows, padded_classes, dtype=dtype)[:, :num_classes]

    def add_gradient(self, rows: slice, grad_scores_NV: Tensor | None) -> None:
        """Add the gradients of some rows, given the gradient of their scores."""
        if grad_scores_NV is None:
            return
        if self.grad_bias is not None:
            self.grad_bias += grad_scores_NV.sum(0, dtype=self.grad_bias.dtype)
        if self.grad_hidden is not None:
            grad_hidden_ND = self.hidden.new_empty(self.grad_hidden[rows].shape, dtype=accumulation_dtype(self.dtype))
            add_row_gradient(grad_hidden_ND, grad_scores_NV, self.weight, overwrite=True)
            self.grad_hidden[rows] = grad_hidden_ND
        if self.grad_weight is not None:
            add_class_gradient(
                self.grad_weight, grad_scores_NV, self.hidden[rows].to(self.dtype), overwrite=rows.start == 0
            )

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden, weight and bias in the types of the inputs."""
        weight_dtype, bias_dtype = self._dtypes
        grad_weight = None if self.grad_weight is None else self.grad_weight.to(weight_dtype)
        grad_bias = None if self.grad_bias is None or bias_dtype is None else self.grad_bias.to(bias_dtype)
        return self.grad_hidden, grad_weight, grad_bias


@dataclass(frozen=True)
class DivergenceInputs:
    """The inputs of a pass over blocks of rows."""

    student: Head
    teacher: Head
    options: Options
    dtypes: tuple[torch.dtype, torch.dtype]
    """The types of the matrix products, of the student and of the teacher."""
    impl: str
    """`chunked` or `triton`."""
    budget: int
    """Working memory in bytes."""

    @classmethod
    def from_flat(
        cls,
        tensors: Sequence[Any],
        kind: Kind,
        beta: float,
        temperature: float,
        student_dtype: torch.dtype,
        teacher_dtype: torch.dtype,
        impl: str,
        budget: int,
    ) -> DivergenceInputs:
        """Return the inputs, given the six tensors and `flat_options`, which is how an operator of torch gets them."""
        dtypes = student_dtype, teacher_dtype
        options = Options(kind, beta, temperature)
        return cls(Head(*tensors[:3]), Head(*tensors[3:]), options, dtypes, impl, budget)

    def flat_options(self) -> tuple[str, float, float, torch.dtype, torch.dtype, str, int]:
        """Return everything but the tensors."""
        return self.options.kind, self.options.beta, self.options.temperature, *self.dtypes, self.impl, self.budget

    @property
    def loss_dtype(self) -> torch.dtype:
        return accumulation_dtype(torch.promote_types(*self.dtypes))

    def compute(self, weight_N: Tensor | None, needs_grad: Sequence[bool]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the divergence of each row, (N,), and the gradients of the six tensors.

        Args:
            weight_N: The weight of each row in the objective whose gradients are computed. None without gradients.
            needs_grad: Whether gradients are needed: of the student's hidden, weight and bias, then of the teacher's.
        """
        sizes = self._block_sizes(needs_grad)
        # Gradients are summed over groups of rows.
        group_size = BlockSize(sizes.rows_of_group, self.student.weight.shape[0])
        student = _Side(self.student, self.dtypes[0], needs_grad[:3], group_size)
        teacher = _Side(self.teacher, self.dtypes[1], needs_grad[3:], group_size)
        compare = _get_comparison(self.impl)
        losses = []
        for group in group_size.row_slices(self.student.hidden.shape[0]):
            num_rows = group.stop - group.start
            student_grad = student.new_gradient(num_rows) if weight_N is not None else None
            teacher_grad = teacher.new_gradient(num_rows) if weight_N is not None else None
            for start in range(0, num_rows, sizes.rows):
                part = slice(start, min(start + sizes.rows, num_rows))  # rows of the group
                rows = slice(group.start + part.start, group.start + part.stop)
                student_rows = student.scored_rows(rows, student_grad, part)
                teacher_rows = teacher.scored_rows(rows, teacher_grad, part)
                row_weights = None if weight_N is None else weight_N[rows]
                losses.append(compare(student_rows, teacher_rows, self.options, row_weights))
                del student_rows, teacher_rows  # free the scores before the next ones are computed
            student.add_gradient(group, student_grad)
            teacher.add_gradient(group, teacher_grad)
            del student_grad, teacher_grad
        dtype = self.loss_dtype
        loss_N = torch.cat(losses).to(dtype) if losses else self.student.hidden.new_zeros(0, dtype=dtype)
        return loss_N, (*student.gradients(), *teacher.gradients())

    def _block_sizes(self, needs_grad: Sequence[bool]) -> _BlockSizes:
        """Return how many rows are computed at once, with all their classes."""
        num_rows, num_classes = max(self.student.hidden.shape[0], 1), self.student.weight.shape[0]
        if self.impl != "triton":
            num_matrices = 9 if self.options.kind == "jsd" else 7  # they exist at the same time in `compare_rows`
            num_matrices += any(needs_grad[:3]) + any(needs_grad[3:])
            row_bytes = num_classes * num_matrices * self.loss_dtype.itemsize
            rows = even_size(num_rows, max(self.budget // row_bytes, 1), multiple=8)
            return _BlockSizes(rows, rows)
        grad_bytes = any(needs_grad[:3]) * self.dtypes[0].itemsize + any(needs_grad[3:]) * self.dtypes[1].itemsize
        accumulator_bytes = sum(
            head.weight.shape[1] * accumulation_dtype(head.weight.dtype).itemsize
            for head, needs_weight in ((self.student, needs_grad[1]), (self.teacher, needs_grad[4]))
            if needs_weight and accumulation_dtype(head.weight.dtype) != head.weight.dtype
        )
        return _choose_block_sizes(num_rows, self.budget / max(num_classes, 1), grad_bytes, accumulator_bytes)


class _BlockSizes(NamedTuple):
    """Scores exist for `rows` rows at a time, and their gradients for a group of rows."""

    rows: int
    rows_of_group: int


def _choose_block_sizes(num_rows: int, budget: float, grad_bytes: int, accumulator_bytes: int) -> _BlockSizes:
    """Return block sizes for scores that the Triton kernel compares.

    The gradients of the scores take less memory than both scores in float32, so a group of rows can be several times as
    large as a block. Products with more rows are faster, and the gradients of the classes are summed less often.

    Args:
        num_rows: Number of rows.
        budget: Working memory in bytes, divided by the number of classes.
        grad_bytes: Bytes of the gradients per row and class.
        accumulator_bytes: Bytes per class in which the gradients of half-precision class vectors are summed if there is
            more than one group. A single group can use this memory.
    """
    score_bytes, min_rows, multiple = 8, 512, 128
    bytes_without_accumulator = budget + accumulator_bytes - num_rows * grad_bytes
    if bytes_without_accumulator >= min(num_rows, min_rows) * score_bytes:
        max_rows = int(bytes_without_accumulator // score_bytes)
        return _BlockSizes(even_size(num_rows, max_rows, multiple), num_rows)
    max_group = num_rows
    if grad_bytes:
        max_group = int((budget - min(num_rows, min_rows) * score_bytes) // grad_bytes)
        if max_group < min(num_rows, 2 * min_rows):  # the memory is small: blocks and groups of the same size
            max_group = max(int(budget // (score_bytes + grad_bytes)), 1)
            rows = even_size(num_rows, max_group, multiple)
            return _BlockSizes(rows, rows)
    group = even_size(num_rows, max_group, multiple)
    max_rows = max(int((budget - group * grad_bytes) // score_bytes), 1)
    return _BlockSizes(even_size(group, max_rows, multiple), group)


def _get_comparison(impl: str) -> Callable[[ScoredRows, ScoredRows, Options, Tensor | None], Tensor]:
    """Return the function that compares the rows of a block."""
    if impl == "triton":
        from reefknot.kernels import triton_divergence

        return triton_divergence.compare_rows
    return compare_rows


# -- autograd ------------------------------------------------------------------------------------------------------


def summed_divergence(inputs: DivergenceInputs, weight_N: Tensor) -> Tensor:
    """Return the weighted sum of the divergences."""
    if needs_operators(weight_N):
        from reefknot.kernels import ops

        return ops.summed_divergence(inputs, weight_N)
    tensors = (*inputs.student, *inputs.teacher)
    needs_grad = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    arguments = (*tensors, weight_N, inputs.flat_options(), needs_grad)
    total: Tensor = _SummedDivergenceFunction.apply(*arguments)[0]  # type: ignore[no-untyped-call]
    return total


def row_divergences(inputs: DivergenceInputs) -> Tensor:
    """Return the divergence of each row, (N,)."""
    if needs_operators(inputs.student.hidden):
        from reefknot.kernels import ops

        return ops.row_divergences(inputs)
    arguments = (*inputs.student, *inputs.teacher, inputs.flat_options())
    losses_N: Tensor = _RowDivergencesFunction.apply(*arguments)[0]  # type: ignore[no-untyped-call]
    return losses_N


class _SummedDivergenceFunction(torch.autograd.Function):
    """The weighted sum of the divergences, and its gradients, which the same pass computes."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        *tensors, weight_N, options, needs_grad = arguments
        inputs = DivergenceInputs.from_flat(tensors, *options)
        with torch.autocast(weight_N.device.type, enabled=False):
            loss_N, gradients = inputs.compute(weight_N if any(needs_grad) else None, needs_grad)
        return weighted_sum(loss_N, weight_N), *gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        *tensors, ctx.options, ctx.needs_grad = inputs
        # The gradients are attributes, not saved tensors, because the backward pass scales them in place.
        ctx.gradients = output[1:]
        ctx.mark_non_differentiable(*(gradient for gradient in ctx.gradients if gradient is not None))
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if grad_total is None:
            return (None,) * 9
        # The gradients are scaled in place, so they are used once. A second backward pass computes them again.
        gradients, ctx.gradients = ctx.gradients, None
        *tensors, weight_N = ctx.saved_tensors
        if gradients is None:
            with torch.autocast(weight_N.device.type, enabled=False):
                gradients = DivergenceInputs.from_flat(tensors, *ctx.options).compute(weight_N, ctx.needs_grad)[1]
        gradients = scale_gradients(gradients, grad_total, tensors, get_backend(ctx.options[-2]))
        return (*gradients, None, None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        return apply_in_loop(_SummedDivergenceFunction, info.batch_size, in_dims, arguments)


def weighted_sum(losses_N: Tensor, weight_N: Tensor) -> Tensor:
    """Return the weighted sum. A row of weight zero adds zero, even if its loss is not finite."""
    return (losses_N * weight_N).where(weight_N != 0, 0.0).sum()


class _RowDivergencesFunction(torch.autograd.Function):
    """One divergence per row. The weights of the rows are known in the backward pass."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor]:
        *tensors, options = arguments
        with torch.autocast(tensors[0].device.type, enabled=False):
            loss_N, _ = DivergenceInputs.from_flat(tensors, *options).compute(None, [False] * 6)
        return (loss_N,)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor]) -> None:
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Any, ...]:
        needs_grad, options = ctx.needs_input_grad[:6], ctx.options

        def compute(*tensors: Any) -> tuple[Tensor | None, ...]:
            *inputs, grad_of_rows = tensors
            with torch.autocast(grad_of_rows.device.type, enabled=False):
                return DivergenceInputs.from_flat(inputs, *options).compute(grad_of_rows, needs_grad)[1]

        return (*compute_once_differentiable(compute, *ctx.saved_tensors, grad_N), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        return apply_in_loop(_RowDivergencesFunction, info.batch_size, in_dims, arguments)
