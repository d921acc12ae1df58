"""The Triton kernels of `TritonBackend`, which compute blocks of scores and reduce them in registers.

Each of these kernels computes a block tile by tile. A tile is a matrix product in registers, or is loaded if torch has
computed and stored the scores (STORED):

    loss_and_gradient_kernel        exponentials and their sums; `finish_rows_kernel` then computes losses and gradients
    summary_kernel                  log-sum-exps and the other fields of `RowSummary`
    score_gradient_kernel           the gradient that `GradientTerms` describes
    soft_target_gradients_kernel    a tempered softmax, and the gradient of its scores

Functions that start with an underscore are parts of kernels. `triton_row_kernels` has kernels that work on rows.
`triton_scores` launches the kernels and chooses these constants:

    BLOCK_N, BLOCK_V, BLOCK_D    rows of a tile; classes of a tile; dimensions that one step of a product reads
    NUM_PROGRAMS                 programs of the launch; each computes every NUM_PROGRAMS-th tile
    TMA                          whether the GPU's copy engine moves tiles; if so, h, w and out are tensor descriptors
    STORED                       whether torch has already computed the products; if so, the kernel reads them from the
                                 output buffer and overwrites them
    PLAIN, TEMPERED, EXPECTED, TOTAL, BEST, ENTROPY
                                 which results or terms are computed (see `SummaryRequest`, `GradientTerms`)
    TRANSFORM, SOFTCAP           whether the scores are transformed; whether with a softcap (see `ScoreTransform`)
    CLASS_WEIGHT                 whether the classes have weights
    BIAS, CENTRED                whether there are biases; whether a centre is subtracted from the class vectors
    BIAS_SUMS                    whether the gradient of the biases is computed

`weight` holds the class vectors. `lse` stands for log-sum-exp, and z for scores in formulas. A name that ends
in _ptr is a pointer. `stride` is the number of entries between two rows of the block in memory.
Shapes: N rows of the block, D dimensions, V classes of the block, T tiles of classes, C dimensions of the values.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = exp2(x * LOG2_E), and GPUs have an instruction for exp2."""
MIN_SCORE = tl.constexpr(-1e38)
"""Replaces the largest score if all scores are minus infinity, which cannot be subtracted from itself."""
IGNORE = tl.constexpr(-100)
"""As in `scores`: a target with this value has a loss of zero and no gradient."""
MAX_DIFFERENCE = tl.constexpr(69.0)
"""How far a score may lie above the score of the target: exp(69) < 2^100, so sums of exponentials never overflow."""


@triton.jit
def _load_tile(
    source,
    row_start,
    column_start,
    num_rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load a tile of a matrix with D columns, with zeros outside the matrix."""
    if TMA:
        tile = source.load([row_start, column_start])
    else:
        rows = row_start + tl.arange(0, ROWS)
        columns = column_start + tl.arange(0, COLUMNS)
        pointers = source + rows[:, None].to(tl.int64) * D + columns[None, :]
        tile = tl.load(pointers, mask=(rows[:, None] < num_rows) & (columns[None, :] < D), other=0.0)
    return tile


@triton.jit
def _store_tile(
    out,
    value,
    row_start,
    column_start,
    num_rows,
    num_columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """Store a tile in a matrix.

    The copy engine stores it as two halves, one after the other, which needs only half the shared memory.
    """
    if TMA:
        halves = tl.permute(tl.reshape(value, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        out.store([row_start, column_start], left)
        out.store([row_start, column_start + COLUMNS // 2], right)
    else:
        rows = row_start + tl.arange(0, ROWS)
        columns = column_start + tl.arange(0, COLUMNS)
        pointers = out + rows[:, None].to(tl.int64) * stride + columns[None, :]
        tl.store(pointers, value, mask=(rows[:, None] < num_rows) & (columns[None, :] < num_columns))


@triton.jit
def _product_tile(
    hidden,
    weight,
    row_start,
    column_start,
    N,
    V,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return one tile of h W^T, in float32."""
    scores = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for d in range(0, D, BLOCK_D):
        hidden_tile = _load_tile(hidden, row_start, d, N, D, BLOCK_N, BLOCK_D, TMA)
        weight_tile = _load_tile(weight, column_start, d, V, D, BLOCK_V, BLOCK_D, TMA)
        scores = tl.dot(hidden_tile, weight_tile.T, scores, input_precision="ieee")
    return scores


@triton.jit
def _score_tile(
    hidden,
    weight,
    stored_ptr,
    row_start,
    column_start,
    N,
    V,
    stride,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    STORED: tl.constexpr,
):
    """Return one tile of h W^T, in float32: computed here, or loaded if it is stored."""
    if STORED:
        rows = row_start + tl.arange(0, BLOCK_N)
        columns = column_start + tl.arange(0, BLOCK_V)
        pointers = stored_ptr + rows[:, None].to(tl.int64) * stride + columns[None, :]
        scores = tl.load(pointers, mask=(rows[:, None] < N) & (columns[None, :] < V), other=0.0)
    else:
        scores = _product_tile(hidden, weight, row_start, column_start, N, V, D, BLOCK_N, BLOCK_V, BLOCK_D, TMA)
    return scores


@triton.jit
def _add_bias(scores, bias_ptr, columns, V, BIAS: tl.constexpr):
    if BIAS:
        scores += tl.load(bias_ptr + columns, mask=columns < V, other=0.0)[None, :]
    return scores


@triton.jit
def _tanh(x):
    """Return tanh(x). The exponential may overflow to infinity, which gives the right limit."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def _transform(scores, scale, softcap, inverse_temperature, TRANSFORM: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return softcap(scale * scores) / temperature (see `ScoreTransform`)."""
    if TRANSFORM:
        if SOFTCAP:
            scores = _tanh(scores * (scale / softcap)) * (softcap * inverse_temperature)
        else:
            scores *= scale * inverse_temperature
    return scores


@triton.jit
def slope_of_transform(transformed, scale, softcap, inverse_temperature, SOFTCAP: tl.constexpr):
    """Return the derivative of `_transform`, given its result."""
    slope = scale * inverse_temperature
    if SOFTCAP:
        capped = transformed * (1.0 / (softcap * inverse_temperature))
        slope = slope - slope * capped * capped
    return slope


@triton.jit
def _log_sum_exp(scores, columns, V):
    """Return the log-sum-exp of each row of a tile, over the columns that are classes."""
    scores = tl.where(columns[None, :] < V, scores, -float("inf"))
    largest = tl.maximum(tl.max(scores, 1), MIN_SCORE)
    return largest + tl.log(tl.sum(tl.exp2((scores - largest[:, None]) * LOG2_E), 1))


@triton.jit
def loss_and_gradient_kernel(
    hidden,
    weight,
    out,
    bias_ptr,
    targets_ptr,
    target_scores_ptr,
    shifts_ptr,
    sums_ptr,
    N,
    V,
    T,
    stride,
    scale,
    softcap,
    inverse_temperature,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    TRANSFORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute out = exp(z - shift) dz/ds, with zero at the target, and the row sums of exp(z - shift), tile by tile.

    z are the transformed scores, and s the scores.

    `shift` is the score of the row's target. If the row's largest score in this tile exceeds it by more than
    MAX_DIFFERENCE, `shift` is that largest score. Shifts and row sums are stored for each row and tile, (N, T).
    """
    # Neighbouring programs share a tile of classes, so each tile is read from memory once.
    num_row_tiles = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_row_tiles * T, NUM_PROGRAMS, flatten=True):
        row_start = (tile % num_row_tiles) * BLOCK_N
        column_start = (tile // num_row_tiles) * BLOCK_V
        scores = _score_tile(
            hidden, weight, out, row_start, column_start, N, V, stride, D, BLOCK_N, BLOCK_V, BLOCK_D, TMA, STORED
        )
        rows = row_start + tl.arange(0, BLOCK_N)
        columns = column_start + tl.arange(0, BLOCK_V)
        scores = _add_bias(scores, bias_ptr, columns, V, BIAS)
        scores = _transform(scores, scale, softcap, inverse_temperature, TRANSFORM, SOFTCAP)
        target_score = tl.load(target_scores_ptr + rows, mask=rows < N, other=0.0)
        # An ignored target is replaced by class 0; `target_scores_kernel` does the same.
        target = tl.maximum(tl.load(targets_ptr + rows, mask=rows < N, other=0), 0)
        is_other_class = (columns[None, :] < V) & (columns[None, :] != target[:, None])
        transformed = scores
        scores = tl.where(is_other_class, scores, -float("inf"))
        shift = tl.maximum(target_score, MIN_SCORE)
        largest = tl.max(scores, 1)
        shift = tl.where(largest - shift > MAX_DIFFERENCE, largest, shift)
        exponentials = tl.exp2((scores - shift[:, None]) * LOG2_E)
        offsets_NT = rows.to(tl.int64) * T + tile // num_row_tiles
        tl.store(shifts_ptr + offsets_NT, shift, mask=rows < N)
        tl.store(sums_ptr + offsets_NT, tl.sum(exponentials, 1), mask=rows < N)
        if TRANSFORM:
            exponentials *= slope_of_transform(transformed, scale, softcap, inverse_temperature, SOFTCAP)
        _store_tile(out, exponentials.to(DTYPE), row_start, column_start, N, V, stride, BLOCK_N, BLOCK_V, TMA)


@triton.jit
def summary_kernel(
    hidden,
    weight,
    stored_ptr,
    bias_ptr,
    class_weight_ptr,
    lse_ptr,
    lse_tau_ptr,
    expected_ptr,
    total_ptr,
    best_score_ptr,
    best_class_ptr,
    N,
    V,
    T,
    stride,
    inverse_tau,
    scale,
    softcap,
    inverse_temperature,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    TRANSFORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PLAIN: tl.constexpr,
    TEMPERED: tl.constexpr,
    EXPECTED: tl.constexpr,
    TOTAL: tl.constexpr,
    CLASS_WEIGHT: tl.constexpr,
    BEST: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    STORED: tl.constexpr,
):
    """Compute what `SummaryRequest` asks for of each row, tile by tile, (N, T)."""
    num_row_tiles = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_row_tiles * T, NUM_PROGRAMS, flatten=True):
        row_start = (tile % num_row_tiles) * BLOCK_N
        column_start = (tile // num_row_tiles) * BLOCK_V
        scores = _score_tile(
            hidden, weight, stored_ptr, row_start, column_start, N, V, stride, D, BLOCK_N, BLOCK_V, BLOCK_D, TMA, STORED
        )
        rows = row_start + tl.arange(0, BLOCK_N)
        columns = column_start + tl.arange(0, BLOCK_V)
        offsets_NT = rows.to(tl.int64) * T + tile // num_row_tiles
        if TEMPERED:
            tl.store(lse_tau_ptr + offsets_NT, _log_sum_exp(scores * inverse_tau, columns, V), mask=rows < N)
        if PLAIN:
            scores = _add_bias(scores, bias_ptr, columns, V, BIAS)
            scores = _transform(scores, scale, softcap, inverse_temperature, TRANSFORM, SOFTCAP)
            if TOTAL:
                weighted = tl.where(columns[None, :] < V, scores, 0.0)
                if CLASS_WEIGHT:
                    weighted *= tl.load(class_weight_ptr + columns, mask=columns < V, other=0.0)[None, :]
                tl.store(total_ptr + offsets_NT, tl.sum(weighted, 1), mask=rows < N)
            if EXPECTED or BEST:
                scores = tl.where(columns[None, :] < V, scores, -float("inf"))
                largest = tl.maximum(tl.max(scores, 1), MIN_SCORE)
                if BEST:
                    # The first class if several have the largest score.
                    best = tl.min(tl.where(scores >= largest[:, None], columns[None, :], V), 1)
                    tl.store(best_score_ptr + offsets_NT, largest, mask=rows < N)
                    tl.store(best_class_ptr + offsets_NT, best.to(tl.int64), mask=rows < N)
                exponentials = tl.exp2((scores - largest[:, None]) * LOG2_E)
                sums = tl.sum(exponentials, 1)
                tl.store(lse_ptr + offsets_NT, largest + tl.log(sums), mask=rows < N)
                if EXPECTED:
                    products = tl.where(exponentials > 0, exponentials * scores, 0.0)
                    tl.store(expected_ptr + offsets_NT, tl.sum(products, 1) / tl.maximum(sums, 1e-30), mask=rows < N)
            else:
                tl.store(lse_ptr + offsets_NT, _log_sum_exp(scores, columns, V), mask=rows < N)


@triton.jit
def score_gradient_kernel(
    hidden,
    weight,
    out,
    bias_ptr,
    targets_ptr,
    lse_ptr,
    plain_weight_ptr,
    target_weight_ptr,
    entropy_weight_ptr,
    expected_ptr,
    total_weight_ptr,
    class_weight_ptr,
    lse_tau_ptr,
    tempered_weight_ptr,
    bias_sums_ptr,
    N,
    V,
    T,
    stride,
    inverse_tau,
    uniform,
    scale,
    softcap,
    inverse_temperature,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_SUMS: tl.constexpr,
    TRANSFORM: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PLAIN: tl.constexpr,
    ENTROPY: tl.constexpr,
    TOTAL: tl.constexpr,
    CLASS_WEIGHT: tl.constexpr,
    TEMPERED: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute the gradient that `GradientTerms` describes, and the column sums of its first two terms, tile by tile."""
    num_row_tiles = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_row_tiles * T, NUM_PROGRAMS, flatten=True):
        row_start = (tile % num_row_tiles) * BLOCK_N
        column_start = (tile // num_row_tiles) * BLOCK_V
        scores = _score_tile(
            hidden, weight, out, row_start, column_start, N, V, stride, D, BLOCK_N, BLOCK_V, BLOCK_D, TMA, STORED
        )
        rows = row_start + tl.arange(0, BLOCK_N)
        columns = column_start + tl.arange(0, BLOCK_V)
        grad = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        if PLAIN:
            lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0)
            plain_weight = tl.load(plain_weight_ptr + rows, mask=rows < N, other=0.0)
            target_weight = tl.load(target_weight_ptr + rows, mask=rows < N, other=0.0)
            target = tl.load(targets_ptr + rows, mask=rows < N, other=-1)
            transformed = _add_bias(scores, bias_ptr, columns, V, BIAS)
            transformed = _transform(transformed, scale, softcap, inverse_temperature, TRANSFORM, SOFTCAP)
            probs = tl.exp2((transformed - lse[:, None]) * LOG2_E)
            grad = probs * plain_weight[:, None]
            if ENTROPY:
                entropy_weight = tl.load(entropy_weight_ptr + rows, mask=rows < N, other=0.0)
                expected = tl.load(expected_ptr + rows, mask=rows < N, other=0.0)
                excess = probs * (transformed - expected[:, None])
                grad -= entropy_weight[:, None] * tl.where(probs > 0, excess, 0.0)
            grad = tl.where(columns[None, :] == target[:, None], grad - target_weight[:, None], grad)
            if TOTAL:
                total_weight = tl.load(total_weight_ptr + rows, mask=rows < N, other=0.0)
                if CLASS_WEIGHT:
                    class_weight = tl.load(class_weight_ptr + columns, mask=columns < V, other=0.0)
                    grad += total_weight[:, None] * class_weight[None, :]
                else:
                    grad += total_weight[:, None]
            if TRANSFORM:
                grad *= slope_of_transform(transformed, scale, softcap, inverse_temperature, SOFTCAP)
            if BIAS_SUMS:
                grad = tl.where(rows[:, None] < N, grad, 0.0)
                sums = bias_sums_ptr + (tile % num_row_tiles).to(tl.int64) * V + columns
                tl.store(sums, tl.sum(grad, 0), mask=columns < V)
        if TEMPERED:
            lse_tau = tl.load(lse_tau_ptr + rows, mask=rows < N, other=0.0)
            tempered_weight = tl.load(tempered_weight_ptr + rows, mask=rows < N, other=0.0)
            grad += tempered_weight[:, None] * (tl.exp2((scores * inverse_tau - lse_tau[:, None]) * LOG2_E) - uniform)
        _store_tile(out, grad.to(DTYPE), row_start, column_start, N, V, stride, BLOCK_N, BLOCK_V, TMA)


@triton.jit
def soft_target_gradients_kernel(
    queries,
    keys,
    grad_mean,
    values,
    probs_out,
    grad_out,
    lse_ptr,
    negentropy_gradient_ptr,
    expected_gradient_ptr,
    N,
    V,
    T,
    stride,
    inverse_tau,
    uniform,
    D: tl.constexpr,
    C: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute q - uniform, where q = softmax(z / tau), and the gradient of z, from two matrix products in registers.

    z is queries keys^T, with D dimensions. The other product, grad_mean values^T with C dimensions, is the gradient of
    q that comes from the mean of the values. KEYS_ARE_VALUES: the keys are also the values, loaded once for both.
    """
    num_row_tiles = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_row_tiles * T, NUM_PROGRAMS):
        row_start = (tile % num_row_tiles) * BLOCK_N
        column_start = (tile // num_row_tiles) * BLOCK_V
        scores = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        grad_probs = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
        if KEYS_ARE_VALUES and not STORED:
            for d in range(0, D, BLOCK_D):
                keys_tile = _load_tile(keys, column_start, d, V, D, BLOCK_V, BLOCK_D, TMA).T
                queries_tile = _load_tile(queries, row_start, d, N, D, BLOCK_N, BLOCK_D, TMA)
                scores = tl.dot(queries_tile, keys_tile, scores, input_precision="ieee")
                g_mean_tile = _load_tile(grad_mean, row_start, d, N, D, BLOCK_N, BLOCK_D, TMA)
                grad_probs = tl.dot(g_mean_tile, keys_tile, grad_probs, input_precision="ieee")
        else:
            scores = _score_tile(
                queries,
                keys,
                probs_out,
                row_start,
                column_start,
                N,
                V,
                stride,
                D,
                BLOCK_N,
                BLOCK_V,
                BLOCK_D,
                TMA,
                STORED,
            )
            grad_probs = _score_tile(
                grad_mean,
                values,
                grad_out,
                row_start,
                column_start,
                N,
                V,
                stride,
                C,
                BLOCK_N,
                BLOCK_V,
                BLOCK_D,
                TMA,
                STORED,
            )
        rows = row_start + tl.arange(0, BLOCK_N)
        lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0)
        negentropy_gradient = tl.load(negentropy_gradient_ptr + rows, mask=rows < N, other=0.0)
        expected_gradient = tl.load(expected_gradient_ptr + rows, mask=rows < N, other=0.0)
        log_probs = scores * inverse_tau - lse[:, None]
        probs = tl.exp2(log_probs * LOG2_E)
        grad_scores = (
            probs * (grad_probs + negentropy_gradient[:, None] * log_probs - expected_gradient[:, None]) * inverse_tau
        )
        _store_tile(
            probs_out, (probs - uniform).to(DTYPE), row_start, column_start, N, V, stride, BLOCK_N, BLOCK_V, TMA
        )
        _store_tile(grad_out, grad_scores.to(DTYPE), row_start, column_start, N, V, stride, BLOCK_N, BLOCK_V, TMA)
