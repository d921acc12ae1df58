"""The random draws of skip-gram: the words of a text that are kept, the radius of each window, and the negatives.

    keep(word)   min(1, (sqrt(f / t) + 1) t / f)    f: the word's share of the text, t: `sample`; 0 keeps every word
    radius       uniform in 1 ... window, per centre
    negative(w)  counts(w)^power, by Walker's alias method: one random number, two lookups

Every random number belongs to a position in the text. It is the hash (splitmix64) of the epoch's key and a number that
identifies the position and its draw. So every implementation draws the same numbers at a position, in any order and on
any device. All implementations train on the same pairs, and nothing has to be saved to resume training.

A line end is not a word: no window reaches across it, it is never a centre, context or negative, and it does not count
in f. (In the C program it is the first entry of the vocabulary, so it counts in the total and is drawn as a negative,
but it is never a centre. gensim does not have such an entry.) Words outside the vocabulary are skipped before windows
are formed, as in both programs.

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
CROWD = 4.0
"""The highest effective learning rate of a row if gradients of several pairs are added up."""
WORD = 2**64
HALF = 2**32
# splitmix64 (Steele, Lea and Flood 2014): the increment and the two multipliers.
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def learned(counts: Counts, *, eos: int | None, unknown: int | None) -> NDArray[np.bool_]:
    """Return a mask of the words whose vectors are trained: those that occur, except the line end and the unknown word.

    The rows of all other words keep their initial values.
    """
    learned_V: NDArray[np.bool_] = np.asarray(counts) > 0
    for skipped in (eos, unknown):
        if skipped is not None:
            learned_V[skipped] = False
    return learned_V


def draw(key: int, number: int) -> int:
    """Return the 64 random bits of a key and a number."""
    bits = (key + number * STEP) % WORD
    bits = (bits ^ (bits >> 30)) * FIRST % WORD
    bits = (bits ^ (bits >> 27)) * SECOND % WORD
    return bits ^ (bits >> 31)


def draw_all(key: int, numbers: Tensor) -> Tensor:
    """Return `draw` of many numbers. The unsigned 64-bit results are reinterpreted as int64."""
    bits: Tensor = numbers * signed(STEP) + signed(key)
    bits = (bits ^ _shifted(bits, 30)) * signed(FIRST)
    bits = (bits ^ _shifted(bits, 27)) * signed(SECOND)
    return bits ^ _shifted(bits, 31)


def signed(bits: int) -> int:
    """Return the int64 with these 64 bits."""
    return bits - WORD if bits >= WORD // 2 else bits


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shift to the right, filling with zeros."""
    shifted: Tensor = (bits >> count) & (2 ** (64 - count) - 1)
    return shifted


@dataclass(frozen=True, eq=False)
class Draws:
    """Everything that the random draws of a text depend on."""

    keep: Tensor
    """A word is kept if a random 32-bit integer is below its threshold here: int64, from 0 (never) to 2^32 (always)."""
    accept: Tensor
    """A column of the alias table stands for its own word if 32 random bits are below this number: int64."""
    alias: Tensor
    """Otherwise the column stands for this word: int64."""
    window: int
    negatives: int
    eos: int
    """The id of the line end, or -1."""
    seed: int
    busiest: float
    """How often the most frequent row occurs per pair, as centre or as negative."""

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
    ) -> Draws:
        """Return the draws for words with these counts in the training text.

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
        learned_V = learned(counts, eos=eos, unknown=unknown)
        counts_V = np.where(learned_V, np.asarray(counts, dtype=np.float64), 0.0)
        if window < 1 or negatives < 0 or sample < 0:
            raise ArgumentError(
                f"window = {window}, negatives = {negatives}, sample = {sample}: window must be at least 1, the others "
                "must not be negative"
            )
        if (words := np.count_nonzero(learned_V)) < 2:
            raise DataError(
                f"skip-gram needs at least two words that occur in the text, but the vocabulary has {words} besides "
                "<unk> and <eos>; lower vocabulary.min_count, or use a larger vocabulary.max_size or a longer text"
            )
        keep_V = np.where(learned_V, _keep(counts_V, sample), 0.0)
        noise_V = np.where(learned_V, counts_V**power, 0.0)
        accept_V, alias_V = _alias_table(noise_V)
        centres_V = counts_V * keep_V
        busiest = float(np.max(centres_V / centres_V.sum() + negatives * noise_V / noise_V.sum()))
        keep, accept = (torch.from_numpy(np.round(p_V * HALF).astype(np.int64)) for p_V in (keep_V, accept_V))
        end = -1 if eos is None else eos
        return cls(keep, accept, torch.from_numpy(alias_V), window, negatives, end, seed, busiest)

    def to(self, device: torch.device) -> Draws:
        """Return the draws with their tensors on a device."""
        keep, accept, alias = (tensor.to(device) for tensor in (self.keep, self.accept, self.alias))
        return replace(self, keep=keep, accept=accept, alias=alias)

    def key(self, epoch: int) -> int:
        """Return the key of an epoch's draws."""
        return draw(draw(0, self.seed), epoch)

    def at_once(self, rate: float) -> int:
        """Return how many pairs may be computed from the same weights.

        Their gradients are computed independently and added up, so a row that occurs n times has n times the learning
        rate. Up to an effective rate of `CROWD`, the vectors become as good as with single pairs. At several times that
        rate, they oscillate and learn nothing.
        """
        return max(1, int(CROWD / (rate * self.busiest)))

    @property
    def per_position(self) -> int:
        """Number of draws per position: whether it is kept, its radius, and the negatives of all its contexts."""
        return 2 + 2 * self.window * self.negatives

    # -- one at a time ---------------------------------------------------------------------------------------------

    def is_kept(self, key: int, position: int, word: int) -> bool:
        """Return whether subsampling keeps the word at a position."""
        return draw(key, position * self.per_position) >> 32 < int(self.keep[word])

    def radius(self, key: int, position: int) -> int:
        """Return the radius of the window around a position."""
        return 1 + ((draw(key, position * self.per_position + 1) >> 32) * self.window >> 32)

    def negative(self, key: int, position: int, number: int) -> int:
        """Draw a negative. `number` is (index of the context within the window) x negatives + index of the negative."""
        bits = draw(key, position * self.per_position + 2 + number)
        column = (bits >> 32) * len(self.alias) >> 32
        return column if bits % HALF < int(self.accept[column]) else int(self.alias[column])

    def reach(self, key: int, ids: NDArray[np.int32], start: int, stop: int) -> tuple[int, int]:
        """Return the bounds of a stretch with its neighbours: up to `window` kept words on either side."""
        first, last = start, stop
        neighbours = 0
        while first > 0 and neighbours < self.window and ids[first - 1] != self.eos:
            first -= 1
            neighbours += self.is_kept(key, first, int(ids[first]))
        neighbours = 0
        while last < len(ids) and neighbours < self.window and ids[last] != self.eos:
            neighbours += self.is_kept(key, last, int(ids[last]))
            last += 1
        return first, last


def _keep(counts_V: NDArray[np.float64], sample: float) -> NDArray[np.float64]:
    if sample == 0:
        return np.ones_like(counts_V)
    share_V = np.maximum(counts_V, 1.0) / counts_V.sum() / sample
    keep_V: NDArray[np.float64] = np.minimum(1.0, (np.sqrt(share_V) + 1.0) / share_V)
    return keep_V


def _alias_table(weights_V: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return an alias table (Vose 1991): columns of equal probability with at most two words each.

    The word of column v is v with probability share_V[v], and alias_V[v] otherwise.
    """
    share_V = weights_V * (len(weights_V) / weights_V.sum())
    alias_V = np.arange(len(share_V))
    small, large = np.flatnonzero(share_V < 1).tolist(), np.flatnonzero(share_V >= 1).tolist()
    while small and large:
        poor, rich = small.pop(), large[-1]
        alias_V[poor] = rich
        share_V[rich] -= 1.0 - share_V[poor]
        if share_V[rich] < 1:
            small.append(large.pop())
    share_V[small + large] = 1.0  # these differ from 1 by rounding only
    return share_V, alias_V


class KeptWords(NamedTuple):
    """The C kept words of a stretch and its neighbours, in the order of the text."""

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


def kept_words(draws: Draws, key: int, ids: NDArray[np.int32], start: int, stop: int) -> KeptWords:
    """Return the kept words of the stretch from `start` to `stop`, on the device of `draws`."""
    first, last = draws.reach(key, ids, start, stop)
    device = draws.keep.device
    words = torch.from_numpy(ids[first:last].astype(np.int64)).to(device)
    positions = torch.arange(first, last, device=device)
    lines = (words == draws.eos).cumsum(0)
    kept = _upper(draw_all(key, positions * draws.per_position)) < draws.keep[words]
    words_C, positions_C, lines_C = words[kept], positions[kept], lines[kept]
    radius_C = 1 + (_upper(draw_all(key, positions_C * draws.per_position + 1)) * draws.window >> 32)
    centres_C = (positions_C >= start) & (positions_C < stop)
    return KeptWords(words_C, positions_C, lines_C, radius_C * centres_C)


def pairs_of(draws: Draws, key: int, kept: KeptWords) -> Pairs:
    """Return every centre with every context in its window, and the negatives of each pair."""
    window, words = draws.window, len(kept.words)
    device = kept.words.device
    offsets = torch.tensor([o for o in range(-window, window + 1) if o], device=device)
    others_CW = torch.arange(words, device=device)[:, None] + offsets
    inside_CW = (others_CW >= 0) & (others_CW < words) & (offsets.abs() <= kept.radius[:, None])
    others_CW = others_CW.clamp(0, max(words - 1, 0))
    inside_CW &= kept.lines[others_CW] == kept.lines[:, None]
    centres, slots_N = inside_CW.nonzero(as_tuple=True)
    positions_N = kept.positions[centres]
    numbers = torch.arange(draws.negatives, device=device) + (slots_N * draws.negatives)[:, None]
    bits = draw_all(key, (positions_N * draws.per_position + 2)[:, None] + numbers)
    columns = _upper(bits) * len(draws.alias) >> 32
    accepted = (bits & (HALF - 1)) < draws.accept[columns]
    negatives_NK = torch.where(accepted, columns, draws.alias[columns])
    return Pairs(kept.words[centres], kept.words[others_CW[centres, slots_N]], negatives_NK, positions_N)


def _upper(bits: Tensor) -> Tensor:
    return _shifted(bits, 32)
