"""Reference implementation of skip-gram, as a readable loop over training pairs in float64.

`train_pair_by_pair` is the function to start from, and `iterate_pairs` yields the pairs. The other implementations are
tested against both. `skip_gram` explains the algorithm and the names u, v, g and e.

Shapes: V words, D dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from reefknot.kernels.skip_gram import CLIP, TrainingRange
from reefknot.kernels.skip_gram_draws import PairSampler


def train_pair_by_pair(training_range: TrainingRange) -> None:
    """Train on one pair after the other, in float64 whatever the type of the tables."""
    tied = training_range.tied
    inputs = training_range.inputs.double().cpu().numpy()
    outputs = inputs if tied else training_range.outputs.double().cpu().numpy()
    pairs = iterate_pairs(
        training_range.ids, training_range.start, training_range.stop, training_range.sampler, training_range.key
    )
    for centre, context, negatives, position in pairs:
        rate = training_range.rates.rate_at(position)
        v = inputs[context]
        e = np.zeros_like(v)
        for target in [centre, *(negative for negative in negatives if negative != centre)]:
            u = outputs[target]
            g = rate * ((target == centre) - clipped_sigmoid(u @ v))
            e += g * u
            if tied and target == context:
                e += g * v  # the row is v itself, and the other targets still need its old value
            else:
                u += g * v
        v += e
    training_range.inputs.copy_(training_range.inputs.new_tensor(inputs))
    training_range.outputs.copy_(training_range.outputs.new_tensor(outputs))


def clipped_sigmoid(score: float) -> float:
    """Return the sigmoid, which is 0 or 1 beyond `CLIP`."""
    if abs(score) > CLIP:
        return float(score > 0)
    return float(1.0 / (1.0 + np.exp(-score)))


def iterate_pairs(
    ids: NDArray[np.int32], start: int, stop: int, sampler: PairSampler, key: int
) -> Iterator[tuple[int, int, list[int], int]]:
    """Yield centre, context, negatives and the position of the centre, in the order of the text."""
    extended_start, extended_stop = sampler.range_with_neighbours(key, ids, start, stop)
    for line in iterate_lines(ids, extended_start, extended_stop, sampler.eos):
        kept_positions = [position for position in line if sampler.is_kept(key, position, int(ids[position]))]
        for centre, position in enumerate(kept_positions):
            if not start <= position < stop:
                continue
            radius = sampler.sample_radius(key, position)
            for context in range(max(centre - radius, 0), min(centre + radius + 1, len(kept_positions))):
                if context == centre:
                    continue
                # The index of the context in the largest window, which has no slot for the centre.
                slot = context - centre + sampler.window - (context > centre)
                indices = range(slot * sampler.negatives, (slot + 1) * sampler.negatives)
                negatives = [sampler.sample_negative(key, position, index) for index in indices]
                yield int(ids[position]), int(ids[kept_positions[context]]), negatives, position


def iterate_lines(ids: NDArray[np.int32], start: int, stop: int, eos: int) -> Iterator[range]:
    """Yield the positions of each line, without the line end."""
    line_start = start
    for position in range(start, stop):
        if ids[position] == eos:
            yield range(line_start, position)
            line_start = position + 1
    yield range(line_start, stop)
