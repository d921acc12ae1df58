"""The Triton kernel of `triton_divergence`: compare two rows of scores, and compute the gradients of their divergence.

KIND is 0 for the forward divergence, 1 for the reverse one and 2 for `jsd` (see `divergence`). BLOCK_V is the number of
classes that are loaded at once. `lse` stands for log-sum-exp. A name that ends in _ptr is a pointer, and a stride is
the number of entries between two rows in memory.
Shapes: N rows of the block, V classes.
"""

import triton
import triton.language as tl

from reefknot.kernels.triton_kernels import LOG2_E, MIN_SCORE
from reefknot.kernels.triton_row_kernels import add_exponentials, combine_lanes

FORWARD = tl.constexpr(0)
REVERSE = tl.constexpr(1)
JSD = tl.constexpr(2)
MIN_PROB = tl.constexpr(1e-37)
"""Replaces the probability of a class under the mixture of `jsd` where it underflows, so that its log is finite."""


@triton.jit
def _load_scores(row_ptr, bias_ptr, classes, V, inverse_temperature, BIAS: tl.constexpr):
    """Load scores of one row, with bias and temperature. Outside the classes they are minus infinity."""
    scores = tl.load(row_ptr + classes, mask=classes < V, other=0.0)
    if BIAS:
        scores += tl.load(bias_ptr + classes, mask=classes < V, other=0.0).to(tl.float32)
    return tl.where(classes < V, scores * inverse_temperature, -float("inf"))


@triton.jit
def _multiply_where_positive(probs, values):
    """Return probs * values, and zero where a probability is zero, whose value may be infinite."""
    return tl.where(probs > 0, probs * values, 0.0)


@triton.jit
def _log_ratios_to_mixture(student_log_probs, teacher_log_probs, student_probs, teacher_probs, beta):
    """Return log(p / m) and log(q / m), with m = beta q + (1 - beta) p."""
    mixture = beta * teacher_probs + (1.0 - beta) * student_probs
    log_mixture = tl.log(tl.maximum(mixture, MIN_PROB))
    return student_log_probs - log_mixture, teacher_log_probs - log_mixture


@triton.jit
def compare_rows_kernel(
    student_ptr,
    teacher_ptr,
    student_bias_ptr,
    teacher_bias_ptr,
    weight_ptr,
    loss_ptr,
    student_grad_ptr,
    teacher_grad_ptr,
    V,
    student_stride,
    teacher_stride,
    student_grad_stride,
    teacher_grad_stride,
    inverse_temperature,
    beta,
    KIND: tl.constexpr,
    STUDENT_BIAS: tl.constexpr,
    TEACHER_BIAS: tl.constexpr,
    STUDENT_GRAD: tl.constexpr,
    TEACHER_GRAD: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the divergence of one row, and the gradients of both rows of scores times the weight of the row.

    Pass 1 computes both log-sum-exps and, except for `jsd`, the divergence. Pass 2 computes the divergence of `jsd`,
    which needs the probabilities. Pass 3 computes the gradients.
    """
    n = tl.program_id(0).to(tl.int64)
    student_ptr += n * student_stride
    teacher_ptr += n * teacher_stride
    lanes = tl.arange(0, BLOCK_V)

    student_largest = tl.full((BLOCK_V,), MIN_SCORE, dtype=tl.float32)
    teacher_largest = tl.full((BLOCK_V,), MIN_SCORE, dtype=tl.float32)
    student_sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
    teacher_sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
    ratios = tl.zeros((BLOCK_V,), dtype=tl.float32)  # sums of exponentials times differences of the two scores
    for start in tl.range(0, V, BLOCK_V):
        classes = start + lanes
        s = _load_scores(student_ptr, student_bias_ptr, classes, V, inverse_temperature, STUDENT_BIAS)
        t = _load_scores(teacher_ptr, teacher_bias_ptr, classes, V, inverse_temperature, TEACHER_BIAS)
        student_largest, student_sums, student_decay, student_exp = add_exponentials(s, student_largest, student_sums)
        teacher_largest, teacher_sums, teacher_decay, teacher_exp = add_exponentials(t, teacher_largest, teacher_sums)
        if KIND == FORWARD:
            ratios = _multiply_where_positive(teacher_decay, ratios) + _multiply_where_positive(teacher_exp, t - s)
        if KIND == REVERSE:
            ratios = _multiply_where_positive(student_decay, ratios) + _multiply_where_positive(student_exp, s - t)
    student_lse, student_factors = combine_lanes(student_largest, student_sums)
    teacher_lse, teacher_factors = combine_lanes(teacher_largest, teacher_sums)

    student_mean = 0.0
    teacher_mean = 0.0
    if KIND == FORWARD:
        teacher_mean = tl.sum(_multiply_where_positive(teacher_factors, ratios), 0) - (teacher_lse - student_lse)
        loss = teacher_mean
    elif KIND == REVERSE:
        student_mean = tl.sum(_multiply_where_positive(student_factors, ratios), 0) - (student_lse - teacher_lse)
        loss = student_mean
    else:
        student_sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
        teacher_sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
        for start in tl.range(0, V, BLOCK_V):
            classes = start + lanes
            s = _load_scores(student_ptr, student_bias_ptr, classes, V, inverse_temperature, STUDENT_BIAS) - student_lse
            t = _load_scores(teacher_ptr, teacher_bias_ptr, classes, V, inverse_temperature, TEACHER_BIAS) - teacher_lse
            p, q = tl.exp2(s * LOG2_E), tl.exp2(t * LOG2_E)
            student_ratio, teacher_ratio = _log_ratios_to_mixture(s, t, p, q, beta)
            student_sums += _multiply_where_positive(p, student_ratio)
            teacher_sums += _multiply_where_positive(q, teacher_ratio)
        student_mean = tl.sum(student_sums, 0)
        teacher_mean = tl.sum(teacher_sums, 0)
        loss = (1.0 - beta) * student_mean + beta * teacher_mean
    tl.store(loss_ptr + n, loss)

    if STUDENT_GRAD or TEACHER_GRAD:
        weight = tl.load(weight_ptr + n)
        factor = weight * inverse_temperature
        for start in tl.range(0, V, BLOCK_V):
            classes = start + lanes
            s = _load_scores(student_ptr, student_bias_ptr, classes, V, inverse_temperature, STUDENT_BIAS) - student_lse
            t = _load_scores(teacher_ptr, teacher_bias_ptr, classes, V, inverse_temperature, TEACHER_BIAS) - teacher_lse
            p, q = tl.exp2(s * LOG2_E), tl.exp2(t * LOG2_E)
            if KIND == FORWARD:
                student_grad = p - q
                teacher_grad = _multiply_where_positive(q, t - s - teacher_mean)
            elif KIND == REVERSE:
                student_grad = _multiply_where_positive(p, s - t - student_mean)
                teacher_grad = q - p
            else:
                student_ratio, teacher_ratio = _log_ratios_to_mixture(s, t, p, q, beta)
                student_grad = (1.0 - beta) * _multiply_where_positive(p, student_ratio - student_mean)
                teacher_grad = beta * _multiply_where_positive(q, teacher_ratio - teacher_mean)
            # A row of weight zero gets a gradient of zero, even if its scores are not finite.
            if STUDENT_GRAD:
                grad = tl.where(weight == 0, 0.0, student_grad * factor).to(student_grad_ptr.dtype.element_ty)
                tl.store(student_grad_ptr + n * student_grad_stride + classes, grad, mask=classes < V)
            if TEACHER_GRAD:
                grad = tl.where(weight == 0, 0.0, teacher_grad * factor).to(teacher_grad_ptr.dtype.element_ty)
                tl.store(teacher_grad_ptr + n * teacher_grad_stride + classes, grad, mask=classes < V)
