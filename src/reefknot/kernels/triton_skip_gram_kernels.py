"""The Triton kernel of `triton_skip_gram`: a program trains on the pairs of some centres, one pair after the other.

`skip_gram_kernel` is the kernel; the other functions are parts of it. `skip_gram` explains the algorithm and the names
u, v, g and e. Loads from the tables bypass the L1 cache, which does not see the additions of other multiprocessors.

BLOCK_D and BLOCK_T are D and T rounded up to powers of 2. INCREMENT and the multipliers are those of splitmix64.
Shapes: V words, D dimensions, C kept words of a range and its neighbours, K negatives, T = 1 + K targets of a pair.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _random_bits(key, indices, INCREMENT: tl.constexpr, MULTIPLIER_1: tl.constexpr, MULTIPLIER_2: tl.constexpr):
    """Return 64 random bits for each index, by splitmix64, as `skip_gram_draws.random_bits` does."""
    bits = key.to(tl.uint64) + indices.to(tl.uint64) * tl.full((), INCREMENT, tl.uint64)
    bits = (bits ^ (bits >> 30)) * tl.full((), MULTIPLIER_1, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full((), MULTIPLIER_2, tl.uint64)
    return bits ^ (bits >> 31)


@triton.jit
def _sample_negatives(bits, accept_ptr, alias_ptr, V):
    """Return random words by the alias method: a column, then the word of the column or its alias."""
    columns = (((bits >> 32) * V.to(tl.uint64)) >> 32).to(tl.int64)
    accepted = (bits & 0xFFFFFFFF).to(tl.int64) < tl.load(accept_ptr + columns)
    return tl.where(accepted, columns, tl.load(alias_ptr + columns))


@triton.jit(do_not_specialize=["num_kept", "centres_per_program", "V", "key"])
def skip_gram_kernel(
    input_ptr,
    output_ptr,
    words_ptr,
    positions_ptr,
    lines_ptr,
    radius_ptr,
    accept_ptr,
    alias_ptr,
    num_kept,
    centres_per_program,
    V,
    key,
    start_rate,
    decrease,
    lowest,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WINDOW: tl.constexpr,
    CLIP: tl.constexpr,
    INCREMENT: tl.constexpr,
    MULTIPLIER_1: tl.constexpr,
    MULTIPLIER_2: tl.constexpr,
):
    """Train on all pairs of `centres_per_program` centres, one after the other, with all targets of a pair at once."""
    d = tl.arange(0, BLOCK_D)
    t = tl.arange(0, BLOCK_T)
    first = tl.program_id(0) * centres_per_program
    # `centre` and `context` are indices of kept words.
    for centre in range(first, tl.minimum(first + centres_per_program, num_kept)):
        radius = tl.load(radius_ptr + centre).to(tl.int32)
        centre_word = tl.load(words_ptr + centre)
        position = tl.load(positions_ptr + centre)
        line = tl.load(lines_ptr + centre)
        rate = tl.maximum(start_rate - decrease * position.to(tl.float32), lowest)
        for context in range(tl.maximum(centre - radius, 0), tl.minimum(centre + radius + 1, num_kept)):
            if (context != centre) & (tl.load(lines_ptr + context) == line):
                context_word = tl.load(words_ptr + context)
                # The index of the context in the largest window, which has no slot for the centre.
                slot = context - centre + WINDOW - tl.where(context > centre, 1, 0)
                first_negative = position * (2 + 2 * WINDOW * K) + 2 + slot * K
                bits = _random_bits(key, first_negative + t - 1, INCREMENT, MULTIPLIER_1, MULTIPLIER_2)
                negatives = _sample_negatives(bits, accept_ptr, alias_ptr, V)
                targets = tl.where(t == 0, centre_word, negatives)
                is_target = (t == 0) | ((t <= K) & (negatives != centre_word))
                v_ptrs = input_ptr + context_word * D + d
                u_ptrs = output_ptr + targets[:, None] * D + d[None, :]
                u_mask = is_target[:, None] & (d < D)[None, :]
                v = tl.load(v_ptrs, mask=d < D, other=0.0, cache_modifier=".cg")
                u = tl.load(u_ptrs, mask=u_mask, other=0.0, cache_modifier=".cg")
                scores = tl.sum(u * v[None, :], 1)
                p = 1.0 / (1.0 + tl.exp(-scores))
                p = tl.where(scores > CLIP, 1.0, tl.where(scores < -CLIP, 0.0, p))
                g = tl.where(is_target, rate * ((t == 0).to(tl.float32) - p), 0.0)
                e = tl.sum(g[:, None] * u, 0)
                tl.atomic_add(u_ptrs, g[:, None] * v[None, :], mask=u_mask, sem="relaxed")
                tl.atomic_add(v_ptrs, e, mask=d < D, sem="relaxed")
