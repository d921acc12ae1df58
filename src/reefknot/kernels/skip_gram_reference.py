"""Reference implementation of skip-gram, as a readable loop. The other implementations are tested against it.

Shapes: V words, D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from reefknot.kernels.skip_gram import CLIP, Stretch
from reefknot.kernels.skip_gram_draws import Draws


def train_pair_by_pair(stretch: Stretch) -> None:
    """Train on one pair after the other, in float64 whatever the type of the tables."""
    tied = stretch.tied
    inputs = stretch.inputs.double().cpu().numpy()
    outputs = inputs if tied else stretch.outputs.double().cpu().numpy()
    for centre, context, negatives, position in pairs(
        stretch.ids, stretch.start, stretch.stop, stretch.draws, stretch.key
    ):
        rate = stretch.rates.at(position)
        v = inputs[context]
        e = np.zeros_like(v)
        for target in [centre, *(negative for negative in negatives if negative != centre)]:
            u = outputs[target]
            g = rate * ((target == centre) - sigmoid(u @ v))
            e += g * u
            if tied and target == context:
                e += g * v  # the row is v itself, and the other targets still need its old value
            else:
                u += g * v
        v += e
    stretch.inputs.copy_(stretch.inputs.new_tensor(inputs))
    stretch.outputs.copy_(stretch.outputs.new_tensor(outputs))


def sigmoid(score: float) -> float:
    """Return the sigmoid, which is 0 or 1 beyond `CLIP`."""
    if abs(score) > CLIP:
        return float(score > 0)
    return float(1.0 / (1.0 + np.exp(-score)))


def pairs(
    ids: NDArray[np.int32], start: int, stop: int, draws: Draws, key: int
) -> Iterator[tuple[int, int, list[int], int]]:
    """Yield centre, context, negatives and the position of the centre, in the order of the text."""
    first, last = draws.reach(key, ids, start, stop)
    for line in lines(ids, first, last, draws.eos):
        kept_positions = [position for position in line if draws.is_kept(key, position, int(ids[position]))]
        for at, position in enumerate(kept_positions):
            if not start <= position < stop:
                continue
            radius = draws.radius(key, position)
            for other in range(max(at - radius, 0), min(at + radius + 1, len(kept_positions))):
                if other == at:
                    continue
                slot = other - at + draws.window - (other > at)
                numbers = range(slot * draws.negatives, (slot + 1) * draws.negatives)
                negatives = [draws.negative(key, position, number) for number in numbers]
                yield int(ids[position]), int(ids[kept_positions[other]]), negatives, position


def lines(ids: NDArray[np.int32], first: int, last: int, eos: int) -> Iterator[range]:
    """Yield the positions of each line, without the line end."""
    ends = [position for position in range(first, last) if ids[position] == eos]
    for begin, end in zip([first, *(end + 1 for end in ends)], [*ends, last], strict=True):
        yield range(begin, end)
