"""Skip-gram on a GPU: many programs that share the tables, and updates that are added atomically (Hogwild).

Each program takes a stretch of centres through their contexts, one pair after the other, and the targets of a pair at
once. A pair may miss what the programs beside it are adding, and only that; how many there may be is what the text
allows (`Draws.at_once`), not what the device holds. Atomic additions lose nothing, but their order is not fixed: two
runs differ in the last bits and drift apart.

Shapes: V words, D width, C kept words of a stretch and its neighbours, K negatives.
"""

from __future__ import annotations

from typing import Any

import triton

from reefknot.kernels.skip_gram import CLIP, Stretch
from reefknot.kernels.skip_gram_draws import FIRST, SECOND, STEP, kept_words, signed
from reefknot.kernels.triton_skip_gram_kernels import skip_gram_kernel


def train_at_once(stretch: Stretch) -> None:
    """Train on the whole stretch in one launch."""
    draws, rates = stretch.draws, stretch.rates
    kept = kept_words(draws, stretch.key, stretch.ids, stretch.start, stretch.stop)
    count = len(kept.words)
    if not count:
        return
    words, dim = stretch.inputs.shape
    begin, fall = rates.line
    each = triton.cdiv(count, draws.at_once(rates.first))
    skip_gram_kernel[(triton.cdiv(count, each),)](
        *(stretch.inputs, stretch.outputs, *kept, draws.accept, draws.alias),
        *(count, each, words, signed(stretch.key), begin, fall, rates.lowest),
        **constants(dim, draws.negatives, draws.window),
        num_warps=2 if dim > 64 else 1,
    )


def constants(dim: int, negatives: int, window: int) -> dict[str, Any]:
    """Return the constants that the kernel is compiled for."""
    return {
        "D": dim,
        "BD": triton.next_power_of_2(dim),
        "K": negatives,
        "BT": triton.next_power_of_2(1 + negatives),
        "WINDOW": window,
        "CLIP": CLIP,
        "STEP": STEP,
        "FIRST": FIRST,
        "SECOND": SECOND,
    }
