"""What skip-gram draws: which words of a text are kept, how far each looks, and which words it is not.

    keep(word)   min(1, (sqrt(f / t) + 1) t / f)    f: the word's share of the text, t: `sample`; 0: every word is kept
    radius       uniform in 1 ... window, per centre
    negative(w)  counts(w)^power, by Walker's alias method: one random number, two lookups

Every random number belongs to a place in the text: it is the hash (splitmix64) of the epoch's key and a number that
counts the draws of that place. So whoever comes to a place, in whatever order and on whatever device, draws the same
there; nothing has to be saved to resume, and all implementations train on the same pairs.

A line end is no word: no window reaches over it, it is no centre, no context and no negative, and it counts for
nothing in f. (The C program keeps it among the negatives and in the total, because it is the first entry of its
vocabulary; there it is only ever pushed away. gensim has no such word.) Words outside the vocabulary are passed over
before windows are laid, as both do.

Shapes: V words; others as they come.
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
"""The most that the rate of a row may come to when gradients are added up."""
WORD = 2**64
HALF = 2**32
# splitmix64 (Steele, Lea and Flood 2014): a step, and two multipliers with their shifts.
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def learned(counts: Counts, *, eos: int | None, unknown: int | None) -> NDArray[np.bool_]:
    """Which words have a vector: those that occur and are words, as a line's end and what stands for all words outside
    the vocabulary are not. The rows of all others stay as they began."""
    learned_V: NDArray[np.bool_] = np.asarray(counts) > 0
    for passed_over in (eos, unknown):
        if passed_over is not None:
            learned_V[passed_over] = False
    return learned_V


def draw(key: int, number: int) -> int:
    """64 random bits."""
    bits = (key + number * STEP) % WORD
    bits = (bits ^ (bits >> 30)) * FIRST % WORD
    bits = (bits ^ (bits >> 27)) * SECOND % WORD
    return bits ^ (bits >> 31)


def draw_all(key: int, numbers: Tensor) -> Tensor:
    """The same for many: int64, whose bits are those of the unsigned numbers."""
    bits: Tensor = numbers * signed(STEP) + signed(key)
    bits = (bits ^ _shifted(bits, 30)) * signed(FIRST)
    bits = (bits ^ _shifted(bits, 27)) * signed(SECOND)
    return bits ^ _shifted(bits, 31)


def signed(bits: int) -> int:
    """64 bits as an int64 has them."""
    return bits - WORD if bits >= WORD // 2 else bits


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    shifted: Tensor = (bits >> by) & (2 ** (64 - by) - 1)
    return shifted


@dataclass(frozen=True, eq=False)
class Draws:
    """What the draws of a text depend on."""

    keep: Tensor
    """A word is kept if 32 random bits are less: int64, from 0 (never) to 2^32 (always)."""
    accept: Tensor
    """A negative of this column is the word itself if 32 random bits are less; int64."""
    alias: Tensor
    """Otherwise it is this one; int64."""
    window: int
    negatives: int
    eos: int
    """The id that ends a line; -1: there is none."""
    seed: int
    busiest: float
    """How often, per pair, the row comes up that comes up most often: as the centre or as a negative."""

    @classmethod
    def of(
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
        """For words that occur so often in the training text."""
        learned_V = learned(counts, eos=eos, unknown=unknown)
        counts_V = np.where(learned_V, np.asarray(counts, dtype=np.float64), 0.0)
        if window < 1 or negatives < 0 or sample < 0:
            raise ArgumentError(f"window = {window}, negatives = {negatives}, sample = {sample}: must not be negative")
        if (words := np.count_nonzero(learned_V)) < 2:
            raise DataError(
                f"skip-gram needs at least two words that occur in the text, and beside <unk> and <eos> the vocabulary "
                f"has {words}; lower vocabulary.min_count, or use a larger vocabulary.max_size or a longer text"
            )
        keep_V = np.where(learned_V, _keep(counts_V, sample), 0.0)
        noise_V = np.where(learned_V, counts_V**power, 0.0)
        accept_V, alias_V = _alias_table(noise_V)
        centres_V = counts_V * keep_V
        busiest = float(np.max(centres_V / centres_V.sum() + negatives * noise_V / noise_V.sum()))
        keep, accept = (torch.from_numpy(np.round(each * HALF).astype(np.int64)) for each in (keep_V, accept_V))
        end = -1 if eos is None else eos
        return cls(keep, accept, torch.from_numpy(alias_V), window, negatives, end, seed, busiest)

    def to(self, device: torch.device) -> Draws:
        keep, accept, alias = (each.to(device) for each in (self.keep, self.accept, self.alias))
        return replace(self, keep=keep, accept=accept, alias=alias)

    def key(self, epoch: int) -> int:
        """Of the draws of an epoch."""
        return draw(draw(0, self.seed), epoch)

    def at_once(self, rate: float) -> int:
        """Pairs that may be trained at the same weights.

        Gradients that do not know of each other are added up, so a row that comes up n times has n times the rate. Up
        to `CROWD` of it nothing is lost; at several times as much vectors begin to swing and learn nothing.
        """
        return max(1, int(CROWD / (rate * self.busiest)))

    @property
    def per_place(self) -> int:
        """Numbers that belong to a place: whether it is kept, its radius, and the negatives of all its contexts."""
        return 2 + 2 * self.window * self.negatives

    # -- one at a time ---------------------------------------------------------------------------------------------

    def kept(self, key: int, place: int, word: int) -> bool:
        return draw(key, place * self.per_place) >> 32 < int(self.keep[word])

    def radius(self, key: int, place: int) -> int:
        return 1 + ((draw(key, place * self.per_place + 1) >> 32) * self.window >> 32)

    def negative(self, key: int, place: int, number: int) -> int:
        """`number`: of the context among those that the place may have, times negatives, plus that of the negative."""
        bits = draw(key, place * self.per_place + 2 + number)
        column = (bits >> 32) * len(self.alias) >> 32
        return column if bits % HALF < int(self.accept[column]) else int(self.alias[column])

    def reach(self, key: int, ids: NDArray[np.int32], start: int, stop: int) -> tuple[int, int]:
        """The stretch with its neighbours: as many kept words on either side as a window may see."""
        first, last = start, stop
        seen = 0
        while first > 0 and seen < self.window and ids[first - 1] != self.eos:
            first -= 1
            seen += self.kept(key, first, int(ids[first]))
        seen = 0
        while last < len(ids) and seen < self.window and ids[last] != self.eos:
            seen += self.kept(key, last, int(ids[last]))
            last += 1
        return first, last


def _keep(counts_V: NDArray[np.float64], sample: float) -> NDArray[np.float64]:
    if sample == 0:
        return np.ones_like(counts_V)
    share_V = np.maximum(counts_V, 1.0) / counts_V.sum() / sample
    keep_V: NDArray[np.float64] = np.minimum(1.0, (np.sqrt(share_V) + 1.0) / share_V)
    return keep_V


def _alias_table(weights_V: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Columns of equal probability, each of at most two words: the share of its own, and the other (Vose 1991)."""
    share_V = weights_V * (len(weights_V) / weights_V.sum())
    alias_V = np.arange(len(share_V))
    small, large = (each.tolist() for each in (np.flatnonzero(share_V < 1), np.flatnonzero(share_V >= 1)))
    while small and large:
        poor, rich = small.pop(), large[-1]
        alias_V[poor] = rich
        share_V[rich] -= 1.0 - share_V[poor]
        if share_V[rich] < 1:
            small.append(large.pop())
    share_V[small + large] = 1.0  # what rounding has left
    return share_V, alias_V


class Kept(NamedTuple):
    """The words of a stretch and its neighbours that are kept, in their order; C of them."""

    words: Tensor
    places: Tensor
    lines: Tensor
    """No window reaches from one line to another."""
    radius: Tensor
    """0 where a word is only a neighbour."""


class Pairs(NamedTuple):
    """What is trained on, in the order of the text."""

    centres: Tensor
    contexts: Tensor
    negatives: Tensor
    """One that is equal to its centre counts for nothing."""
    places: Tensor
    """Of the centres."""


def kept_words(draws: Draws, key: int, ids: NDArray[np.int32], start: int, stop: int) -> Kept:
    """Of the stretch from `start` to `stop`, on the device of `draws`."""
    first, last = draws.reach(key, ids, start, stop)
    device = draws.keep.device
    words = torch.from_numpy(ids[first:last].astype(np.int64)).to(device)
    places = torch.arange(first, last, device=device)
    lines = (words == draws.eos).cumsum(0)
    kept = _upper(draw_all(key, places * draws.per_place)) < draws.keep[words]
    words_C, places_C, lines_C = words[kept], places[kept], lines[kept]
    radius_C = 1 + (_upper(draw_all(key, places_C * draws.per_place + 1)) * draws.window >> 32)
    own_C = (places_C >= start) & (places_C < stop)
    return Kept(words_C, places_C, lines_C, radius_C * own_C)


def pairs_of(draws: Draws, key: int, kept: Kept) -> Pairs:
    """Every centre with every context in its window, and the negatives of each."""
    window, words = draws.window, len(kept.words)
    device = kept.words.device
    offsets = torch.tensor([o for o in range(-window, window + 1) if o], device=device)
    others_CW = torch.arange(words, device=device)[:, None] + offsets
    inside_CW = (others_CW >= 0) & (others_CW < words) & (offsets.abs() <= kept.radius[:, None])
    others_CW = others_CW.clamp(0, max(words - 1, 0))
    inside_CW &= kept.lines[others_CW] == kept.lines[:, None]
    centres, slots_N = inside_CW.nonzero(as_tuple=True)
    places_N = kept.places[centres]
    numbers = torch.arange(draws.negatives, device=device) + (slots_N * draws.negatives)[:, None]
    bits = draw_all(key, (places_N * draws.per_place + 2)[:, None] + numbers)
    columns = _upper(bits) * len(draws.alias) >> 32
    own = (bits & (HALF - 1)) < draws.accept[columns]
    negatives_NK = torch.where(own, columns, draws.alias[columns])
    return Pairs(kept.words[centres], kept.words[others_CW[centres, slots_N]], negatives_NK, places_N)


def _upper(bits: Tensor) -> Tensor:
    return _shifted(bits, 32)
