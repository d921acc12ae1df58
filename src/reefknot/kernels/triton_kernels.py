"""The Triton kernels of `triton_scores`.

Each kernel computes a tile of a matrix product, or loads a tile that torch has stored, and processes it in registers.

Shapes: N rows of the block, D dimensions, V classes of the block, T tiles of classes.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST = tl.constexpr(-1e38)
"""Replaces the largest score if all scores are minus infinity, which cannot be subtracted from itself."""
IGNORE = tl.constexpr(-100)
FAR = tl.constexpr(69.0)
"""How far a score may lie above the score of the target. With this limit, sums of exponentials never overflow."""


@triton.jit
def _load(source, row, column, rows, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """Load a tile of a matrix with D columns, with zeros outside the matrix."""
    if TMA:
        tile = source.load([row, column])
    else:
        r = row + tl.arange(0, ROWS)
        c = column + tl.arange(0, COLUMNS)
        pointers = source + r[:, None].to(tl.int64) * D + c[None, :]
        tile = tl.load(pointers, mask=(r[:, None] < rows) & (c[None, :] < D), other=0.0)
    return tile


@triton.jit
def _store(
    out, value, row, column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr
):
    """Store a tile in a matrix. The copy engine moves it in two halves, which take half the shared memory."""
    if TMA:
        halves = tl.permute(tl.reshape(value, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        out.store([row, column], left)
        out.store([row, column + COLUMNS // 2], right)
    else:
        r = row + tl.arange(0, ROWS)
        c = column + tl.arange(0, COLUMNS)
        pointers = out + r[:, None].to(tl.int64) * stride + c[None, :]
        tl.store(pointers, value, mask=(r[:, None] < rows) & (c[None, :] < columns))


@triton.jit
def _product(
    h, w, row, column, N, V, D: tl.constexpr, BN: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr
):
    """Return one tile of h W^T, in float32."""
    z = tl.zeros((BN, BV), dtype=tl.float32)
    for d in range(0, D, BD):
        a = _load(h, row, d, N, D, BN, BD, TMA)
        c = _load(w, column, d, V, D, BV, BD, TMA)
        z = tl.dot(a, c.T, z, input_precision="ieee")
    return z


@triton.jit
def _scores(
    h,
    w,
    stored_ptr,
    row,
    column,
    N,
    V,
    stride,
    D: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    TMA: tl.constexpr,
    STORED: tl.constexpr,
):
    """Return one tile of h W^T, in float32: computed here, or loaded if it is stored."""
    if STORED:
        r = row + tl.arange(0, BN)
        c = column + tl.arange(0, BV)
        pointers = stored_ptr + r[:, None].to(tl.int64) * stride + c[None, :]
        z = tl.load(pointers, mask=(r[:, None] < N) & (c[None, :] < V), other=0.0)
    else:
        z = _product(h, w, row, column, N, V, D, BN, BV, BD, TMA)
    return z


@triton.jit
def _add_bias(z, b_ptr, columns, V, BIAS: tl.constexpr):
    if BIAS:
        z += tl.load(b_ptr + columns, mask=columns < V, other=0.0)[None, :]
    return z


@triton.jit
def _log_sum_exp(z, columns, V):
    """Return the log-sum-exp of each row of a tile, over the columns that are classes."""
    z = tl.where(columns[None, :] < V, z, -float("inf"))
    top = tl.maximum(tl.max(z, 1), LEAST)
    return top + tl.log(tl.sum(tl.exp2((z - top[:, None]) * LOG2_E), 1))


@triton.jit
def exponentials_kernel(
    h,
    w,
    out,
    b_ptr,
    y_ptr,
    offset_ptr,
    tops_ptr,
    sums_ptr,
    N,
    V,
    T,
    stride,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    TMA: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute out = exp(z - top), with zero at the target, and its row sums, tile by tile.

    `top` is the score of the target, or the largest score of the tile if that is far above it.
    """
    # Neighbouring programs share a tile of classes, so each tile is read from memory once.
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_n * T, PROGRAMS, flatten=True):
        row = (tile % tiles_n) * BN
        column = (tile // tiles_n) * BV
        z = _scores(h, w, out, row, column, N, V, stride, D, BN, BV, BD, TMA, STORED)
        rows = row + tl.arange(0, BN)
        columns = column + tl.arange(0, BV)
        z = _add_bias(z, b_ptr, columns, V, BIAS)
        offset = tl.load(offset_ptr + rows, mask=rows < N, other=0.0)
        # An ignored target is replaced by class 0, whose score then is the offset.
        y = tl.maximum(tl.load(y_ptr + rows, mask=rows < N, other=0), 0)
        counted = (columns[None, :] < V) & (columns[None, :] != y[:, None])
        z = tl.where(counted, z, -float("inf"))
        top = tl.maximum(offset, LEAST)
        largest = tl.max(z, 1)
        top = tl.where(largest - top > FAR, largest, top)
        e = tl.exp2((z - top[:, None]) * LOG2_E)
        at_NT = rows.to(tl.int64) * T + tile // tiles_n
        tl.store(tops_ptr + at_NT, top, mask=rows < N)
        tl.store(sums_ptr + at_NT, tl.sum(e, 1), mask=rows < N)
        _store(out, e.to(DTYPE), row, column, N, V, stride, BN, BV, TMA)


@triton.jit
def normalisers_kernel(
    h,
    w,
    stored_ptr,
    b_ptr,
    lse_ptr,
    lse_tau_ptr,
    N,
    V,
    T,
    stride,
    inverse_tau,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    PLAIN: tl.constexpr,
    TEMPERED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    TMA: tl.constexpr,
    STORED: tl.constexpr,
):
    """Compute the log-sum-exps of each row, tile by tile."""
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_n * T, PROGRAMS, flatten=True):
        row = (tile % tiles_n) * BN
        column = (tile // tiles_n) * BV
        z = _scores(h, w, stored_ptr, row, column, N, V, stride, D, BN, BV, BD, TMA, STORED)
        rows = row + tl.arange(0, BN)
        columns = column + tl.arange(0, BV)
        at_NT = rows.to(tl.int64) * T + tile // tiles_n
        if TEMPERED:
            tl.store(lse_tau_ptr + at_NT, _log_sum_exp(z * inverse_tau, columns, V), mask=rows < N)
        if PLAIN:
            z = _add_bias(z, b_ptr, columns, V, BIAS)
            tl.store(lse_ptr + at_NT, _log_sum_exp(z, columns, V), mask=rows < N)


@triton.jit
def gradient_kernel(
    h,
    w,
    out,
    b_ptr,
    y_ptr,
    lse_ptr,
    plain_ptr,
    target_ptr,
    lse_tau_ptr,
    tempered_ptr,
    bias_sums_ptr,
    N,
    V,
    T,
    stride,
    inverse_tau,
    uniform,
    D: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_SUMS: tl.constexpr,
    PLAIN: tl.constexpr,
    TEMPERED: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    TMA: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute the gradient that `RowTerms` describes, and the column sums of its plain part, tile by tile."""
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_n * T, PROGRAMS, flatten=True):
        row = (tile % tiles_n) * BN
        column = (tile // tiles_n) * BV
        z = _scores(h, w, out, row, column, N, V, stride, D, BN, BV, BD, TMA, STORED)
        rows = row + tl.arange(0, BN)
        columns = column + tl.arange(0, BV)
        g = tl.zeros((BN, BV), dtype=tl.float32)
        if PLAIN:
            lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0)
            plain = tl.load(plain_ptr + rows, mask=rows < N, other=0.0)
            target = tl.load(target_ptr + rows, mask=rows < N, other=0.0)
            y = tl.load(y_ptr + rows, mask=rows < N, other=-1)
            biased = _add_bias(z, b_ptr, columns, V, BIAS)
            g = tl.exp2((biased - lse[:, None]) * LOG2_E) * plain[:, None]
            g = tl.where(columns[None, :] == y[:, None], g - target[:, None], g)
            if BIAS_SUMS:
                g = tl.where(rows[:, None] < N, g, 0.0)
                sums = bias_sums_ptr + (tile % tiles_n).to(tl.int64) * V + columns
                tl.store(sums, tl.sum(g, 0), mask=columns < V)
        if TEMPERED:
            lse_tau = tl.load(lse_tau_ptr + rows, mask=rows < N, other=0.0)
            tempered = tl.load(tempered_ptr + rows, mask=rows < N, other=0.0)
            g += tempered[:, None] * (tl.exp2((z * inverse_tau - lse_tau[:, None]) * LOG2_E) - uniform)
        _store(out, g.to(DTYPE), row, column, N, V, stride, BN, BV, TMA)


@triton.jit
def soft_gradients_kernel(
    h,
    k,
    m,
    v,
    q_out,
    dz_out,
    lse_ptr,
    negentropy_ptr,
    mean_ptr,
    N,
    V,
    T,
    stride,
    inverse_tau,
    uniform,
    D: tl.constexpr,
    M: tl.constexpr,
    ONE_TABLE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
    TMA: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute q, the softmax of z less `uniform`, and the gradient of z, from two products in registers."""
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_n * T, PROGRAMS):
        row = (tile % tiles_n) * BN
        column = (tile // tiles_n) * BV
        z = tl.zeros((BN, BV), dtype=tl.float32)
        dz = tl.zeros((BN, BV), dtype=tl.float32)
        if ONE_TABLE and not STORED:
            for d in range(0, D, BD):
                c = _load(k, column, d, V, D, BV, BD, TMA).T
                z = tl.dot(_load(h, row, d, N, D, BN, BD, TMA), c, z, input_precision="ieee")
                dz = tl.dot(_load(m, row, d, N, D, BN, BD, TMA), c, dz, input_precision="ieee")
        else:
            z = _scores(h, k, q_out, row, column, N, V, stride, D, BN, BV, BD, TMA, STORED)
            dz = _scores(m, v, dz_out, row, column, N, V, stride, M, BN, BV, BD, TMA, STORED)
        rows = row + tl.arange(0, BN)
        lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0)
        negentropy = tl.load(negentropy_ptr + rows, mask=rows < N, other=0.0)
        mean = tl.load(mean_ptr + rows, mask=rows < N, other=0.0)
        logq = z * inverse_tau - lse[:, None]
        q = tl.exp2(logq * LOG2_E)
        dz = q * (dz + negentropy[:, None] * logq - mean[:, None]) * inverse_tau
        _store(q_out, (q - uniform).to(DTYPE), row, column, N, V, stride, BN, BV, TMA)
        _store(dz_out, dz.to(DTYPE), row, column, N, V, stride, BN, BV, TMA)


@triton.jit
def target_scores_kernel(
    h_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    centre_ptr,
    out_ptr,
    V,
    D: tl.constexpr,
    BD: tl.constexpr,
    BIAS: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Compute h_n . w_y + b_y of each row. Operands have the precision of h, as in the tiles, but are never TF32."""
    n = tl.program_id(0)
    y = tl.load(y_ptr + n)
    y = tl.where((y >= 0) & (y < V), y, 0).to(tl.int64)
    z = tl.zeros((BD,), dtype=tl.float32)
    for d in range(0, D, BD):
        columns = d + tl.arange(0, BD)
        h = tl.load(h_ptr + n.to(tl.int64) * D + columns, mask=columns < D, other=0.0)
        w = tl.load(w_ptr + y * D + columns, mask=columns < D, other=0.0)
        if CENTRED:
            w = w.to(tl.float32) - tl.load(centre_ptr + columns, mask=columns < D, other=0.0)
        z += h.to(tl.float32) * w.to(h.dtype).to(tl.float32)
    score = tl.sum(z, 0)
    if BIAS:
        score += tl.load(b_ptr + y).to(tl.float32)
    tl.store(out_ptr + n, score)


@triton.jit
def finish_kernel(
    y_ptr,
    out_ptr,
    offset_ptr,
    tops_ptr,
    sums_ptr,
    nll_ptr,
    scale_ptr,
    V,
    T,
    stride,
    BT: tl.constexpr,
    BV: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute losses, the factor that turns `out` into a gradient, and the target's entry from the row sums."""
    n = tl.program_id(0)
    offset = tl.load(offset_ptr + n)
    least = tl.maximum(offset, LEAST)
    tops_ptr += n.to(tl.int64) * T
    sums_ptr += n.to(tl.int64) * T
    tops = tl.full((BT,), LEAST, dtype=tl.float32)
    t = 0
    while t < T:
        tiles = t + tl.arange(0, BT)
        tops = tl.maximum(tops, tl.load(tops_ptr + tiles, mask=tiles < T, other=LEAST))
        t += BT
    top = tl.maximum(tl.max(tops, 0), least)
    sums = tl.zeros((BT,), dtype=tl.float32)
    t = 0
    while t < T:
        tiles = t + tl.arange(0, BT)
        shift = tl.load(tops_ptr + tiles, mask=tiles < T, other=LEAST) - top
        sums += tl.load(sums_ptr + tiles, mask=tiles < T, other=0.0) * tl.exp2(shift * LOG2_E)
        t += BT
    others = tl.sum(sums, 0)
    target = tl.exp2((least - top) * LOG2_E)
    y = tl.load(y_ptr + n)
    scored = (y >= 0) & (y < V)
    unscored = tl.where(y == IGNORE, 0.0, float("nan"))
    tl.store(nll_ptr + n, tl.where(scored, tl.log(target + others) + (top - offset), unscored))
    tl.store(scale_ptr + n, tl.where(scored, 1.0 / (target + others), 0.0))
    # p_y - 1 = -others / (target + others): no cancellation.
    entry = (-others).to(out_ptr.dtype.element_ty)
    row_ptr = out_ptr + n.to(tl.int64) * stride
    if top == least:
        tl.store(row_ptr + y, entry, mask=scored)
    elif scored:
        v = 0
        while v < V:
            classes = v + tl.arange(0, BV)
            shift = tl.load(tops_ptr + classes // TILE, mask=classes < V, other=0.0) - top
            e = tl.load(row_ptr + classes, mask=classes < V, other=0.0).to(tl.float32) * tl.exp2(shift * LOG2_E)
            e = tl.where(classes == y, entry, e.to(out_ptr.dtype.element_ty))
            tl.store(row_ptr + classes, e, mask=classes < V)
            v += BV


@triton.jit
def scale_kernel(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):
    """Compute x *= factor. A factor of one, the gradient of a final loss, costs no pass over x."""
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < count, other=0.0)
        tl.store(x_ptr + offsets, (x.to(tl.float32) * factor).to(x.dtype), mask=offsets < count)
