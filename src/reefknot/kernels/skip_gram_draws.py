"""The random numbers of skip-gram: which words of a text are kept, the radius of each window, and the negatives.

`PairSampler` is the class to start from. It samples for one position at a time, which the reference loop uses.
`find_kept_words` and `build_pairs` do the same for a whole range of a text at once, as tensors.

    keep(word)      min(1, (sqrt(f / t) + 1) t / f)    f: the word's share of the text, t: `sample`; 0 keeps every word
    radius          uniform in 1 ... window, per centre
    negative(word)  counts(word)^power, by Walker's alias method: one random number, two lookups

Every random number belongs to a position in the text. It is the hash (splitmix64) of the epoch's key and an index that
identifies the position and its use there. So every implementation gets the same numbers at a position, in any order and
on any device. All implementations train on the same pairs, and nothing has to be saved to resume training.

A line end is not a word: no window reaches across it, it is never a centre, context or negative, and it does not count
in f. (In the C program it is the first entry of the vocabulary, so it counts in the total and is drawn as a negative,
but it is never a centre. gensim does not have such an entry.) Words outside the vocabulary are skipped before windows
are formed, as in both programs.

Names: a centre is a word that is trained, its contexts are the words in the window around it, and its negatives are
random words. A word is kept if subsampling does not remove it.
Shapes: V words, C kept words, N pairs, K negatives, W positions of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.errors import ArgumentError, DataError

Counts = Sequence[int] | NDArray[np.int64]
"""How often each word occurs in the training text."""
MAX_EFFECTIVE_RATE = 4.0
"""The highest effective learning rate of a row of a table if gradients of several pairs are added up."""
TWO_TO_32, TWO_TO_64 = 2**32, 2**64
# splitmix64 (Steele, Lea and Flood 2014): the increment and the two multipliers.
INCREMENT, MULTIPLIER_1, MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mask_learned_words(counts: Counts, *, eos: int | None, unknown: int | None) -> NDArray[np.bool_]:
    """Return a mask of the words whose vectors are trained: those that occur, except the line end and the unknown word.

    The rows of all other words keep their initial values.
    """
    learned_V: NDArray[np.bool_] = np.asarray(counts) > 0
    for special_id in (eos, unknown):
        if special_id is not None:
            learned_V[special_id] = False
    return learned_V


@dataclass(frozen=True, eq=False)
class PairSampler:
    """Samples the training pairs of a text: everything that its random numbers depend on.

    Methods take the key of an epoch's random numbers (`key`) and a position in the text.
    """

    keep: Tensor
    """A word is kept if a random 32-bit integer is below its threshold here: int64, from 0 (never) to 2^32 (always)."""
    accept: Tensor
    """A column of the alias table stands for its own word if 32 random bits are below this number: int64."""
    alias: Tensor
    """Otherwise the column stands for this word: int64."""
    window: int
    """Largest distance between a centre and its contexts, in kept words."""
    negatives: int
    """Number of negatives per pair."""
    eos: int
    """The id of the line end, or -1."""
    seed: int
    max_row_share: float
    """How often the most frequent row of the output table occurs per pair, as centre or as negative."""

    @classmethod
    def from_counts(
        cls,
        counts: Counts,
        *,
        window: int,
        negatives: int,
        power: float,
        sample: float,
        eos: int | None = None,
        unknown: int | None = None,
        seed: int = 0,
    ) -> PairSampler:
        """Return a sampler for words with these counts in the training text.

        Args:
            counts: Number of occurrences of each word.
            window: Largest distance between a centre and its contexts.
            negatives: Number of negatives per pair.
            power: Negatives are drawn with probabilities proportional to count^power.
            sample: Threshold t of subsampling. With 0, every word is kept.
            eos: Id of the line end, if the text has any.
            unknown: Id of the unknown word, if there is one.
            seed: Seed of the random numbers.
        """
        learned_V = mask_learned_words(counts, eos=eos, unknown=unknown)
        counts_V = np.where(learned_V, np.asarray(counts, dtype=np.float64), 0.0)
        if window < 1 or negatives < 0 or sample < 0:
            raise ArgumentError(
                f"window = {window}, negatives = {negatives}, sample = {sample}: window must be at least 1, the others "
                "must not be negative"
            )
        num_learned = np.count_nonzero(learned_V)
        if num_learned < 2:
            raise DataError(
                f"skip-gram needs at least two words that occur in the text, but the vocabulary has "
                f"{num_learned} besides <unk> and <eos>; lower vocabulary.min_count, or use a larger "
                "vocabulary.max_size or a longer text"
            )
        keep_V = np.where(learned_V, _keep_probabilities(counts_V, sample), 0.0)
        noise_V = np.where(learned_V, counts_V**power, 0.0)
        accept_V, alias_V = _alias_table(noise_V)
        centres_V = counts_V * keep_V
        max_row_share = float(np.max(centres_V / centres_V.sum() + negatives * noise_V / noise_V.sum()))
        return cls(
            keep=_to_thresholds(keep_V),
            accept=_to_thresholds(accept_V),
            alias=torch.from_numpy(alias_V),
            window=window,
            negatives=negatives,
            eos=-1 if eos is None else eos,
            seed=seed,
            max_row_share=max_row_share,
        )

    def to(self, device: torch.device) -> PairSampler:
        """Return the sampler with its tensors on a device."""
        keep, accept, alias = (tensor.to(device) for tensor in (self.keep, self.accept, self.alias))
        return replace(self, keep=keep, accept=accept, alias=alias)

    def key(self, epoch: int) -> int:
        """Return the key of an epoch's random numbers."""
        return random_bits(random_bits(0, self.seed), epoch)

    def max_parallel_pairs(self, rate: float) -> int:
        """Return how many pairs may be computed from the same weights.

        Their gradients are computed independently and added up, so a row that occurs n times has n times the learning
        rate. Up to an effective rate of `MAX_EFFECTIVE_RATE`, the vectors become as good as with single pairs. At
        several times that rate, they oscillate and learn nothing.
        """
        return max(1, int(MAX_EFFECTIVE_RATE / (rate * self.max_row_share)))

    @property
    def draws_per_position(self) -> int:
        """Number of random numbers per position: one for whether it is kept, one for its radius, then the negatives."""
        return 2 + 2 * self.window * self.negatives

    # -- one at a time ---------------------------------------------------------------------------------------------

    def is_kept(self, key: int, position: int, word: int) -> bool:
        """Return whether subsampling keeps the word at a position."""
        return random_bits(key, position * self.draws_per_position) >> 32 < int(self.keep[word])

    def sample_radius(self, key: int, position: int) -> int:
        """Return the radius of the window around a position."""
        return 1 + ((random_bits(key, position * self.draws_per_position + 1) >> 32) * self.window >> 32)

    def sample_negative(self, key: int, position: int, index: int) -> int:
        """Return a negative. `index` is (index of the context in the window) x negatives + index of the negative."""
        bits = random_bits(key, position * self.draws_per_position + 2 + index)
        column = (bits >> 32) * len(self.alias) >> 32
        return column if bits % TWO_TO_32 < int(self.accept[column]) else int(self.alias[column])

    def range_with_neighbours(self, key: int, ids: NDArray[np.int32], start: int, stop: int) -> tuple[int, int]:
        """Extend a range of the text by its neighbours, up to `window` kept words on either side of the same line."""
        extended_start, extended_stop = start, stop
        num_neighbours = 0
        while extended_start > 0 and num_neighbours < self.window and ids[extended_start - 1] != self.eos:
            extended_start -= 1
            num_neighbours += self.is_kept(key, extended_start, int(ids[extended_start]))
        num_neighbours = 0
        while extended_stop < len(ids) and num_neighbours < self.window and ids[extended_stop] != self.eos:
            num_neighbours += self.is_kept(key, extended_stop, int(ids[extended_stop]))
            extended_stop += 1
        return extended_start, extended_stop


def _keep_probabilities(counts_V: NDArray[np.float64], sample: float) -> NDArray[np.float64]:
    if sample == 0:
        return np.ones_like(counts_V)
    share_V = np.maximum(counts_V, 1.0) / counts_V.sum() / sample
    keep_V: NDArray[np.float64] = np.minimum(1.0, (np.sqrt(share_V) + 1.0) / share_V)
    return keep_V


def _to_thresholds(probabilities_V: NDArray[np.float64]) -> Tensor:
    """Return the integers below which a random 32-bit integer lies with these probabilities."""
    return torch.from_numpy(np.round(probabilities_V * TWO_TO_32).astype(np.int64))


def _alias_table(weights_V: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return an alias table (Vose 1991): columns of equal probability with at most two words each.

    The word of column v is v with probability share_V[v], and alias_V[v] otherwise. For example, the weights 1 and 3
    give the shares 0.5 and 1 and the aliases 1 and 1: word 1 fills column 1 and half of column 0.
    """
    share_V = weights_V * (len(weights_V) / weights_V.sum())
    alias_V = np.arange(len(share_V))
    small, large = np.flatnonzero(share_V < 1).tolist(), np.flatnonzero(share_V >= 1).tolist()
    # Fill up each column that is too small with a part of a large one.
    while small and large:
        column, donor = small.pop(), large[-1]
        alias_V[column] = donor
        share_V[donor] -= 1.0 - share_V[column]
        if share_V[donor] < 1:
            small.append(large.pop())
    share_V[small + large] = 1.0  # these differ from 1 by rounding only
    return share_V, alias_V


class KeptWords(NamedTuple):
    """The C kept words of a range and its neighbours, in the order of the text."""

    words: Tensor
    positions: Tensor
    lines: Tensor
    """The line number of each word. No window reaches from one line to another."""
    radius: Tensor
    """The radius of the window around each word; 0 if the word is only a neighbour."""


class Pairs(NamedTuple):
    """The training pairs, in the order of the text."""

    centres: Tensor
    contexts: Tensor
    negatives: Tensor
    """A negative that equals its centre is ignored."""
    positions: Tensor
    """The positions of the centres."""


def find_kept_words(sampler: PairSampler, key: int, ids: NDArray[np.int32], start: int, stop: int) -> KeptWords:
    """Return the kept words of the range from `start` to `stop`, on the device of `sampler`."""
    extended_start, extended_stop = sampler.range_with_neighbours(key, ids, start, stop)
    device = sampler.keep.device
    words = torch.from_numpy(ids[extended_start:extended_stop].astype(np.int64)).to(device)
    positions = torch.arange(extended_start, extended_stop, device=device)
    lines = (words == sampler.eos).cumsum(0)
    keep_bits = random_bits_tensor(key, positions * sampler.draws_per_position)
    is_kept = _upper_half(keep_bits) < sampler.keep[words]
    words_C, positions_C, lines_C = words[is_kept], positions[is_kept], lines[is_kept]
    radius_bits_C = random_bits_tensor(key, positions_C * sampler.draws_per_position + 1)
    radius_C = 1 + (_upper_half(radius_bits_C) * sampler.window >> 32)
    is_centre_C = (positions_C >= start) & (positions_C < stop)
    return KeptWords(words_C, positions_C, lines_C, radius_C * is_centre_C)


def build_pairs(sampler: PairSampler, key: int, kept: KeptWords) -> Pairs:
    """Return every centre with every context in its window, and the negatives of each pair."""
    window, num_words = sampler.window, len(kept.words)
    device = kept.words.device
    offsets_W = torch.tensor([offset for offset in range(-window, window + 1) if offset], device=device)
    contexts_CW = torch.arange(num_words, device=device)[:, None] + offsets_W
    in_window_CW = (contexts_CW >= 0) & (contexts_CW < num_words) & (offsets_W.abs() <= kept.radius[:, None])
    contexts_CW = contexts_CW.clamp(0, max(num_words - 1, 0))
    in_window_CW &= kept.lines[contexts_CW] == kept.lines[:, None]
    # Indices of the kept word that is the centre, and of the context within the window.
    centres_N, slots_N = in_window_CW.nonzero(as_tuple=True)
    positions_N = kept.positions[centres_N]
    indices_NK = torch.arange(sampler.negatives, device=device) + (slots_N * sampler.negatives)[:, None]
    bits_NK = random_bits_tensor(key, (positions_N * sampler.draws_per_position + 2)[:, None] + indices_NK)
    columns_NK = _upper_half(bits_NK) * len(sampler.alias) >> 32
    is_accepted_NK = (bits_NK & (TWO_TO_32 - 1)) < sampler.accept[columns_NK]
    negatives_NK = torch.where(is_accepted_NK, columns_NK, sampler.alias[columns_NK])
    contexts_N = contexts_CW[centres_N, slots_N]
    return Pairs(kept.words[centres_N], kept.words[contexts_N], negatives_NK, positions_N)


# -- random bits ---------------------------------------------------------------------------------------------------


def random_bits(key: int, index: int) -> int:
    """Return the 64 random bits of a key and an index: the splitmix64 generator, at any place of its sequence."""
    bits = (key + index * INCREMENT) % TWO_TO_64
    bits = (bits ^ (bits >> 30)) * MULTIPLIER_1 % TWO_TO_64
    bits = (bits ^ (bits >> 27)) * MULTIPLIER_2 % TWO_TO_64
    return bits ^ (bits >> 31)


def random_bits_tensor(key: int, indices: Tensor) -> Tensor:
    """Return `random_bits` of many indices. The unsigned 64-bit results are reinterpreted as int64."""
    bits: Tensor = indices * to_signed(INCREMENT) + to_signed(key)
    bits = (bits ^ _shift_right(bits, 30)) * to_signed(MULTIPLIER_1)
    bits = (bits ^ _shift_right(bits, 27)) * to_signed(MULTIPLIER_2)
    return bits ^ _shift_right(bits, 31)


def to_signed(bits: int) -> int:
    """Return the int64 with these 64 bits."""
    return bits - TWO_TO_64 if bits >= TWO_TO_64 // 2 else bits


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    shifted: Tensor = (bits >> count) & (2 ** (64 - count) - 1)
    return shifted


def _upper_half(bits: Tensor) -> Tensor:
    return _shift_right(bits, 32)
