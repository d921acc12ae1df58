"""Skip-gram compiled for the CPU by numba, on threads that share the tables without locks (Hogwild).

If two threads change a row at the same time, a part of one update may be lost. There are many rows, so this is rare
(Recht et al. 2011). Most of the time is spent waiting for rows that are not in a cache. So the pairs of a centre are
drawn first and their rows are prefetched; then the pairs are trained. Every process compiles the machine code again,
which takes two or three seconds, because numba's cache on disk consists of pickles, which this package never reads.

Shapes: V words, D dimensions, C kept words of a stretch and its neighbours, P pairs of a centre, T = 1 + negatives
targets.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from reefknot.kernels.skip_gram import CLIP, Stretch
from reefknot.kernels.skip_gram_draws import FIRST, SECOND, STEP

POSITIONS = 10_000
"""Number of positions that a thread trains on at a time."""
_STEP, _FIRST, _SECOND = np.uint64(STEP), np.uint64(FIRST), np.uint64(SECOND)
_HALF, _LOWER = np.uint64(32), np.uint64(2**32 - 1)
_LINE = 16
"""Number of float32 values per cache line."""
_CELLS = 1024
# The sigmoid from -CLIP to CLIP, and one cell more. Linear interpolation between two cells has an error below 2e-6.
_SIGMOID = (1.0 / (1.0 + np.exp(-(np.arange(_CELLS + 2) * (2 * CLIP / _CELLS) - CLIP)))).astype(np.float32)
_SCALE, _CLIP = np.float32(_CELLS / (2 * CLIP)), np.float32(CLIP)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LOOSE = {"reassoc", "contract", "arcp", "nsz"}
"""Sums may be reordered and fused with products. Nothing is assumed to be finite, so that NaN stays NaN."""


def train_compiled(stretch: Stretch, workers: int) -> None:
    """Train on the stretch in parts of `POSITIONS` words. The next free thread trains on the next part."""
    ids, draws, rates = stretch.ids, stretch.draws, stretch.rates
    tables = (stretch.inputs.numpy(), stretch.outputs.numpy())
    draw_tables = (draws.keep.numpy(), draws.accept.numpy(), draws.alias.numpy())
    sizes = (draws.window, draws.negatives, draws.eos)
    fall = (*rates.line, rates.lowest)

    def train_part(first: int) -> None:
        last = min(first + POSITIONS, stretch.stop)
        reach = draws.reach(stretch.key, ids, first, last)
        _train(*tables, stretch.tied, ids, *reach, first, last, *draw_tables, *sizes, np.uint64(stretch.key), *fall)

    firsts = range(stretch.start, stretch.stop, POSITIONS)
    if workers == 1:
        for first in firsts:
            train_part(first)
        return
    with ThreadPoolExecutor(workers) as threads:
        for _ in threads.map(train_part, firsts):
            pass


def _build_prefetch(typing: Any, table: Any, row: Any, column: Any) -> Any:
    """Prefetch the cache line of a number in a table, without waiting for it."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        rows, columns = (builder.extract_value(array.strides, axis) for axis in range(2))
        offset = builder.add(builder.mul(arguments[1], rows), builder.mul(arguments[2], columns))
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        address = builder.gep(builder.bitcast(array.data, pointer), [offset])
        # For reading, into all caches, as data.
        builder.call(prefetch, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(table, types.intp, types.intp), build


_prefetch: Any = intrinsic(_build_prefetch)


@njit(inline="always")
def _draw(key: Any, number: Any) -> Any:
    bits = key + number * _STEP
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    return bits ^ (bits >> np.uint64(31))


@njit(inline="always")
def _sigmoid(score: Any) -> Any:
    if -_CLIP <= score <= _CLIP:
        at = (score + _CLIP) * _SCALE
        cell = np.int64(at)
        low = _SIGMOID[cell]
        return low + (at - np.float32(cell)) * (_SIGMOID[cell + 1] - low)
    if score > _CLIP:
        return _ONE
    # NaN is in no cell, and its sigmoid is NaN.
    return _ZERO if score < -_CLIP else score


@njit(nogil=True)
def _kept(ids: Any, begin: Any, end: Any, keep_V: Any, per_position: Any, eos: Any, key: Any) -> Any:
    """Return the kept words, their positions and lines, and their number."""
    words_C = np.empty(end - begin, np.int64)
    positions_C = np.empty(end - begin, np.int64)
    lines_C = np.empty(end - begin, np.int64)
    count = 0
    line = 0
    for position in range(begin, end):
        word = ids[position]
        if word == eos:
            line += 1
        elif np.int64(_draw(key, np.uint64(position) * per_position) >> _HALF) < keep_V[word]:
            words_C[count] = word
            positions_C[count] = position
            lines_C[count] = line
            count += 1
    return words_C, positions_C, lines_C, count


@njit(inline="always")
def _draw_targets(
    targets_PT: Any, pair: Any, centre: Any, output_VD: Any, accept_V: Any, alias_V: Any, key: Any, number: Any
) -> None:
    """Set the targets of a pair, the centre and its negatives (-1 if equal to the centre), and prefetch their rows."""
    dim = output_VD.shape[1]
    columns = np.uint64(len(alias_V))
    targets_PT[pair, 0] = centre
    for which in range(1, targets_PT.shape[1]):
        bits = _draw(key, number + np.uint64(which - 1))
        target = np.int64((bits >> _HALF) * columns >> _HALF)
        if np.int64(bits & _LOWER) >= accept_V[target]:
            target = alias_V[target]
        targets_PT[pair, which] = target if target != centre else -1
        for d in range(0, dim, _LINE):
            _prefetch(output_VD, target, d)


@njit(inline="always", fastmath=_LOOSE)
def _train_pair(
    input_VD: Any, output_VD: Any, tied: Any, context: Any, targets_PT: Any, pair: Any, e_D: Any, rate: Any
) -> None:
    """Train on a pair, by the formulas in `kernels/skip_gram.py`."""
    dim = input_VD.shape[1]
    for d in range(dim):
        e_D[d] = _ZERO
    for which in range(targets_PT.shape[1]):
        target = targets_PT[pair, which]
        if target < 0:
            continue
        score = _ZERO
        for d in range(dim):
            score += input_VD[context, d] * output_VD[target, d]
        g = rate * ((_ONE if which == 0 else _ZERO) - _sigmoid(score))
        if tied and target == context:
            for d in range(dim):
                e_D[d] += (g + g) * input_VD[context, d]
        else:
            for d in range(dim):
                u = output_VD[target, d]
                e_D[d] += g * u
                output_VD[target, d] = u + g * input_VD[context, d]
    for d in range(dim):
        input_VD[context, d] += e_D[d]


@njit(nogil=True, fastmath=_LOOSE)
def _train(
    input_VD: Any,
    output_VD: Any,
    tied: Any,
    ids: Any,
    begin: Any,
    end: Any,
    first: Any,
    last: Any,
    keep_V: Any,
    accept_V: Any,
    alias_V: Any,
    window: Any,
    negatives: Any,
    eos: Any,
    key: Any,
    rate_at_0: Any,
    fall: Any,
    lowest: Any,
) -> None:
    """Train with the centres from `first` to `last`, whose neighbours lie from `begin` to `end`."""
    dim = input_VD.shape[1]
    per_position = np.uint64(2 + 2 * window * negatives)
    words_C, positions_C, lines_C, count = _kept(ids, begin, end, keep_V, per_position, eos, key)
    e_D = np.empty(dim, input_VD.dtype)
    contexts_P = np.empty(2 * window, np.int64)
    targets_PT = np.empty((2 * window, 1 + negatives), np.int64)
    for at in range(count):
        position = positions_C[at]
        if position < first or position >= last:
            continue
        rate = rate_at_0 - fall * position
        rate = np.float32(rate if rate > lowest else lowest)
        number = np.uint64(position) * per_position
        radius = 1 + np.int64((_draw(key, number + np.uint64(1)) >> _HALF) * np.uint64(window) >> _HALF)
        pairs = 0
        for other in range(at - radius if at > radius else 0, at + radius + 1 if at + radius < count else count):
            if other == at or lines_C[other] != lines_C[at]:
                continue
            contexts_P[pairs] = words_C[other]
            for d in range(0, dim, _LINE):
                _prefetch(input_VD, words_C[other], d)
            slot = other - at + window - (1 if other > at else 0)
            first_negative = number + np.uint64(2 + slot * negatives)
            _draw_targets(targets_PT, pairs, words_C[at], output_VD, accept_V, alias_V, key, first_negative)
            pairs += 1
        for pair in range(pairs):
            _train_pair(input_VD, output_VD, tied, contexts_P[pair], targets_PT, pair, e_D, rate)
