"""The skip-gram kernel: a program trains on the pairs of some centres, one pair after the other.

Loads from the tables bypass the L1 cache, which does not see the additions of other multiprocessors.

Shapes: V words, D dimensions, C kept words of a stretch and its neighbours, K negatives, T = 1 + K targets of a pair.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _draw(key, numbers, STEP: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return 64 random bits for each number, by splitmix64."""
    bits = key.to(tl.uint64) + numbers.to(tl.uint64) * tl.full((), STEP, tl.uint64)
    bits = (bits ^ (bits >> 30)) * tl.full((), FIRST, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full((), SECOND, tl.uint64)
    return bits ^ (bits >> 31)


@triton.jit
def _negatives(bits, accept_ptr, alias_ptr, V):
    """Draw words by the alias method: a column, then the word of the column or its alias."""
    columns = (((bits >> 32) * V.to(tl.uint64)) >> 32).to(tl.int64)
    accepted = (bits & 0xFFFFFFFF).to(tl.int64) < tl.load(accept_ptr + columns)
    return tl.where(accepted, columns, tl.load(alias_ptr + columns))


@triton.jit(do_not_specialize=["count", "centres", "V", "key"])
def skip_gram_kernel(
    input_ptr,
    output_ptr,
    words_ptr,
    positions_ptr,
    lines_ptr,
    radius_ptr,
    accept_ptr,
    alias_ptr,
    count,
    centres,
    V,
    key,
    begin,
    fall,
    lowest,
    D: tl.constexpr,
    BD: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    WINDOW: tl.constexpr,
    CLIP: tl.constexpr,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Train on all pairs of `centres` centres, one after the other, with all targets of a pair at once."""
    d = tl.arange(0, BD)
    t = tl.arange(0, BT)
    first = tl.program_id(0) * centres
    for at in range(first, tl.minimum(first + centres, count)):
        radius = tl.load(radius_ptr + at).to(tl.int32)
        centre = tl.load(words_ptr + at)
        position = tl.load(positions_ptr + at)
        line = tl.load(lines_ptr + at)
        rate = tl.maximum(begin - fall * position.to(tl.float32), lowest)
        for other in range(tl.maximum(at - radius, 0), tl.minimum(at + radius + 1, count)):
            if (other != at) & (tl.load(lines_ptr + other) == line):
                context = tl.load(words_ptr + other)
                slot = other - at + WINDOW - tl.where(other > at, 1, 0)
                number = position * (2 + 2 * WINDOW * K) + 2 + slot * K
                negatives = _negatives(_draw(key, number + t - 1, STEP, FIRST, SECOND), accept_ptr, alias_ptr, V)
                targets = tl.where(t == 0, centre, negatives)
                counted = (t == 0) | ((t <= K) & (negatives != centre))
                v_ptrs = input_ptr + context * D + d
                u_ptrs = output_ptr + targets[:, None] * D + d[None, :]
                there = counted[:, None] & (d < D)[None, :]
                v = tl.load(v_ptrs, mask=d < D, other=0.0, cache_modifier=".cg")
                u = tl.load(u_ptrs, mask=there, other=0.0, cache_modifier=".cg")
                scores = tl.sum(u * v[None, :], 1)
                p = 1.0 / (1.0 + tl.exp(-scores))
                p = tl.where(scores > CLIP, 1.0, tl.where(scores < -CLIP, 0.0, p))
                g = tl.where(counted, rate * ((t == 0).to(tl.float32) - p), 0.0)
                e = tl.sum(g[:, None] * u, 0)
                tl.atomic_add(u_ptrs, g[:, None] * v[None, :], mask=there, sem="relaxed")
                tl.atomic_add(v_ptrs, e, mask=d < D, sem="relaxed")
