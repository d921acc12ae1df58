"""Skip-gram on a GPU: many programs share the tables, and updates are added atomically (Hogwild).

`train_on_gpu` is the function to start from; it launches the kernel of `triton_skip_gram_kernels`. `skip_gram` explains
the algorithm.

Each program trains on the pairs of a range of centres, one pair after the other, with all targets of a pair at once. A
pair misses only what other programs add at the same time. The largest number of programs depends on the text
(`PairSampler.max_parallel_pairs`), not on the device. Atomic additions lose no update, but their order is not fixed. So
two runs differ in the last bits at first, and more over time.

Shapes: V words, D dimensions, C kept words of a range and its neighbours, K negatives.
"""

from __future__ import annotations

from typing import Any

import triton

from reefknot.kernels.skip_gram import CLIP, TrainingRange
from reefknot.kernels.skip_gram_draws import INCREMENT, MULTIPLIER_1, MULTIPLIER_2, find_kept_words, to_signed
from reefknot.kernels.triton_skip_gram_kernels import skip_gram_kernel


def train_on_gpu(training_range: TrainingRange) -> None:
    """Train on the whole range in one launch."""
    sampler, rates = training_range.sampler, training_range.rates
    kept = find_kept_words(sampler, training_range.key, training_range.ids, training_range.start, training_range.stop)
    num_kept = len(kept.words)
    if not num_kept:
        return
    vocab_size, dim = training_range.inputs.shape
    start_rate, decrease = rates.start_and_decrease
    centres_per_program = triton.cdiv(num_kept, sampler.max_parallel_pairs(rates.initial))
    num_programs = triton.cdiv(num_kept, centres_per_program)
    skip_gram_kernel[(num_programs,)](
        input_ptr=training_range.inputs,
        output_ptr=training_range.outputs,
        words_ptr=kept.words,
        positions_ptr=kept.positions,
        lines_ptr=kept.lines,
        radius_ptr=kept.radius,
        accept_ptr=sampler.accept,
        alias_ptr=sampler.alias,
        num_kept=num_kept,
        centres_per_program=centres_per_program,
        V=vocab_size,
        key=to_signed(training_range.key),
        start_rate=start_rate,
        decrease=decrease,
        lowest=rates.lowest,
        **kernel_constants(dim, sampler.negatives, sampler.window),
        num_warps=2 if dim > 64 else 1,
    )


def kernel_constants(dim: int, negatives: int, window: int) -> dict[str, Any]:
    """Return the constants that the kernel is compiled for. Triton needs blocks whose sizes are powers of 2."""
    return {
        "D": dim,
        "BLOCK_D": triton.next_power_of_2(dim),
        "K": negatives,
        "BLOCK_T": triton.next_power_of_2(1 + negatives),
        "WINDOW": window,
        "CLIP": CLIP,
        "INCREMENT": INCREMENT,
        "MULTIPLIER_1": MULTIPLIER_1,
        "MULTIPLIER_2": MULTIPLIER_2,
    }
