"""Batches of independent sentences of similar length (Baevski & Auli 2019, Billion Word).

A line of the text is a sentence. To avoid padding, all lines are sorted by length, with lines of equal length in random
order. The sorted lines are cut into batches, and the batches are shuffled. The base class in `samples.py` explains the
two methods of `Sentences`: where a sample (a line, or a part of a long line) begins, and which samples form a training
window (the batch of one update).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reefknot.errors import SettingsError
from reefknot.lab.text.samples import Offsets, TextSamples, pack_windows

CHUNK_SIZE = 1 << 24
"""Number of ids that are searched for line ends at a time."""


class Sentences(TextSamples):
    """Lines in training windows of at most `batch_size` x `steps` tokens, padding included.

    A line longer than `steps` is cut into samples of `steps` targets and a shorter last one. If the lines of a window
    cannot be divided equally among the processes, rows of padding are added.
    """

    def _compute_bounds(self) -> Offsets:
        if self._eos is None:
            raise SettingsError(
                'training.batching = "sentences": a sentence ends with <eos>, which the vocabulary does not have; '
                'use vocabulary.end_of_line = true, or batching = "blocks"'
            )

        # A text that ends with <eos> has an empty last line, which gives no sample.
        num_tokens = len(self._targets)
        line_bounds = np.concatenate([[self._first_target], find_line_ends(self._targets, self._eos), [num_tokens]])
        samples_per_line = -(-np.diff(line_bounds) // self.steps)  # rounded up

        # Index of each sample within its line: 0, 1, 2 for a line that is cut into three samples.
        first_samples = np.cumsum(samples_per_line) - samples_per_line
        index_in_line = np.arange(samples_per_line.sum()) - np.repeat(first_samples, samples_per_line)

        line_starts = np.repeat(line_bounds[:-1], samples_per_line)
        sample_starts = line_starts + index_in_line * self.steps
        return np.append(sample_starts, num_tokens)

    def _group_samples(self, generator: np.random.Generator) -> tuple[Offsets, Offsets]:
        # Sort by the number of missing tokens, so that the longest lines come first. Small integers are sorted fast.
        missing_tokens = (self.steps - np.diff(self._bounds)).astype(np.min_scalar_type(self.steps))
        random_order = generator.permutation(len(missing_tokens))
        by_length = np.argsort(missing_tokens[random_order], kind="stable")
        sample_order = random_order[by_length]

        capacity = self._global_batch_size * self.steps
        window_ranges = pack_windows(self.steps - missing_tokens[sample_order], capacity)
        return sample_order, generator.permutation(window_ranges)


def find_line_ends(ids: NDArray[np.int32], eos: int) -> Offsets:
    """Return the offset after each <eos>. The text is searched in chunks, because it may be larger than memory."""
    eos_offsets = []
    for chunk_start in range(0, len(ids), CHUNK_SIZE):
        chunk = ids[chunk_start : chunk_start + CHUNK_SIZE]
        eos_offsets.append(chunk_start + np.flatnonzero(chunk == eos))
    return np.concatenate(eos_offsets) + 1
