"""Skip-gram compiled for the CPU by numba, on threads that share the tables without locks (Hogwild).

`train_on_threads` is the function to start from. Each thread calls `_train_centres`, the compiled loop, on a part of
the text. `skip_gram` explains the algorithm and the names u, v, g and e.

If two threads change a row at the same time, a part of one update may be lost. There are many rows, so this is rare
(Recht et al. 2011). Most of the time is spent waiting for rows that are not in a cache. So the pairs of a centre are
sampled first and their rows are prefetched; then the pairs are trained. Every process compiles the machine code again,
which takes two or three seconds, because numba's cache on disk consists of pickles, which this package never reads.

Shapes: V words, D dimensions, C kept words of a range and its neighbours, P pairs of a centre, T = 1 + negatives
targets.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from reefknot.kernels.skip_gram import CLIP, TrainingRange
from reefknot.kernels.skip_gram_draws import INCREMENT, MULTIPLIER_1, MULTIPLIER_2

POSITIONS_PER_TASK = 10_000
"""Number of positions that a thread trains on at a time."""
_INCREMENT, _MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(INCREMENT), np.uint64(MULTIPLIER_1), np.uint64(MULTIPLIER_2)
_32_BITS, _LOWER_HALF = np.uint64(32), np.uint64(2**32 - 1)
_FLOATS_PER_CACHE_LINE = 16
_NUM_CELLS = 1024
# This is the sigmoid from -CLIP to CLIP, and one cell more. Linear interpolation between two cells has an error below
# 2e-6.
_SIGMOID = (1.0 / (1.0 + np.exp(-(np.arange(_NUM_CELLS + 2) * (2 * CLIP / _NUM_CELLS) - CLIP)))).astype(np.float32)
_CELLS_PER_UNIT, _CLIP = np.float32(_NUM_CELLS / (2 * CLIP)), np.float32(CLIP)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered and fused with products. Nothing is assumed to be finite, so that NaN stays NaN."""


def train_on_threads(training_range: TrainingRange, workers: int) -> None:
    """Train on the range in parts of `POSITIONS_PER_TASK` words. The next free thread trains on the next part."""
    ids, sampler, rates = training_range.ids, training_range.sampler, training_range.rates
    input_VD, output_VD = training_range.inputs.numpy(), training_range.outputs.numpy()
    keep_V, accept_V, alias_V = sampler.keep.numpy(), sampler.accept.numpy(), sampler.alias.numpy()
    start_rate, decrease = rates.start_and_decrease
    key = np.uint64(training_range.key)

    def train_part(start: int) -> None:
        stop = min(start + POSITIONS_PER_TASK, training_range.stop)
        extended_start, extended_stop = sampler.range_with_neighbours(training_range.key, ids, start, stop)
        _train_centres(
            input_VD=input_VD,
            output_VD=output_VD,
            tied=training_range.tied,
            ids=ids,
            extended_start=extended_start,
            extended_stop=extended_stop,
            start=start,
            stop=stop,
            keep_V=keep_V,
            accept_V=accept_V,
            alias_V=alias_V,
            window=sampler.window,
            negatives=sampler.negatives,
            eos=sampler.eos,
            key=key,
            start_rate=start_rate,
            decrease=decrease,
            lowest=rates.lowest,
        )

    starts = range(training_range.start, training_range.stop, POSITIONS_PER_TASK)
    if workers == 1:
        for start in starts:
            train_part(start)
        return
    with ThreadPoolExecutor(workers) as threads:
        for _ in threads.map(train_part, starts):
            pass


def _build_prefetch(typing: Any, table: Any, row: Any, column: Any) -> Any:
    """Prefetch the cache line of a number in a table, without waiting for it."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        row_stride, column_stride = (builder.extract_value(array.strides, axis) for axis in range(2))
        offset = builder.add(builder.mul(arguments[1], row_stride), builder.mul(arguments[2], column_stride))
        pointer_type, int_type = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [pointer_type, int_type, int_type, int_type])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer_type], function_type)
        address = builder.gep(builder.bitcast(array.data, pointer_type), [offset])
        # The constants mean: for reading, into all caches, as data.
        builder.call(prefetch, [address, int_type(0), int_type(3), int_type(1)])
        return context.get_dummy_value()

    return types.void(table, types.intp, types.intp), build


_prefetch: Any = intrinsic(_build_prefetch)


@njit(inline="always")
def _random_bits(key: Any, index: Any) -> Any:
    """Return 64 random bits, as `skip_gram_draws.random_bits` does."""
    bits = key + index * _INCREMENT
    bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIER_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIER_2
    return bits ^ (bits >> np.uint64(31))


@njit(inline="always")
def _sigmoid(score: Any) -> Any:
    if -_CLIP <= score <= _CLIP:
        cells = (score + _CLIP) * _CELLS_PER_UNIT
        cell = np.int64(cells)
        left = _SIGMOID[cell]
        return left + (cells - np.float32(cell)) * (_SIGMOID[cell + 1] - left)
    if score > _CLIP:
        return _ONE
    # NaN is in no cell, and its sigmoid is NaN.
    return _ZERO if score < -_CLIP else score


@njit(nogil=True)
def _find_kept_words(
    ids: Any, extended_start: Any, extended_stop: Any, keep_V: Any, draws_per_position: Any, eos: Any, key: Any
) -> Any:
    """Return the kept words, their positions and lines, and their number."""
    size = extended_stop - extended_start
    words_C = np.empty(size, np.int64)
    positions_C = np.empty(size, np.int64)
    lines_C = np.empty(size, np.int64)
    count = 0
    line = 0
    for position in range(extended_start, extended_stop):
        word = ids[position]
        if word == eos:
            line += 1
        elif np.int64(_random_bits(key, np.uint64(position) * draws_per_position) >> _32_BITS) < keep_V[word]:
            words_C[count] = word
            positions_C[count] = position
            lines_C[count] = line
            count += 1
    return words_C, positions_C, lines_C, count


@njit(inline="always")
def _sample_targets(
    targets_PT: Any, pair: Any, centre: Any, output_VD: Any, accept_V: Any, alias_V: Any, key: Any, first_index: Any
) -> None:
    """Set the targets of a pair, the centre and its negatives (-1 if equal to the centre), and prefetch their rows."""
    dim = output_VD.shape[1]
    num_columns = np.uint64(len(alias_V))
    targets_PT[pair, 0] = centre
    for t in range(1, targets_PT.shape[1]):
        bits = _random_bits(key, first_index + np.uint64(t - 1))
        target = np.int64((bits >> _32_BITS) * num_columns >> _32_BITS)
        if np.int64(bits & _LOWER_HALF) >= accept_V[target]:
            target = alias_V[target]
        targets_PT[pair, t] = target if target != centre else -1
        for d in range(0, dim, _FLOATS_PER_CACHE_LINE):
            _prefetch(output_VD, target, d)


@njit(inline="always", fastmath=_FAST_MATH)
def _train_pair(
    input_VD: Any, output_VD: Any, tied: Any, context: Any, targets_PT: Any, pair: Any, grad_context_D: Any, rate: Any
) -> None:
    """Train on a pair, with the formulas in `kernels/skip_gram.py`."""
    dim = input_VD.shape[1]
    for d in range(dim):
        grad_context_D[d] = _ZERO
    for t in range(targets_PT.shape[1]):
        target = targets_PT[pair, t]
        if target < 0:
            continue
        score = _ZERO
        for d in range(dim):
            score += input_VD[context, d] * output_VD[target, d]
        g = rate * ((_ONE if t == 0 else _ZERO) - _sigmoid(score))
        if tied and target == context:
            for d in range(dim):
                grad_context_D[d] += (g + g) * input_VD[context, d]
        else:
            for d in range(dim):
                u = output_VD[target, d]
                grad_context_D[d] += g * u
                output_VD[target, d] = u + g * input_VD[context, d]
    for d in range(dim):
        input_VD[context, d] += grad_context_D[d]


@njit(nogil=True, fastmath=_FAST_MATH)
def _train_centres(
    input_VD: Any,
    output_VD: Any,
    tied: Any,
    ids: Any,
    extended_start: Any,
    extended_stop: Any,
    start: Any,
    stop: Any,
    keep_V: Any,
    accept_V: Any,
    alias_V: Any,
    window: Any,
    negatives: Any,
    eos: Any,
    key: Any,
    start_rate: Any,
    decrease: Any,
    lowest: Any,
) -> None:
    """Train with the centres from `start` to `stop`, whose neighbours lie in the extended range."""
    dim = input_VD.shape[1]
    draws_per_position = np.uint64(2 + 2 * window * negatives)
    words_C, positions_C, lines_C, num_kept = _find_kept_words(
        ids, extended_start, extended_stop, keep_V, draws_per_position, eos, key
    )
    grad_context_D = np.empty(dim, input_VD.dtype)
    contexts_P = np.empty(2 * window, np.int64)
    targets_PT = np.empty((2 * window, 1 + negatives), np.int64)
    # `centre` and `context` are indices of kept words.
    for centre in range(num_kept):
        position = positions_C[centre]
        if position < start or position >= stop:
            continue
        rate = start_rate - decrease * position
        rate = np.float32(rate if rate > lowest else lowest)
        first_index = np.uint64(position) * draws_per_position
        radius_bits = _random_bits(key, first_index + np.uint64(1))
        radius = 1 + np.int64((radius_bits >> _32_BITS) * np.uint64(window) >> _32_BITS)
        window_start = centre - radius if centre > radius else 0
        window_stop = centre + radius + 1 if centre + radius < num_kept else num_kept
        # First sample the pairs of the centre and prefetch their rows, then train on them.
        num_pairs = 0
        for context in range(window_start, window_stop):
            if context == centre or lines_C[context] != lines_C[centre]:
                continue
            contexts_P[num_pairs] = words_C[context]
            for d in range(0, dim, _FLOATS_PER_CACHE_LINE):
                _prefetch(input_VD, words_C[context], d)
            # The index of the context in the largest window, which has no slot for the centre.
            slot = context - centre + window - (1 if context > centre else 0)
            first_negative = first_index + np.uint64(2 + slot * negatives)
            _sample_targets(targets_PT, num_pairs, words_C[centre], output_VD, accept_V, alias_V, key, first_negative)
            num_pairs += 1
        for pair in range(num_pairs):
            _train_pair(input_VD, output_VD, tied, contexts_P[pair], targets_PT, pair, grad_context_D, rate)
