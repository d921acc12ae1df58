"""The Triton kernels of `TritonBackend` in which a program works on one row, or on a range of a tensor.

    target_scores_kernel    the score of each row's target
    finish_rows_kernel      losses and gradients from the sums of `loss_and_gradient_kernel`
    rescale_rows_kernel     exponentials relative to another score
    scale_kernel            a tensor times a factor, in place
    small_loss_kernel       losses and gradients from stored scores, for `small`

`triton_scores` launches them. `triton_kernels` explains the names; also, BLOCK_T is the number of tiles whose row sums
are loaded at once.
Shapes: N rows of the block, D dimensions, V classes of the block, T tiles of classes.
"""

import triton
import triton.language as tl

from reefknot.kernels.triton_kernels import IGNORE, LOG2_E, MIN_SCORE, slope_of_transform


@triton.jit
def add_exponentials(scores, largest, sums):
    """Add scores to running sums of exp(score - largest), one per lane.

    Return the new largest scores and sums, the factor that the old sums were multiplied by, and the exponentials.
    """
    new_largest = tl.maximum(largest, scores)
    decay = tl.exp2((largest - new_largest) * LOG2_E)
    exponentials = tl.exp2((scores - new_largest) * LOG2_E)
    return new_largest, sums * decay + exponentials, decay, exponentials


@triton.jit
def combine_lanes(largest, sums):
    """Return the log-sum-exp of a row, and the factor that turns each lane's sums into shares of the row's sum."""
    row_largest = tl.max(largest, 0)
    factors = tl.exp2((largest - row_largest) * LOG2_E)
    total = tl.sum(sums * factors, 0)
    return row_largest + tl.log(total), factors / total


@triton.jit
def small_loss_kernel(
    scores_ptr,
    bias_ptr,
    targets_ptr,
    out_ptr,
    sums_ptr,
    N,
    V,
    stride,
    BIAS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the loss of one row and the gradient of its scores, given all scores in float32 without the bias.

    `sums` has two rows, (2, N): the losses, and whether the rows count. `out` may be the same memory as `scores`.
    """
    n = tl.program_id(0).to(tl.int64)
    scores_ptr += n * stride
    out_ptr += n * stride
    # This score is read before the sums, which all threads wait for. Later, another thread may overwrite it.
    target = tl.load(targets_ptr + n)
    has_target = (target >= 0) & (target < V)
    safe_target = tl.where(has_target, target, 0)
    target_score = tl.load(scores_ptr + safe_target)
    if BIAS:
        target_score += tl.load(bias_ptr + safe_target).to(tl.float32)
    lanes = tl.arange(0, BLOCK_V)
    largest = tl.full((BLOCK_V,), MIN_SCORE, dtype=tl.float32)
    sums = tl.zeros((BLOCK_V,), dtype=tl.float32)
    for start in tl.range(0, V, BLOCK_V):
        classes = start + lanes
        scores = tl.load(scores_ptr + classes, mask=classes < V, other=-float("inf"))
        if BIAS:
            scores += tl.load(bias_ptr + classes, mask=classes < V, other=0.0).to(tl.float32)
        largest, sums, _, _ = add_exponentials(scores, largest, sums)
    lse, _ = combine_lanes(largest, sums)
    loss_without_target = tl.where(target == IGNORE, 0.0, float("nan"))
    tl.store(sums_ptr + n, tl.where(has_target, lse - target_score, loss_without_target))
    tl.store(sums_ptr + N + n, tl.where(has_target, 1.0, 0.0))
    for start in tl.range(0, V, BLOCK_V):
        classes = start + lanes
        scores = tl.load(scores_ptr + classes, mask=classes < V, other=-float("inf"))
        if BIAS:
            scores += tl.load(bias_ptr + classes, mask=classes < V, other=0.0).to(tl.float32)
        probs = tl.exp2((scores - lse) * LOG2_E)
        grad = tl.where(has_target, probs - tl.where(classes == target, 1.0, 0.0), 0.0)
        tl.store(out_ptr + classes, grad.to(out_ptr.dtype.element_ty), mask=classes < V)


@triton.jit
def target_scores_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    targets_ptr,
    centre_ptr,
    out_ptr,
    V,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Compute h_n . w_y + b_y of each row.

    Operands are rounded to the dtype of h, as in the tiled products, but float32 operands are never rounded to TF32.
    """
    n = tl.program_id(0)
    target = tl.load(targets_ptr + n)
    target = tl.where((target >= 0) & (target < V), target, 0).to(tl.int64)
    scores = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for d in range(0, D, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        hidden = tl.load(hidden_ptr + n.to(tl.int64) * D + columns, mask=columns < D, other=0.0)
        weight = tl.load(weight_ptr + target * D + columns, mask=columns < D, other=0.0)
        if CENTRED:
            weight = weight.to(tl.float32) - tl.load(centre_ptr + columns, mask=columns < D, other=0.0)
        scores += hidden.to(tl.float32) * weight.to(hidden.dtype).to(tl.float32)
    score = tl.sum(scores, 0)
    if BIAS:
        score += tl.load(bias_ptr + target).to(tl.float32)
    tl.store(out_ptr + n, score)


@triton.jit
def _rescale_row(row_ptr, shifts_ptr, row_shift, target, target_entry, V, BLOCK_V: tl.constexpr, TILE_V: tl.constexpr):
    """Multiply the entries of a row by exp(shift - row_shift), in place, and replace the entry of its target.

    Each tile of TILE_V classes has its own shift. A target below 0 replaces nothing.
    """
    v = 0
    while v < V:
        classes = v + tl.arange(0, BLOCK_V)
        difference = tl.load(shifts_ptr + classes // TILE_V, mask=classes < V, other=0.0) - row_shift
        entries = tl.load(row_ptr + classes, mask=classes < V, other=0.0).to(tl.float32)
        entries = entries * tl.exp2(difference * LOG2_E)
        entries = tl.where(classes == target, target_entry, entries.to(row_ptr.dtype.element_ty))
        tl.store(row_ptr + classes, entries, mask=classes < V)
        v += BLOCK_V


@triton.jit
def rescale_rows_kernel(
    out_ptr,
    shifts_ptr,
    row_shifts_ptr,
    V,
    T,
    stride,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE_V: tl.constexpr,
):
    """From exp(z - shift), with a shift per tile, compute exp(z - row_shift), in place. A program works on one row.

    Rows whose shifts are already equal to `row_shift`, which are nearly all, are not read.
    """
    n = tl.program_id(0).to(tl.int64)
    row_shift = tl.load(row_shifts_ptr + n)
    shifts_ptr += n * T
    differences = tl.zeros((BLOCK_T,), dtype=tl.float32)
    t = 0
    while t < T:
        tiles = t + tl.arange(0, BLOCK_T)
        shifts = tl.load(shifts_ptr + tiles, mask=tiles < T, other=0.0)
        differences = tl.maximum(differences, tl.where((tiles < T) & (shifts != row_shift), 1.0, 0.0))
        t += BLOCK_T
    if tl.max(differences, 0) > 0.0:
        no_entry = tl.zeros((), dtype=tl.float32).to(out_ptr.dtype.element_ty)
        _rescale_row(out_ptr + n * stride, shifts_ptr, row_shift, -1, no_entry, V, BLOCK_V, TILE_V)


@triton.jit
def finish_rows_kernel(
    targets_ptr,
    out_ptr,
    target_scores_ptr,
    shifts_ptr,
    sums_ptr,
    nll_ptr,
    scale_ptr,
    V,
    T,
    stride,
    scale,
    softcap,
    inverse_temperature,
    TRANSFORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE_V: tl.constexpr,
):
    """From the row sums, compute the losses, the factor that turns `out` into a gradient, and the target's entry.

    A program finishes one row. The tiles of a row may have different shifts; the row gets the largest.
    """
    n = tl.program_id(0)
    target_score = tl.load(target_scores_ptr + n)
    target_shift = tl.maximum(target_score, MIN_SCORE)
    shifts_ptr += n.to(tl.int64) * T
    sums_ptr += n.to(tl.int64) * T
    shifts = tl.full((BLOCK_T,), MIN_SCORE, dtype=tl.float32)
    t = 0
    while t < T:
        tiles = t + tl.arange(0, BLOCK_T)
        shifts = tl.maximum(shifts, tl.load(shifts_ptr + tiles, mask=tiles < T, other=MIN_SCORE))
        t += BLOCK_T
    row_shift = tl.maximum(tl.max(shifts, 0), target_shift)
    sums = tl.zeros((BLOCK_T,), dtype=tl.float32)
    t = 0
    while t < T:
        tiles = t + tl.arange(0, BLOCK_T)
        difference = tl.load(shifts_ptr + tiles, mask=tiles < T, other=MIN_SCORE) - row_shift
        sums += tl.load(sums_ptr + tiles, mask=tiles < T, other=0.0) * tl.exp2(difference * LOG2_E)
        t += BLOCK_T
    # exp(score - row_shift) of the target, and its sum over all other classes (`others`).
    others = tl.sum(sums, 0)
    target_exp = tl.exp2((target_shift - row_shift) * LOG2_E)
    target = tl.load(targets_ptr + n)
    has_target = (target >= 0) & (target < V)
    loss_without_target = tl.where(target == IGNORE, 0.0, float("nan"))
    loss = tl.log(target_exp + others) + (row_shift - target_score)
    tl.store(nll_ptr + n, tl.where(has_target, loss, loss_without_target))
    tl.store(scale_ptr + n, tl.where(has_target, 1.0 / (target_exp + others), 0.0))
    # p_y - 1 = -others / (target_exp + others): no cancellation.
    target_gradient = -others
    if TRANSFORM:
        target_gradient *= slope_of_transform(target_score, scale, softcap, inverse_temperature, SOFTCAP)
    target_entry = target_gradient.to(out_ptr.dtype.element_ty)
    row_ptr = out_ptr + n.to(tl.int64) * stride
    if row_shift == target_shift:
        tl.store(row_ptr + target, target_entry, mask=has_target)
    elif has_target:
        # Some tile has a different shift from the row, so all entries are scaled to the shift of the row.
        _rescale_row(row_ptr, shifts_ptr, row_shift, target, target_entry, V, BLOCK_V, TILE_V)


@triton.jit
def scale_kernel(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    """Compute x *= factor. If the factor is 1, as when the loss itself is differentiated, x is not read."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < count, other=0.0)
        tl.store(x_ptr + offsets, (x.to(tl.float32) * factor).to(x.dtype), mask=offsets < count)
