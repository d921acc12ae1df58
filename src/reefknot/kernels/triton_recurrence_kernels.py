"""The kernels that walk through a window of an LSTM and back: one launch each, however many steps there are.

Each program owns a few units for a tile of rows: it reads the state of all units that the programs have left in memory,
makes the four gates of its own, leaves its own part of the next state and meets the others at a barrier. Whatever does
not depend on the others (the input's share, the saved gates, what is stored for later) is moved while it waits there.
Each number is written by one program and summed in one order, so that equal calls give equal bits.

Shapes: T steps, B rows of the batch, H units, P of them with padding, G = 4H gates i, f, g, o; M masks, 1 or 4.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2.0 * _sigmoid(2.0 * x) - 1.0


@triton.jit
def _arrive(count_ptr):
    """Says that all this program has stored so far can be read."""
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release", scope="gpu")


@triton.jit
def _wait(count_ptr, arrivals):
    """Until so many programs have arrived. Every thread reads for itself, so that none has to tell the others."""
    while (
        tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [count_ptr], dtype=tl.int32, is_pure=False, pack=1
        )
        < arrivals
    ):
        pass


@triton.jit
def _four_products(
    a_ptr,
    w_ptr,
    rows,
    units,
    B,
    P: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """a_m w_m^T for each gate m, in float32: a is (B, M, P), one for all gates or one for each, and w is (4, P, P)."""
    k = tl.arange(0, BK)
    a_at = a_ptr + rows[:, None] * (M * P) + k[None, :]
    w_at = w_ptr + units[None, :] * P + k[:, None]
    there = rows[:, None] < B
    i = tl.zeros((BM, BH), tl.float32)
    f = tl.zeros((BM, BH), tl.float32)
    g = tl.zeros((BM, BH), tl.float32)
    o = tl.zeros((BM, BH), tl.float32)
    for _ in range(0, P, BK):
        # Past the cache of the multiprocessor, which does not see what others write.
        a_i = tl.load(a_at, mask=there, other=0.0, cache_modifier=".cg")
        a_f, a_g, a_o = a_i, a_i, a_i
        if M == 4:
            a_f = tl.load(a_at + P, mask=there, other=0.0, cache_modifier=".cg")
            a_g = tl.load(a_at + 2 * P, mask=there, other=0.0, cache_modifier=".cg")
            a_o = tl.load(a_at + 3 * P, mask=there, other=0.0, cache_modifier=".cg")
        # Four sums, even where one would do: each product waits for the sum that it adds to.
        i = tl.dot(a_i, tl.load(w_at), i, input_precision=PRECISION)
        f = tl.dot(a_f, tl.load(w_at + P * P), f, input_precision=PRECISION)
        g = tl.dot(a_g, tl.load(w_at + 2 * P * P), g, input_precision=PRECISION)
        o = tl.dot(a_o, tl.load(w_at + 3 * P * P), o, input_precision=PRECISION)
        a_at += BK
        w_at += BK
    return i, f, g, o


@triton.jit
def _load_gates(ptr, own, H: tl.constexpr):
    """Of rows that are (4, H) each."""
    i = tl.load(ptr, mask=own, other=0.0).to(tl.float32)
    f = tl.load(ptr + H, mask=own, other=0.0).to(tl.float32)
    g = tl.load(ptr + 2 * H, mask=own, other=0.0).to(tl.float32)
    o = tl.load(ptr + 3 * H, mask=own, other=0.0).to(tl.float32)
    return i, f, g, o


@triton.jit
def _store_gates(ptr, i, f, g, o, own, H: tl.constexpr):
    tl.store(ptr, i.to(ptr.dtype.element_ty), mask=own)
    tl.store(ptr + H, f.to(ptr.dtype.element_ty), mask=own)
    tl.store(ptr + 2 * H, g.to(ptr.dtype.element_ty), mask=own)
    tl.store(ptr + 3 * H, o.to(ptr.dtype.element_ty), mask=own)


@triton.jit
def _load_mask(ptr, places, own, stride, M: tl.constexpr, MASKED: tl.constexpr):
    """A factor per gate: from one (B, H) for all of them, or from (4, B, H)."""
    if MASKED:
        i = tl.load(ptr + places, mask=own, other=0.0).to(tl.float32)
    else:
        i = tl.full(own.shape, 1.0, tl.float32)
    f, g, o = i, i, i
    if M == 4:
        f = tl.load(ptr + stride + places, mask=own, other=0.0).to(tl.float32)
        g = tl.load(ptr + 2 * stride + places, mask=own, other=0.0).to(tl.float32)
        o = tl.load(ptr + 3 * stride + places, mask=own, other=0.0).to(tl.float32)
    return i, f, g, o


@triton.jit(do_not_specialize=["first", "last", "T", "tile", "B"])
def forward_kernel(
    x_ptr,
    w_ptr,
    mask_ptr,
    states_ptr,
    h_ptr,
    cells_ptr,
    gates_ptr,
    count_ptr,
    first,
    last,
    T,
    tile,
    B,
    H: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    MASKED: tl.constexpr,
    MEETING: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Steps `first` to `last`: outputs h (T, B, H), and for the way back the masked states (T + 1, B, M, P), the cells
    (T + 1, B, H) and the activated gates (T, B, 4, H). States and cells before the first step are given there."""
    rows = (tile + tl.program_id(1)) * BM + tl.arange(0, BM)
    units = tl.program_id(0) * BH + tl.arange(0, BH)
    own = (rows[:, None] < B) & (units[None, :] < H)
    at_BH = rows[:, None] * H + units[None, :]
    at_BMP = rows[:, None] * (M * P) + units[None, :]
    at_BG = rows[:, None] * (4 * H) + units[None, :]
    batch = B.to(tl.int64)
    count_ptr += tile + tl.program_id(1)
    mask_i, mask_f, mask_g, mask_o = _load_mask(mask_ptr, at_BH, own, batch * H, M, MASKED)
    c = tl.load(cells_ptr + first * batch * H + at_BH, mask=own, other=0.0)
    for t in range(first, last):
        x_i, x_f, x_g, x_o = _load_gates(x_ptr + t * batch * (4 * H) + at_BG, own, H)
        if MEETING:
            _wait(count_ptr, (t - first) * tl.num_programs(0))
        read_ptr = states_ptr + t * batch * (M * P)
        i, f, g, o = _four_products(read_ptr, w_ptr, rows, units, B, P, M, BM, BH, BK, PRECISION)
        i = _sigmoid(i + x_i)
        f = _sigmoid(f + x_f)
        g = _tanh(g + x_g)
        o = _sigmoid(o + x_o)
        c = f * c + i * g
        h = (o * _tanh(c)).to(h_ptr.dtype.element_ty)
        left_ptr = states_ptr + (t + 1) * batch * (M * P) + at_BMP
        kept = h.to(tl.float32)  # rounded before it is masked, as a state that comes from the window before is
        if M == 4:
            _store_gates(left_ptr, kept * mask_i, kept * mask_f, kept * mask_g, kept * mask_o, own, P)
        else:
            tl.store(left_ptr, (kept * mask_i).to(h.dtype), mask=own)
        if MEETING:
            _arrive(count_ptr)
        tl.store(h_ptr + t * batch * H + at_BH, h, mask=own)
        tl.store(cells_ptr + (t + 1) * batch * H + at_BH, c, mask=own)
        _store_gates(gates_ptr + t * batch * (4 * H) + at_BG, i, f, g, o, own, H)


@triton.jit(do_not_specialize=["first", "last", "T", "tile", "B"])
def backward_kernel(
    g_ptr,
    w_ptr,
    mask_ptr,
    d_ptr,
    dc_ptr,
    cells_ptr,
    gates_ptr,
    count_ptr,
    first,
    last,
    T,
    tile,
    B,
    H: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    MASKED: tl.constexpr,
    MEETING: tl.constexpr,
    BM: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Steps `first` to `last` counted from the end: the gates' gradients d (T + 1, B, 4, P), which are zero after the
    last step, from the outputs' g (T, B, H). dc (B, H) comes with the last cells' gradient and leaves with the first's.
    """
    rows = (tile + tl.program_id(1)) * BM + tl.arange(0, BM)
    units = tl.program_id(0) * BH + tl.arange(0, BH)
    own = (rows[:, None] < B) & (units[None, :] < H)
    at_BH = rows[:, None] * H + units[None, :]
    at_BG = rows[:, None] * (4 * H) + units[None, :]
    at_BGP = rows[:, None] * (4 * P) + units[None, :]
    batch = B.to(tl.int64)
    count_ptr += tile + tl.program_id(1)
    mask_i, mask_f, mask_g, mask_o = _load_mask(mask_ptr, at_BH, own, batch * H, M, MASKED)
    dc = tl.load(dc_ptr + at_BH, mask=own, other=0.0)
    for step in range(first, last):
        t = T - 1 - step
        i, f, g, o = _load_gates(gates_ptr + t * batch * (4 * H) + at_BG, own, H)
        before = tl.load(cells_ptr + t * batch * H + at_BH, mask=own, other=0.0)
        bent = _tanh(tl.load(cells_ptr + (t + 1) * batch * H + at_BH, mask=own, other=0.0))
        dh = tl.load(g_ptr + t * batch * H + at_BH, mask=own, other=0.0).to(tl.float32)
        if MEETING:
            _wait(count_ptr, (step - first) * tl.num_programs(0))
        read_ptr = d_ptr + (t + 1) * batch * (4 * P)
        d_i, d_f, d_g, d_o = _four_products(read_ptr, w_ptr, rows, units, B, P, 4, BM, BH, BK, PRECISION)
        dh += (d_i * mask_i + d_f * mask_f) + (d_g * mask_g + d_o * mask_o)
        dc += dh * o * (1.0 - bent * bent)
        d_i = dc * g * i * (1.0 - i)
        d_f = dc * before * f * (1.0 - f)
        d_g = dc * i * (1.0 - g * g)
        d_o = dh * bent * o * (1.0 - o)
        _store_gates(d_ptr + t * batch * (4 * P) + at_BGP, d_i, d_f, d_g, d_o, own, P)
        if MEETING:
            _arrive(count_ptr)
        dc *= f
    tl.store(dc_ptr + at_BH, dc, mask=own)
