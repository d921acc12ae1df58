"""Translations of a source: beam search, the best word each time, and drawn ones.

A hypothesis is open until <eos> ends it. In every step each open one is continued by every word, and of a sentence's
continuations, best first by log p,

    those by <eos> among the best `beam` are finished, with score = log p / length^length_penalty,
    the best `beam` of the others go on.

The best `beam` + 1 words of each open hypothesis hold all of these, because <eos> is at most one of them: an output end
is asked for no others. A sentence is done when

    its hypotheses have as many tokens as they may, or none is open,
    with early_stop: `beam` are finished, and no open one is better, as it stands, than the last of the best `beam`,
    no open one can still be among the `n_best` that are asked for. Log p can only fall and lengths can only grow, to
    the limit M, so no hypothesis that follows from an open one scores more than log p / M^length_penalty.

The last rule never changes what is returned. <eos> counts in every length, also in that of the source.

What the device does in a step is in `decoding.py`. Sums, order and ends are the host's business. In each step it waits
for the device once, for the words of all hypotheses (an adaptive output end waits once more for every tail, to know
which rows open it). Equal continuations are told apart by the id of their last word, then by the order of what they
continue; which of several equal words are among the best of a hypothesis is the output end's choice. Nothing depends on
the other sentences of a batch but the rounding of its products.

Shapes: B sentences, A of them not done, W open hypotheses of each, R = A x W rows, K words of each, P = W x K
continuations, S source tokens, T target tokens so far, <eos> before them included.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from typing import Annotated, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.kernels.capture import send
from reefknot.lab.config.settings import Count, Settings
from reefknot.lab.evaluation.decoding import Decoder, Ints, decoding
from reefknot.lab.evaluation.generation import COLDEST, chances, check_choice
from reefknot.nn.models.translator import PAD, Translator

Floats = NDArray[np.float64]


class SearchSettings(Settings):
    """How the translation of a source is searched for."""

    beam: Annotated[Count, Field(description="hypotheses that are kept open; 1: the best word each time")] = 5
    length_penalty: Annotated[
        float,
        Field(
            ge=0, le=10, description="score = log p / length^length_penalty; 0: log p alone, which favours the short"
        ),
    ] = 1.0
    longest: Annotated[
        float, Field(ge=0, le=1000, description="most target tokens per source token, <eos> counted on both sides")
    ] = 2.0
    beyond: Annotated[int, Field(ge=0, le=10**6, description="and so many more")] = 10
    early_stop: Annotated[
        bool,
        Field(
            description="end when `beam` are finished and none that is open is better; false: when none can become so"
        ),
    ] = True

    def limit(self, tokens: int) -> int:
        """Most target tokens, <eos> among them, of a source of so many."""
        return max(1, int(self.longest * tokens + self.beyond))

    def score(self, logp: float, length: int) -> float:
        """What hypotheses are compared by."""
        return logp / float(length**self.length_penalty)


class Hypothesis(NamedTuple):
    """A translation, or the beginning of one."""

    ids: tuple[int, ...]
    """Without <eos>."""
    logp: float
    """Log-probability of the ids and, where it is finished, of <eos> after them."""
    score: float
    finished: bool
    """False: the longest length was reached without <eos>."""


def beam_search(
    model: Translator | Decoder,
    source_BS: Tensor,
    eos: int,
    settings: SearchSettings | None = None,
    never: Collection[int] = (),
    n_best: int = 1,
) -> list[list[Hypothesis]]:
    """The `n_best` translations of each source, best first: finished ones and, if these are too few, the best of those
    that reached the limit. They are fewer only where no others have a probability.

    Arguments:
        model: a translator, or one that `decoding` has made ready for many batches.
        source_BS: ids, where <eos> ends each row, filled up with `PAD`.
        eos: the id that begins and ends a target.
        never: ids that are not to be produced, such as <unk>.
    """
    settings = settings or SearchSettings()
    if not 1 <= n_best <= settings.beam:
        raise SettingsError(f"n_best = {n_best}: must be 1 to {settings.beam}, the beam; use a wider one for more")
    search = _Search(_limits(source_BS, settings), eos, settings, n_best)
    with decoding(model) as decoder:
        _check_words(decoder.model, eos, never)
        rows = decoder.begin(source_BS, settings.limit, settings.beam, settings.beam + 1, never)
        parents_R: Ints = np.arange(len(source_BS))
        while len(search.sentence_A):
            best = rows.read(parents_R, search.ids_AWT[..., -1].ravel())
            parents_R = search.step(*_on_host(*best))
    return search.found


def greedy(
    model: Translator | Decoder,
    source_BS: Tensor,
    eos: int,
    settings: SearchSettings | None = None,
    never: Collection[int] = (),
) -> list[Hypothesis]:
    """The best word each time: a beam of one that stops at the first <eos>."""
    settings = (settings or SearchSettings()).model_copy(update={"beam": 1, "early_stop": True})
    return [best for (best,) in beam_search(model, source_BS, eos, settings, never)]


def sample(
    model: Translator | Decoder,
    source_BS: Tensor,
    eos: int,
    settings: SearchSettings | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    never: Collection[int] = (),
) -> list[Hypothesis]:
    """A translation of each source, drawn word by word as in `generate`. It follows from the seed and the source's own
    ids, whatever else is in the batch. Of the settings, the limit and the score have a meaning here; log p is that of
    the model, whatever the temperature."""
    settings = settings or SearchSettings()
    check_choice(temperature, top_k, top_p)
    if seed < 0:
        raise SettingsError(f"seed = {seed}: must be 0 or more")
    limits = _limits(source_BS, settings)
    wanted = 1 if temperature < COLDEST else top_k
    draws = [np.random.default_rng([seed, *(each for each in row if each != PAD)]) for row in source_BS.tolist()]
    texts: list[list[int]] = [[eos] for _ in limits]
    logp_B = np.zeros(len(limits))
    sentence_A = stay = np.arange(len(limits))
    with decoding(model) as decoder:
        _check_words(decoder.model, eos, never)
        rows = decoder.begin(source_BS, settings.limit, 1, wanted, never)
        while len(sentence_A):
            logp_AK, ids_AK = rows.read(stay, np.array([texts[each][-1] for each in sentence_A]))
            u_A = torch.tensor([draws[each].random() for each in sentence_A], dtype=torch.float64)
            place_A1 = _drawn(chances(logp_AK, temperature, top_p), send(u_A, ids_AK.device))
            logp_A1, ids_A1 = _on_host(logp_AK.gather(1, place_A1), ids_AK.gather(1, place_A1))
            logp_B[sentence_A] += logp_A1[:, 0]
            for sentence, token in zip(sentence_A, ids_A1[:, 0].tolist(), strict=True):
                texts[sentence].append(token)
            goes_on = [texts[each][-1] != eos and len(texts[each]) <= limits[each] for each in sentence_A]
            stay = np.flatnonzero(goes_on)
            sentence_A = sentence_A[stay]
    return [_hypothesis(text[1:], logp, eos, settings) for text, logp in zip(texts, logp_B.tolist(), strict=True)]


class _Search:
    """What the host knows of the sentences of a batch: finished hypotheses, and those that are open."""

    def __init__(self, limits: list[int], eos: int, settings: SearchSettings, n_best: int) -> None:
        self._limits = limits
        self._eos = eos
        self._settings = settings
        self._n_best = n_best
        self.found: list[list[Hypothesis]] = [[] for _ in limits]
        """Of every sentence, best first, the first of equals first."""
        self.sentence_A: Ints = np.arange(len(limits))
        """Those that are not done."""
        self.logp_AW: Floats = np.zeros((len(limits), 1))
        """Best first; minus infinity fills up where a sentence has fewer open hypotheses than another."""
        self.ids_AWT: Ints = np.full((len(limits), 1, 1), eos)

    def step(self, logp_RK: Floats, ids_RK: Ints) -> Ints:
        """Continue every open hypothesis by its best words; of the rows, those that the new ones go on from."""
        sentences, width = self.logp_AW.shape
        ranked = self._ranked(logp_RK, ids_RK)
        self._finish(ranked)
        row_AW: Ints = self._go_on(ranked) + width * np.arange(sentences)[:, None]
        done = [place for place in range(sentences) if self._done(place)]
        for place in done:
            found = self.found[self.sentence_A[place]]
            found[self._n_best :] = []
            found += self._unfinished(place)[: self._n_best - len(found)]
        self.logp_AW = np.delete(self.logp_AW, done, axis=0)
        self.sentence_A, self.ids_AWT, row_AW = (
            np.delete(each, done, axis=0) for each in (self.sentence_A, self.ids_AWT, row_AW)
        )
        return row_AW.ravel()

    def _ranked(self, logp_RK: Floats, ids_RK: Ints) -> _Ranked:
        """Equal ones by the id, then by the hypothesis that they continue."""
        sentences, width = self.logp_AW.shape
        logp_AP = (self.logp_AW[..., None] + logp_RK.reshape(sentences, width, -1)).reshape(sentences, -1)
        token_AP = ids_RK.reshape(sentences, -1)
        parent_AP = np.broadcast_to(np.arange(width).repeat(logp_RK.shape[1]), token_AP.shape)
        return _Ranked(logp_AP, token_AP, parent_AP).take(np.lexsort((token_AP, -logp_AP)))

    def _finish(self, ranked: _Ranked) -> None:
        """Keep what ends here."""
        ends_AP = (ranked.token == self._eos) & (ranked.logp > -np.inf)
        for place, rank in np.argwhere(ends_AP[:, : self._settings.beam]):
            ids = [*self.ids_AWT[place, ranked.parent[place, rank], 1:].tolist(), self._eos]
            ended = _hypothesis(ids, float(ranked.logp[place, rank]), self._eos, self._settings)
            insort(self.found[self.sentence_A[place]], ended, key=lambda each: -each.score)

    def _go_on(self, ranked: _Ranked) -> Ints:
        """Open the best of what does not end, parent_AW."""
        best = ranked.take(np.argsort(ranked.token == self._eos, axis=1, kind="stable")[:, : self._settings.beam])
        logp_AW = np.where(best.token == self._eos, -np.inf, best.logp)
        # Best first, so those without a probability are at the end.
        width = max(1, int((logp_AW > -np.inf).any(axis=0).sum()))
        token_AW, parent_AW = best.token[:, :width], best.parent[:, :width]
        before_AWT = np.take_along_axis(self.ids_AWT, parent_AW[..., None], axis=1)
        self.logp_AW = logp_AW[:, :width]
        self.ids_AWT = np.concatenate([before_AWT, token_AW[..., None]], axis=2)
        return parent_AW

    def _done(self, place: int) -> bool:
        sentence, best = self.sentence_A[place], float(self.logp_AW[place, 0])
        found, limit = self.found[sentence], self._limits[sentence]
        length = self.ids_AWT.shape[2] - 1
        if length == limit or best == -np.inf:
            return True
        early = self._settings.early_stop and self._beaten(found, self._settings.beam, best, length)
        return early or self._beaten(found, self._n_best, best, limit)

    def _beaten(self, found: Sequence[Hypothesis], number: int, logp: float, length: int) -> bool:
        """Whether so many are finished that are no worse than a hypothesis of this log p and length."""
        return len(found) >= number and found[number - 1].score >= self._settings.score(logp, length)

    def _unfinished(self, place: int) -> list[Hypothesis]:
        """The open hypotheses of a sentence as they are, best first."""
        pairs = zip(self.ids_AWT[place, :, 1:].tolist(), self.logp_AW[place].tolist(), strict=True)
        return [_hypothesis(ids, logp, self._eos, self._settings) for ids, logp in pairs if logp > -np.inf]


class _Ranked(NamedTuple):
    """Continuations of the hypotheses of each sentence, best first."""

    logp: Floats
    """logp_AP of all tokens so far."""
    token: Ints
    """token_AP, the new one."""
    parent: Ints
    """parent_AP: which of the W hypotheses it continues."""

    def take(self, place_AQ: Ints) -> _Ranked:
        logp_AQ = np.take_along_axis(self.logp, place_AQ, axis=1)
        token_AQ, parent_AQ = (np.take_along_axis(each, place_AQ, axis=1) for each in (self.token, self.parent))
        return _Ranked(logp_AQ, token_AQ, parent_AQ)


def _hypothesis(ids: list[int], logp: float, eos: int, settings: SearchSettings) -> Hypothesis:
    finished = ids[-1] == eos
    return Hypothesis(tuple(ids[:-1] if finished else ids), logp, settings.score(logp, len(ids)), finished)


def _drawn(p_NK: Tensor, u_N: Tensor) -> Tensor:
    """The place of one candidate of each row, place_N1: where its share of the sum reaches a number from 0 to 1."""
    reached_NK = p_NK.double().cumsum(-1)
    place_N1 = torch.searchsorted(reached_NK, u_N[:, None] * reached_NK[:, -1:], right=True)
    # A product may be rounded up to the whole sum, and what is not a number is refused on the host.
    return place_N1.minimum((p_NK > 0).sum(-1, keepdim=True) - 1).clamp(min=0)


def _on_host(logp_NK: Tensor, ids_NK: Tensor) -> tuple[Floats, Ints]:
    """Both in one copy, for which the host waits. float64 holds every id."""
    logp, ids = torch.stack([logp_NK.double(), ids_NK.double()]).cpu().numpy()
    if np.isnan(logp).any():
        raise NonFiniteError("the model gives a translation a probability that is not a number")
    return logp, ids.astype(np.int64)


def _limits(source_BS: Tensor, settings: SearchSettings) -> list[int]:
    """Most tokens of the target of each source."""
    return [settings.limit(tokens) for tokens in (source_BS != PAD).sum(dim=1).tolist()]


def _check_words(model: Translator, eos: int, never: Collection[int]) -> None:
    size = model.output.vocab_size
    if not 0 <= eos < size:
        raise SettingsError(f"eos = {eos} is no class of the model: there are {size}, counted from 0")
    if eos in never:
        raise SettingsError("never: <eos> is among the ids that are not to be produced, so no translation could end")
