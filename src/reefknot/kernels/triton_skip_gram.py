"""Skip-gram on a GPU: many programs share the tables, and updates are added atomically (Hogwild).

Each program trains on the pairs of a range of centres, one pair after the other, with all targets of a pair at once. A
pair misses only what other programs add at the same time. The largest number of programs depends on the text
(`Draws.at_once`), not on the device. Atomic additions lose no update, but their order is not fixed. So two runs differ
in the last bits at first, and more over time.

Shapes: V words, D dimensions, C kept words of a stretch and its neighbours, K negatives.
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
    centres = triton.cdiv(count, draws.at_once(rates.first))
    skip_gram_kernel[(triton.cdiv(count, centres),)](
        *(stretch.inputs, stretch.outputs, *kept, draws.accept, draws.alias),
        *(count, centres, words, signed(stretch.key), begin, fall, rates.lowest),
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
