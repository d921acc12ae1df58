"""Divergence between two linear classifiers over the same classes, for distillation.

`linear_divergence` is the function to call. It compares a student's softmax p with a teacher's softmax q, row by row:

    forward    KL(q || p) = sum_v q_v (log q_v - log p_v)          the student covers everything the teacher does
    reverse    KL(p || q) = sum_v p_v (log p_v - log q_v)          the student keeps to what the teacher finds probable
    jsd        beta KL(q || m) + (1 - beta) KL(p || m), with m = beta q + (1 - beta) p

It checks its arguments and calls `summed_divergence` or `row_divergences` of `divergence_passes`, which computes both
score matrices in blocks of rows, so the N x V scores never exist at once.

Shapes: N rows (tokens), D dimensions, V classes. The student and the teacher may have different D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import ArgumentError
from reefknot.kernels.arguments import (
    check_devices,
    check_float_tensor,
    check_is_number,
    check_is_tensor,
    check_number,
    choose,
    has_integers,
    is_capturing,
    needs_operators,
)
from reefknot.kernels.choice import Impl, resolve_impl
from reefknot.kernels.divergence_passes import (
    DivergenceInputs,
    Head,
    Kind,
    Options,
    reference_losses,
    row_divergences,
    summed_divergence,
    weighted_sum,
)
from reefknot.kernels.reference import compute_dtype
from reefknot.kernels.scores import accumulation_dtype

Reduction = Literal["mean", "sum", "none"]
_NAME = "linear_divergence"


def linear_divergence(
    student: Sequence[Tensor | None],
    teacher: Sequence[Tensor | None],
    kind: Kind = "forward",
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    reduction: Reduction = "mean",
    classes: Tensor | None = None,
    teacher_rows: Tensor | None = None,
    teacher_grad: bool = False,
    impl: Impl | None = None,
    memory: float | None = None,
) -> Tensor:
    """Compute the divergence between the softmaxes of two linear classifiers without storing all scores at once.

        student, teacher = (h_student, lm_head.weight), (h_teacher, teacher_head.weight)
        loss = rk.linear_divergence(student, teacher, temperature=2.0)     # a scalar; gradients reach the student

    The student and the teacher score the same classes, but their hidden states may have different sizes. The gradients
    are exact.

    Args:
        student: The student's (hidden, weight) or (hidden, weight, bias), with shapes (..., D), (V, D) and (V,).
        teacher: The teacher's, with shapes (..., D'), (V, D') and (V,). By default no gradient reaches it.
        kind: `forward` is KL(teacher || student), `reverse` is KL(student || teacher), and `jsd` is the generalised
            Jensen-Shannon divergence.
        beta: The teacher's share in the mixture of `jsd`, above 0 and below 1.
        temperature: Both classifiers' scores are divided by this number. The divergence is not multiplied by its
            square, which keeps gradients comparable between temperatures; do that yourself if you want it.
        mask: True for rows that count, with the shape of the student's `hidden` without its last dimension. Default:
            all rows count.
        reduction: `mean` over the rows that count, `sum`, or `none` for one divergence per row (zero for rows that do
            not count).
        classes: Ids of the classes to compare, with shape (C,), such as the vocabulary of a draft model. The softmaxes
            of both sides are over these classes only.
        teacher_rows: For each row of the student, the index of the teacher's row. The teacher's `hidden` is then (M,
            D'), and rows may share one of its rows. Default: row n is compared with row n.
        teacher_grad: Compute gradients of the teacher's tensors, too.
        impl: `reference` stores all scores, and has second derivatives. `chunked` computes blocks of rows in plain
            torch, and `triton` compares the rows of a block in one kernel, on a GPU. The default is the choice of
            `using`.
        memory: Working memory in MiB, not counting inputs and gradients. The default is the choice of `using`.

    Returns:
        The mean or the sum, with shape (), or one divergence per row; at least in float32.
    """
    left, right = _check_head(student, "student"), _check_head(teacher, "teacher")
    _check_settings(kind, beta, temperature, reduction)
    shape = left.hidden.shape[:-1]
    _check_rows(left, right, mask, teacher_rows)
    if classes is not None:
        _check_classes(classes, left.weight)
        left, right = _restrict(left, classes.long()), _restrict(right, classes.long())
    if not teacher_grad:
        right = Head(*(None if tensor is None else tensor.detach() for tensor in right))  # type: ignore[arg-type]
    left, right = _flatten(left), _flatten(right)
    if teacher_rows is not None:
        right = _repeat_rows(right, teacher_rows.reshape(-1).long())
    mask_N = None if mask is None else mask.reshape(-1)
    choice = choose(impl, memory)
    options = Options(kind, float(beta), float(temperature))
    if choice.impl == "reference":
        losses_N = reference_losses(left, right, options)
        losses_N = losses_N if mask_N is None else losses_N.where(mask_N, 0.0)
        if reduction == "none":
            return losses_N.view(shape)
        return weighted_sum(losses_N, _row_weights(left.hidden, mask_N, reduction))
    dtypes = compute_dtype(left.hidden, left.weight), compute_dtype(right.hidden, right.weight)
    device = left.hidden.device
    impls = {resolve_impl(choice, device, dtype) for dtype in dtypes}
    impl = "triton" if impls == {"triton"} else "chunked"
    inputs = DivergenceInputs(left, right, options, dtypes, impl, choice.budget(device))
    if reduction == "none":
        losses_N = row_divergences(inputs)
        return (losses_N if mask_N is None else losses_N.where(mask_N, 0.0)).view(shape)
    return summed_divergence(inputs, _row_weights(left.hidden, mask_N, reduction))


# -- checks --------------------------------------------------------------------------------------------------------


def _check_head(tensors: Sequence[Tensor | None], name: str) -> Head:
    """Return the tensors of one side as a `Head`, or raise an error that says what is wrong with them."""
    if not isinstance(tensors, Sequence) or not 2 <= len(tensors) <= 3:
        raise ArgumentError(f"{_NAME}: {name} must be (hidden, weight) or (hidden, weight, bias)")
    for part, tensor in zip(("hidden", "weight", "bias"), tensors, strict=False):
        if tensor is None and part == "bias":
            continue
        check_float_tensor(_NAME, f"the {name}'s {part}", tensor)
    classifier = Head(*tensors)  # type: ignore[arg-type]
    hidden, weight, bias = classifier
    if weight.dim() != 2 or not hidden.dim() or weight.shape[1] != hidden.shape[-1]:
        raise ArgumentError(
            f"{_NAME}: the {name}'s hidden is {tuple(hidden.shape)} and its weight is {tuple(weight.shape)}; they must "
            "be (..., dim) and (classes, dim), with the same dim"
        )
    if not weight.shape[0] or not weight.shape[1]:
        raise ArgumentError(
            f"{_NAME}: the {name}'s weight is {tuple(weight.shape)}; it needs at least one class and one dimension"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            f"{_NAME}: the {name}'s bias is {tuple(bias.shape)}; with {weight.shape[0]} classes it must be "
            f"({weight.shape[0]},)"
        )
    return classifier


def _check_rows(student: Head, teacher: Head, mask: Tensor | None, teacher_rows: Tensor | None) -> None:
    """Raise an error unless the two sides have the same classes and one teacher row per student row."""
    for name, argument in (("mask", mask), ("teacher_rows", teacher_rows)):
        if argument is not None:
            check_is_tensor(_NAME, name, argument)
    if student.weight.shape[0] != teacher.weight.shape[0]:
        raise ArgumentError(
            f"{_NAME}: the student has {student.weight.shape[0]} classes and the teacher {teacher.weight.shape[0]}; "
            "they must score the same classes in the same order"
        )
    shape = student.hidden.shape[:-1]
    if teacher_rows is None:
        if teacher.hidden.shape[:-1] != shape:
            raise ArgumentError(
                f"{_NAME}: the student has rows {tuple(shape)} and the teacher {tuple(teacher.hidden.shape[:-1])}; "
                "pass teacher_rows if rows share a teacher row"
            )
    elif teacher_rows.shape != shape or not has_integers(teacher_rows) or teacher.hidden.dim() != 2:
        raise ArgumentError(
            f"{_NAME}: teacher_rows is {tuple(teacher_rows.shape)} {teacher_rows.dtype}; with the student's rows "
            f"{tuple(shape)} it must be {tuple(shape)} integers, and the teacher's hidden must be a matrix"
        )
    if teacher_rows is not None and not (needs_operators(teacher_rows) or is_capturing(teacher_rows)):
        num_rows = teacher.hidden.shape[0]
        if bool(((teacher_rows < 0) | (teacher_rows >= num_rows)).any()):
            raise ArgumentError(f"{_NAME}: teacher_rows must be rows of the teacher, from 0 to {num_rows - 1}")
    if mask is not None and (mask.shape != shape or mask.dtype != torch.bool):
        raise ArgumentError(
            f"{_NAME}: mask is {tuple(mask.shape)} {mask.dtype}; it must be {tuple(shape)} and torch.bool"
        )
    check_devices(_NAME, *student, *teacher, mask, teacher_rows)


def _check_settings(kind: str, beta: float, temperature: float, reduction: str) -> None:
    if kind not in get_args(Kind):
        raise ArgumentError(f"{_NAME}: kind = {kind!r}: must be one of {', '.join(get_args(Kind))}")
    if reduction not in get_args(Reduction):
        raise ArgumentError(f"{_NAME}: reduction = {reduction!r}: must be one of {', '.join(get_args(Reduction))}")
    check_is_number(_NAME, "beta", beta)
    if not 0 < beta < 1:
        raise ArgumentError(f"{_NAME}: beta = {beta!r}: must be above 0 and below 1")
    check_number(_NAME, "temperature", temperature, 0, above=True)


def _check_classes(classes: Tensor, weight: Tensor) -> None:
    if not isinstance(classes, Tensor) or classes.dim() != 1 or not has_integers(classes) or not len(classes):
        raise ArgumentError(f"{_NAME}: classes must be a tensor of integers, with shape (C,) and at least one class id")
    check_devices(_NAME, weight, classes)
    num_classes = weight.shape[0]
    can_read = not (needs_operators(classes) or is_capturing(classes))
    if can_read and bool(((classes < 0) | (classes >= num_classes)).any()):
        raise ArgumentError(f"{_NAME}: classes must be ids from 0 to {num_classes - 1}")


def _restrict(classifier: Head, classes: Tensor) -> Head:
    """Return the classifier over some of its classes."""
    bias = None if classifier.bias is None else classifier.bias.index_select(0, classes)
    return Head(classifier.hidden, classifier.weight.index_select(0, classes), bias)


def _flatten(classifier: Head) -> Head:
    """Return the classifier with its hidden states as a matrix."""
    return classifier._replace(hidden=classifier.hidden.reshape(-1, classifier.hidden.shape[-1]))


def _repeat_rows(classifier: Head, rows_N: Tensor) -> Head:
    """Return the classifier with these rows of its hidden states."""
    # The gradient of an embedding is summed in a fixed order, that of indexing in any.
    return classifier._replace(hidden=F.embedding(rows_N, classifier.hidden))


def _row_weights(hidden: Tensor, mask_N: Tensor | None, reduction: Reduction) -> Tensor:
    """Return the weight of each row in a sum or a mean, (N,)."""
    dtype = accumulation_dtype(hidden.dtype)
    weight_N = hidden.new_ones(hidden.shape[0], dtype=dtype) if mask_N is None else mask_N.to(dtype)
    return weight_N if reduction == "sum" else weight_N / weight_N.sum().clamp(min=1)
