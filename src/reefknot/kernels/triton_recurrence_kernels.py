"""The Triton kernels of `triton_recurrence`: an LSTM's forward and backward pass, for any number of steps and layers.

`forward_kernel` and `backward_kernel`, at the end of the file, are one launch each. Functions that start with an
underscore are parts of them.

Each program computes a few units of one layer, for a tile of rows. In each step, it reads the state of all units, which
the programs of the layer have written to memory. It computes the four gates of its units, writes its part of the next
state, and waits for the other programs at a barrier. A layer that reads another layer waits for it step by step, so all
layers run at once, each one step behind the layer that it reads. Some data do not depend on the previous step of the
layer: the contribution of the input, the other layer, the saved gates, and what is stored for later. They are loaded
and stored while that step ends. Each number is written by one program and summed in a fixed order, so results are
reproducible bit by bit.

`triton_recurrence` chooses these constants:

    BLOCK_B, BLOCK_H    rows and units of a program's tile
    BLOCK_K             units of a state that are loaded and multiplied at a time
    HOLD                padded number of units if weights stay on the chip for all steps, else 0
    PRECISION           how float32 numbers are multiplied

Names: x the input's contribution to the gates, h states, c cells, i, f, g, o the gates; w_i ... w_o recurrent weights
and u_i ... u_o upward weights (for the state of the layer below), gate by gate; d_i ... d_o and dx the gradients of
gates and of x. A name that ends in _ptr is a pointer.
Shapes: T steps, B rows of the batch, H units, P units with padding, G = 4H gates i, f, g, o; M masks, 1 or 4.
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
def _counter(count_ptr, tile, layer, LAYERS: tl.constexpr):
    """Return the counter of a tile's layer, or None if programs do not wait. Each counter has its own cache line."""
    if count_ptr is not None:
        count_ptr += (tile * LAYERS + layer) * 32
    return count_ptr


@triton.jit
def _arrive(count_ptr):
    """Signal that everything this program has stored so far can be read."""
    if count_ptr is not None:
        tl.debug_barrier()
        tl.atomic_add(count_ptr, 1, sem="release", scope="gpu")


@triton.jit
def _wait(count_ptr, arrivals):
    """Wait until this many programs have arrived. Every thread polls, so that no thread has to notify the others."""
    if count_ptr is not None:
        while (
            tl.inline_asm_elementwise(
                "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [count_ptr], dtype=tl.int32, is_pure=False, pack=1
            )
            < arrivals
        ):
            pass


@triton.jit
def _tile_of_program(tile, B, H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return a program's rows and units, the mask of those that exist, and their offsets in (B, H) and in (B, 4, H)."""
    rows = tile * BLOCK_B + tl.arange(0, BLOCK_B)
    units = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = (rows[:, None] < B) & (units[None, :] < H)
    return rows, units, valid, rows[:, None] * H + units[None, :], rows[:, None] * (4 * H) + units[None, :]


@triton.jit
def _zeros(BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr):
    zero = tl.zeros((BLOCK_B, BLOCK_H), tl.float32)
    return zero, zero, zero, zero


@triton.jit
def _load_weights(w_ptr, units, k, H: tl.constexpr, P: tl.constexpr):
    """Load the weights from input units k to the units of this program, gate by gate, out of (4, H, P)."""
    pointers = w_ptr + units[None, :] * P + k[:, None]
    valid = (units[None, :] < H) & (k[:, None] < P)
    i = tl.load(pointers, mask=valid, other=0.0)
    f = tl.load(pointers + H * P, mask=valid, other=0.0)
    g = tl.load(pointers + 2 * H * P, mask=valid, other=0.0)
    o = tl.load(pointers + 3 * H * P, mask=valid, other=0.0)
    return i, f, g, o


@triton.jit
def _add_products(
    a_ptr, w_i, w_f, w_g, w_o, i, f, g, o, rows, k, B, P: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr
):
    """Add a_m w_m for each gate m, in float32, over units k. `a` is (B, M, P), with M = 1 for all gates or M = 4."""
    pointers = a_ptr + rows[:, None] * (M * P) + k[None, :]
    valid = (rows[:, None] < B) & (k[None, :] < P)
    # Bypass the L1 cache, which does not see what other multiprocessors write.
    a_i = tl.load(pointers, mask=valid, other=0.0, cache_modifier=".cg")
    a_f, a_g, a_o = a_i, a_i, a_i
    if M == 4:
        a_f = tl.load(pointers + P, mask=valid, other=0.0, cache_modifier=".cg")
        a_g = tl.load(pointers + 2 * P, mask=valid, other=0.0, cache_modifier=".cg")
        a_o = tl.load(pointers + 3 * P, mask=valid, other=0.0, cache_modifier=".cg")
    # Four separate sums, because each product waits for the sum that it adds to.
    i = tl.dot(a_i, w_i, i, input_precision=PRECISION)
    f = tl.dot(a_f, w_f, f, input_precision=PRECISION)
    g = tl.dot(a_g, w_g, g, input_precision=PRECISION)
    o = tl.dot(a_o, w_o, o, input_precision=PRECISION)
    return i, f, g, o


@triton.jit
def _hold_weights(w_ptr, units, H: tl.constexpr, P: tl.constexpr, HOLD: tl.constexpr):
    """Load all weights of a program to keep them on the chip for all steps, unless HOLD is 0."""
    if HOLD:
        i, f, g, o = _load_weights(w_ptr, units, tl.arange(0, HOLD), H, P)
    else:
        i, f, g, o = _zeros(1, 1)
    return i, f, g, o


@triton.jit
def _add_all_products(
    a_ptr,
    w_ptr,
    w_i,
    w_f,
    w_g,
    w_o,
    i,
    f,
    g,
    o,
    rows,
    units,
    B,
    H: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HOLD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the products of a state with its weights, over all units.

    The weights are held on the chip (w_i ... w_o), or loaded from `w_ptr` as needed.
    """
    if HOLD:
        k = tl.arange(0, HOLD)
        i, f, g, o = _add_products(a_ptr, w_i, w_f, w_g, w_o, i, f, g, o, rows, k, B, P, M, PRECISION)
    else:
        for start in range(0, P, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            v_i, v_f, v_g, v_o = _load_weights(w_ptr, units, k, H, P)
            i, f, g, o = _add_products(a_ptr, v_i, v_f, v_g, v_o, i, f, g, o, rows, k, B, P, M, PRECISION)
    return i, f, g, o


@triton.jit
def _mask_if(condition, valid):
    """Return the mask if a scalar condition holds, else a mask of False.

    `valid & condition` does not work, because the interpreter of Triton 3.9 makes a mask of integers from it and then
    rejects that mask.
    """
    return tl.where(condition, valid, False)


@triton.jit
def _load_gates(ptr, valid, H: tl.constexpr):
    """Load the four gates from rows of shape (4, H)."""
    i = tl.load(ptr, mask=valid, other=0.0).to(tl.float32)
    f = tl.load(ptr + H, mask=valid, other=0.0).to(tl.float32)
    g = tl.load(ptr + 2 * H, mask=valid, other=0.0).to(tl.float32)
    o = tl.load(ptr + 3 * H, mask=valid, other=0.0).to(tl.float32)
    return i, f, g, o


@triton.jit
def _store_gates(ptr, i, f, g, o, valid, H: tl.constexpr):
    tl.store(ptr, i.to(ptr.dtype.element_ty), mask=valid)
    tl.store(ptr + H, f.to(ptr.dtype.element_ty), mask=valid)
    tl.store(ptr + 2 * H, g.to(ptr.dtype.element_ty), mask=valid)
    tl.store(ptr + 3 * H, o.to(ptr.dtype.element_ty), mask=valid)


@triton.jit
def _store_masked(ptr, h, i, f, g, o, valid, P: tl.constexpr, M: tl.constexpr):
    """Store a state with its mask: once for all gates, or once per gate."""
    state = h.to(tl.float32)  # h is rounded before it is masked, like the state of the previous window
    if M == 4:
        _store_gates(ptr, state * i, state * f, state * g, state * o, valid, P)
    else:
        tl.store(ptr, (state * i).to(h.dtype), mask=valid)


@triton.jit
def _gate_gradients(dh, dc, i, f, g, o, c_before, tanh_c):
    """Return the gradients of the gates, given the gradients of state and cell after a step.

    `c_before` is the cell before the step, `tanh_c` the tanh of the cell after it.
    """
    d_o = dh * tanh_c * o * (1.0 - o)
    return dc * g * i * (1.0 - i), dc * c_before * f * (1.0 - f), dc * i * (1.0 - g * g), d_o


@triton.jit
def _load_mask(ptr, offsets, valid, stride, M: tl.constexpr):
    """Load a factor for each gate from a mask (B, H) for all gates, or (4, B, H); 1 without a mask."""
    if ptr is not None:
        i = tl.load(ptr + offsets, mask=valid, other=0.0).to(tl.float32)
    else:
        i = tl.full(valid.shape, 1.0, tl.float32)
    f, g, o = i, i, i
    if M == 4:
        f = tl.load(ptr + stride + offsets, mask=valid, other=0.0).to(tl.float32)
        g = tl.load(ptr + 2 * stride + offsets, mask=valid, other=0.0).to(tl.float32)
        o = tl.load(ptr + 3 * stride + offsets, mask=valid, other=0.0).to(tl.float32)
    return i, f, g, o


@triton.jit(do_not_specialize=["start_step", "end_step", "T", "first_tile", "first_layer", "B"])
def forward_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    mask_ptr,
    states_ptr,
    cells_ptr,
    gates_ptr,
    h_ptr,
    last_h_ptr,
    last_c_ptr,
    count_ptr,
    start_step,
    end_step,
    T,
    first_tile,
    first_layer,
    B,
    LAYERS: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HOLD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the forward pass of steps `start_step` to `end_step`.

    Results: the outputs of the last layer, h (T, B, H), and the last states and cells (LAYERS, B, H). For the backward
    kernel also the masked states (LAYERS, T + 1, B, M, P), the cells (LAYERS, T + 1, B, H) and the gates
    (LAYERS, T, B, 4, H). States and cells before the first step are already stored. Weights are
    (2 LAYERS - 1, 4, H, P): the recurrent weights of all layers, then the upward weights.
    """
    layer = first_layer + tl.program_id(2)
    tile = first_tile + tl.program_id(1)
    rows, units, valid, offsets_BH, offsets_BG = _tile_of_program(tile, B, H, BLOCK_B, BLOCK_H)
    offsets_BMP = rows[:, None] * (M * P) + units[None, :]
    batch = B.to(tl.int64)
    states_ptr += layer * (T + 1) * batch * (M * P)
    below_ptr = states_ptr - (T + 1) * batch * (M * P)
    cells_ptr += layer * (T + 1) * batch * H
    gates_ptr += layer * T * batch * (4 * H)
    upward_ptr = w_ptr + (LAYERS + layer - 1) * (4 * H * P)
    w_ptr += layer * (4 * H * P)
    below_count_ptr = _counter(count_ptr, tile, layer - 1, LAYERS)
    count_ptr = _counter(count_ptr, tile, layer, LAYERS)
    mask_i, mask_f, mask_g, mask_o = _load_mask(mask_ptr, layer * M * batch * H + offsets_BH, valid, batch * H, M)
    w_i, w_f, w_g, w_o = _hold_weights(w_ptr, units, H, P, HOLD)
    if LAYERS > 1:
        u_i, u_f, u_g, u_o = _hold_weights(upward_ptr, units, H, P, HOLD)
        bias_ptr += (layer - 1) * (4 * H) + units[None, :]
        b_i, b_f, b_g, b_o = _load_gates(bias_ptr, _mask_if(layer > 0, units[None, :] < H), H)
    c = tl.load(cells_ptr + start_step * batch * H + offsets_BH, mask=valid, other=0.0)
    h = tl.zeros((BLOCK_B, BLOCK_H), h_ptr.dtype.element_ty)
    for t in range(start_step, end_step):
        x_i, x_f, x_g, x_o = _load_gates(x_ptr + t * batch * (4 * H) + offsets_BG, _mask_if(layer == 0, valid), H)
        i, f, g, o = _zeros(BLOCK_B, BLOCK_H)
        if LAYERS > 1:
            x_i, x_f, x_g, x_o = x_i + b_i, x_f + b_f, x_g + b_g, x_o + b_o
            # The layer below comes first: it is one step ahead, while the previous step of this layer may still run.
            if layer > 0:
                _wait(below_count_ptr, (t + 1 - start_step) * tl.num_programs(0))
                below_state_ptr = below_ptr + (t + 1) * batch * (M * P)
                i, f, g, o = _add_all_products(
                    *(below_state_ptr, upward_ptr, u_i, u_f, u_g, u_o, i, f, g, o, rows, units, B),
                    *(H, P, M, BLOCK_K, HOLD, PRECISION),
                )
        _wait(count_ptr, (t - start_step) * tl.num_programs(0))
        state_ptr = states_ptr + t * batch * (M * P)
        i, f, g, o = _add_all_products(
            *(state_ptr, w_ptr, w_i, w_f, w_g, w_o, i, f, g, o, rows, units, B),
            *(H, P, M, BLOCK_K, HOLD, PRECISION),
        )
        i, f, g, o = _sigmoid(i + x_i), _sigmoid(f + x_f), _tanh(g + x_g), _sigmoid(o + x_o)
        c = f * c + i * g
        h = (o * _tanh(c)).to(h.dtype)
        next_state_ptr = state_ptr + batch * (M * P) + offsets_BMP
        _store_masked(next_state_ptr, h, mask_i, mask_f, mask_g, mask_o, valid, P, M)
        _arrive(count_ptr)
        tl.store(h_ptr + t * batch * H + offsets_BH, h, mask=_mask_if(layer == LAYERS - 1, valid))
        tl.store(cells_ptr + (t + 1) * batch * H + offsets_BH, c, mask=valid)
        _store_gates(gates_ptr + t * batch * (4 * H) + offsets_BG, i, f, g, o, valid, H)
    tl.store(last_h_ptr + layer * batch * H + offsets_BH, h, mask=valid)
    tl.store(last_c_ptr + layer * batch * H + offsets_BH, c, mask=valid)


@triton.jit(do_not_specialize=["start_step", "end_step", "T", "first_tile", "first_layer", "B"])
def backward_kernel(
    g_ptr,
    g_last_h_ptr,
    g_last_c_ptr,
    w_ptr,
    mask_ptr,
    cells_ptr,
    gates_ptr,
    d_ptr,
    dc_ptr,
    count_ptr,
    start_step,
    end_step,
    T,
    first_tile,
    first_layer,
    B,
    LAYERS: tl.constexpr,
    H: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HOLD: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the backward pass of steps `start_step` to `end_step`, with steps and layers counted from the end.

    Results: the gradients of the gates, d (LAYERS, T, B, 4, P), and of the cells before the first step, dc
    (LAYERS, B, H). Inputs: the gradients of the outputs, g (T, B, H), and of the last states and cells (LAYERS, B, H),
    or None. Weights are the transposed weights of the forward kernel.
    """
    from_top = first_layer + tl.program_id(2)
    layer = LAYERS - 1 - from_top
    tile = first_tile + tl.program_id(1)
    rows, units, valid, offsets_BH, offsets_BG = _tile_of_program(tile, B, H, BLOCK_B, BLOCK_H)
    batch = B.to(tl.int64)
    d_ptr += layer * T * batch * (4 * P)
    above_ptr = d_ptr + T * batch * (4 * P)
    cells_ptr += layer * (T + 1) * batch * H
    gates_ptr += layer * T * batch * (4 * H)
    offsets_LBH = layer * batch * H + offsets_BH
    # The last layer has no layer above it. It gets a valid pointer that it does not use.
    upward_ptr = w_ptr + (LAYERS + tl.minimum(layer, LAYERS - 2)) * (4 * H * P)
    w_ptr += layer * (4 * H * P)
    above_count_ptr = _counter(count_ptr, tile, from_top - 1, LAYERS)
    count_ptr = _counter(count_ptr, tile, from_top, LAYERS)
    mask_i, mask_f, mask_g, mask_o = _load_mask(mask_ptr, layer * M * batch * H + offsets_BH, valid, batch * H, M)
    w_i, w_f, w_g, w_o = _hold_weights(w_ptr, units, H, P, HOLD)
    if LAYERS > 1:
        u_i, u_f, u_g, u_o = _hold_weights(upward_ptr, units, H, P, HOLD)
    dc = tl.load(dc_ptr + offsets_LBH, mask=_mask_if(start_step > 0, valid), other=0.0)
    if g_last_c_ptr is not None:
        dc += tl.load(g_last_c_ptr + offsets_LBH, mask=_mask_if(start_step == 0, valid), other=0.0).to(tl.float32)
    for step in range(start_step, end_step):
        t = T - 1 - step
        i, f, g, o = _load_gates(gates_ptr + t * batch * (4 * H) + offsets_BG, valid, H)
        c_before = tl.load(cells_ptr + t * batch * H + offsets_BH, mask=valid, other=0.0)
        tanh_c = _tanh(tl.load(cells_ptr + (t + 1) * batch * H + offsets_BH, mask=valid, other=0.0))
        dh = tl.load(g_ptr + t * batch * H + offsets_BH, mask=_mask_if(from_top == 0, valid), other=0.0).to(tl.float32)
        if g_last_h_ptr is not None:
            dh += tl.load(g_last_h_ptr + offsets_LBH, mask=_mask_if(step == 0, valid), other=0.0).to(tl.float32)
        d_i, d_f, d_g, d_o = _zeros(BLOCK_B, BLOCK_H)
        if LAYERS > 1 and from_top > 0:
            _wait(above_count_ptr, (step + 1 - start_step) * tl.num_programs(0))
            above_gates_ptr = above_ptr + t * batch * (4 * P)
            d_i, d_f, d_g, d_o = _add_all_products(
                *(above_gates_ptr, upward_ptr, u_i, u_f, u_g, u_o, d_i, d_f, d_g, d_o, rows, units, B),
                *(H, P, 4, BLOCK_K, HOLD, PRECISION),
            )
        _wait(count_ptr, (step - start_step) * tl.num_programs(0))
        next_gates_ptr = d_ptr + (t + 1) * batch * (4 * P)
        rows_with_next = tl.where(step > 0, B, 0)  # the state of the last step is not read again
        d_i, d_f, d_g, d_o = _add_all_products(
            *(next_gates_ptr, w_ptr, w_i, w_f, w_g, w_o, d_i, d_f, d_g, d_o, rows, units, rows_with_next),
            *(H, P, 4, BLOCK_K, HOLD, PRECISION),
        )
        dh += (d_i * mask_i + d_f * mask_f) + (d_g * mask_g + d_o * mask_o)
        dc += dh * o * (1.0 - tanh_c * tanh_c)
        d_i, d_f, d_g, d_o = _gate_gradients(dh, dc, i, f, g, o, c_before, tanh_c)
        _store_gates(d_ptr + (t * batch + rows[:, None]) * (4 * P) + units[None, :], d_i, d_f, d_g, d_o, valid, P)
        _arrive(count_ptr)
        dc *= f
    tl.store(dc_ptr + offsets_LBH, dc, mask=valid)
