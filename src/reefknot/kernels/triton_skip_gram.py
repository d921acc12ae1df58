"""Skip-gram on a GPU: many programs that share the tables, and updates that are added atomically (Hogwild).

Each program takes a stretch of centres through their contexts, one pair after the other, and the targets of a pair at
once. A pair may miss what the programs beside it are adding, and only that; how many there may be is what the text
allows (`Draws.at_once`), not what the device holds. Atomic additions lose nothing, but their order is not fixed: two
runs differ in the last bits and drift apart.

Shapes: V words, D width, C kept words of a stretch and its neighbours, K negatives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
from numpy.typing import NDArray
from torch import Tensor

from reefknot.kernels.skip_gram import CLIP, Rates
from reefknot.kernels.skip_gram_draws import FIRST, SECOND, STEP, Draws, kept_words, signed
from reefknot.kernels.triton_skip_gram_kernels import skip_gram_kernel


def train_at_once(
    input_VD: Tensor,
    output_VD: Tensor,
    ids: NDArray[np.int32],
    start: int,
    stop: int,
    draws: Draws,
    key: int,
    rates: Rates,
) -> None:
    """One launch for the whole stretch."""
    kept = kept_words(draws, key, ids, start, stop)
    count = len(kept.words)
    if not count:
        return
    words, width = input_VD.shape
    begin, fall = rates.line
    each = triton.cdiv(count, draws.at_once(rates.first))
    skip_gram_kernel[(triton.cdiv(count, each),)](
        *(input_VD.detach(), output_VD.detach(), *kept, draws.accept, draws.alias),
        *(count, each, words, signed(key), begin, fall, rates.lowest),
        **constants(width, draws.negatives, draws.window),
        num_warps=2 if width > 64 else 1,
    )


def constants(width: int, negatives: int, window: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "D": width,
        "BD": triton.next_power_of_2(width),
        "K": negatives,
        "BT": triton.next_power_of_2(1 + negatives),
        "WINDOW": window,
        "CLIP": CLIP,
        "STEP": STEP,
        "FIRST": FIRST,
        "SECOND": SECOND,
    }
