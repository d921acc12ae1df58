"""Translate source sentences by beam search, greedy search or sampling.

Start with `beam_search`; `greedy` is a beam search of width 1, and `sample` chooses every word at random:

    best = beam_search(model, source_BS, eos, SearchSettings(beam=5))[0][0]    # the best translation of sentence 0
    best.ids, best.score

A hypothesis (a translation, or the beginning of one) is open until <eos> ends it. Each step of a beam search extends
every open hypothesis with every word, and sorts the continuations of a sentence by log p. Then:

    Among the `beam` best continuations, the continuations that end with <eos> are finished.
    Among all other continuations, the `beam` best stay open.

The score of a finished hypothesis is log p / length^length_penalty.

`_BeamState._is_done` lists the conditions that end the search. All lengths, including the length of the source, count
<eos>. The model runs on the device, in `decoding.py`. The code here runs on the host (the CPU): it adds
log-probabilities, sorts the hypotheses, and decides which of them end.

Shapes: B sentences, A active sentences (not done), W open hypotheses per sentence, R = A x W rows (hypotheses of the
batch), K words per row, P = W x K continuations, Q selected continuations, S source tokens, T target tokens so far,
including the <eos> before them.
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
from reefknot.lab.evaluation.generation import MIN_TEMPERATURE, check_sampling_options, sampling_weights
from reefknot.nn.models.translator import PAD, Translator

Floats = NDArray[np.float64]


class SearchSettings(Settings):
    """Settings of the search for a translation."""

    beam: Annotated[Count, Field(description="Number of hypotheses that stay open. With 1, the search is greedy.")] = 5
    length_penalty: Annotated[
        float,
        Field(
            ge=0,
            le=10,
            description="Exponent of the length penalty: score = log p / length^length_penalty. With 0, the score is "
            "log p, which favours short translations.",
        ),
    ] = 1.0
    longest: Annotated[
        float,
        Field(
            ge=0, le=1000, description="Maximum number of target tokens per source token. <eos> counts on both sides."
        ),
    ] = 2.0
    beyond: Annotated[
        int,
        Field(
            ge=0,
            le=10**6,
            description="Number of target tokens allowed in addition to `longest` times the source tokens.",
        ),
    ] = 10
    early_stop: Annotated[
        bool,
        Field(
            description="Stop when `beam` hypotheses are finished and no open hypothesis has a better score. If "
            "false, continue until no open hypothesis can reach a better score."
        ),
    ] = True

    def limit(self, source_tokens: int) -> int:
        """Return the maximum number of target tokens for a source of this length. Both numbers include <eos>."""
        return max(1, int(self.longest * source_tokens + self.beyond))

    def score(self, logp: float, length: int) -> float:
        """Return the score by which hypotheses are compared."""
        return logp / float(length**self.length_penalty)


class Hypothesis(NamedTuple):
    """A translation, or the beginning of one."""

    ids: tuple[int, ...]
    """Target ids, without <eos>."""
    logp: float
    """Log-probability of the ids and, if the hypothesis is finished, of the <eos> after them."""
    score: float
    """log p / length^length_penalty, by which hypotheses are compared."""
    finished: bool
    """Whether the hypothesis ends with <eos>. If not, the search has reached the length limit."""


def beam_search(
    model: Translator | Decoder,
    source_BS: Tensor,
    eos: int,
    settings: SearchSettings | None = None,
    banned: Collection[int] = (),
    n_best: int = 1,
) -> list[list[Hypothesis]]:
    """Return the `n_best` translations of each source sentence, best first.

    Finished hypotheses come first. If there are too few, the best hypotheses that reached the length limit follow.
    There are fewer than `n_best` only if no other hypothesis has a probability above zero.

    A translation does not depend on the other sentences of its batch, except for rounding. Ties between continuations
    are broken by the id of the last word, then by the order of the hypotheses. If several words are equally probable,
    the output end decides which of them it returns.

    In each step, the host waits for the device once, for the best words of all hypotheses. (An adaptive output end
    waits once more for every tail, a cluster of rare words, to know which rows need it.)

    Args:
        model: A translator, or a decoder made by `decoding` if there are many batches.
        source_BS: Source ids. Each row ends with <eos> and is padded with `PAD`.
        eos: The id that begins and ends a target sentence.
        settings: Settings of the search.
        banned: Ids that are never generated, such as <unk>.
        n_best: Number of translations to return, at most the beam.
    """
    settings = settings or SearchSettings()
    if not 1 <= n_best <= settings.beam:
        raise SettingsError(
            f"n_best = {n_best}: must be from 1 to the beam size, {settings.beam}; for more translations, increase beam"
        )
    # At most one continuation of a hypothesis ends with <eos>, so the best `beam` + 1 words of a hypothesis are enough.
    num_candidates = settings.beam + 1
    beam_state = _BeamState(_length_limits(source_BS, settings), eos, settings, n_best)
    with decoding(model) as decoder:
        _check_ids(decoder.model, eos, banned)
        batch = decoder.start_batch(source_BS, settings.limit, settings.beam, num_candidates, banned)
        parents_R: Ints = np.arange(len(source_BS))
        while len(beam_state.sentence_A):
            last_ids_R = beam_state.ids_AWT[..., -1].ravel()
            log_probs_RK, ids_RK = batch.step(parents_R, last_ids_R)
            host_log_probs_RK, host_ids_RK = _copy_to_host(log_probs_RK, ids_RK)
            parents_R = beam_state.update(host_log_probs_RK, host_ids_RK)
    return beam_state.results


def greedy(
    model: Translator | Decoder,
    source_BS: Tensor,
    eos: int,
    settings: SearchSettings | None = None,
    banned: Collection[int] = (),
) -> list[Hypothesis]:
    """Translate greedily, with the most probable word in each step. This is a beam search of width 1."""
    settings = settings or SearchSettings()
    greedy_settings = settings.model_copy(update={"beam": 1, "early_stop": True})
    return [hypotheses[0] for hypotheses in beam_search(model, source_BS, eos, greedy_settings, banned)]


def sample(
    model: Translator | Decoder,
    source_BS: Tensor,
    eos: int,
    settings: SearchSettings | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    banned: Collection[int] = (),
) -> list[Hypothesis]:
    """Sample one translation of each source sentence, word by word as in `generate`.

    A translation depends only on the seed and the ids of its source, not on the rest of the batch. Only the length
    limit and the length penalty of the settings are used. log p is the log-probability under the model at temperature
    1.
    """
    settings = settings or SearchSettings()
    check_sampling_options(temperature, top_k, top_p)
    if seed < 0:
        raise SettingsError(f"seed = {seed}: must be 0 or more")
    num_candidates = top_k
    if temperature < MIN_TEMPERATURE:
        num_candidates = 1

    sampled = _SampledSentences(source_BS, seed, eos, settings)
    with decoding(model) as decoder:
        _check_ids(decoder.model, eos, banned)
        batch = decoder.start_batch(source_BS, settings.limit, 1, num_candidates, banned)
        active_rows: Ints = np.arange(len(source_BS))
        while len(active_rows):
            log_probs_AK, ids_AK = batch.step(active_rows, sampled.last_ids())
            weights_AK = sampling_weights(log_probs_AK, temperature, top_p)
            uniform_A = send(sampled.draw_uniform(), ids_AK.device)
            index_A1 = _sample_index(weights_AK, uniform_A)
            log_probs_A1 = log_probs_AK.gather(1, index_A1)
            ids_A1 = ids_AK.gather(1, index_A1)
            host_log_probs_A1, host_ids_A1 = _copy_to_host(log_probs_A1, ids_A1)
            active_rows = sampled.append(host_log_probs_A1[:, 0], host_ids_A1[:, 0])
    return sampled.hypotheses()


class _BeamState:
    """State of a beam search on the host: the finished and the open hypotheses of a batch."""

    def __init__(self, length_limits: list[int], eos: int, settings: SearchSettings, n_best: int) -> None:
        num_sentences = len(length_limits)
        self._length_limits = length_limits
        self._eos = eos
        self._settings = settings
        self._n_best = n_best
        self.results: list[list[Hypothesis]] = [[] for _ in range(num_sentences)]
        """Finished hypotheses of every sentence, best first. If scores are equal, the earlier hypothesis is first."""
        self.sentence_A: Ints = np.arange(num_sentences)
        """Indices of the sentences that are not done."""
        self.log_probs_AW: Floats = np.zeros((num_sentences, 1))
        """Log-probabilities of the open hypotheses, best first. Rows with fewer hypotheses are padded with -inf."""
        self.ids_AWT: Ints = np.full((num_sentences, 1, 1), eos)
        """Ids of the open hypotheses, with <eos> before the first word."""

    def update(self, log_probs_RK: Floats, ids_RK: Ints) -> Ints:
        """Extend every open hypothesis with its best words, and return the parent row of each new open hypothesis.

        For example, two sentences have the rows 0, 1 and 2, 3. If both new hypotheses of the first sentence continue
        row 1, and the second sentence is done, the parent rows are 1, 1.
        """
        num_active, old_width = self.log_probs_AW.shape
        continuations = self._rank(log_probs_RK, ids_RK)
        self._finish(continuations)
        parent_AW = self._extend(continuations)
        first_rows_A1 = old_width * np.arange(num_active)[:, None]
        parent_rows_AW: Ints = first_rows_A1 + parent_AW

        # Sentences that are done leave the batch.
        done_indices = [index for index in range(num_active) if self._is_done(index)]
        for index in done_indices:
            self._complete_results(index)
        self.sentence_A = np.delete(self.sentence_A, done_indices, axis=0)
        self.log_probs_AW = np.delete(self.log_probs_AW, done_indices, axis=0)
        self.ids_AWT = np.delete(self.ids_AWT, done_indices, axis=0)
        return np.delete(parent_rows_AW, done_indices, axis=0).ravel()

    def _rank(self, log_probs_RK: Floats, ids_RK: Ints) -> _Continuations:
        """Sort the continuations of each sentence by log p, then by the id, then by the hypothesis they continue."""
        num_active, beam_width = self.log_probs_AW.shape
        num_candidates = log_probs_RK.shape[1]
        log_probs_AWK = self.log_probs_AW[..., None] + log_probs_RK.reshape(num_active, beam_width, num_candidates)
        log_probs_AP = log_probs_AWK.reshape(num_active, -1)
        token_AP = ids_RK.reshape(num_active, -1)
        parent_P = np.arange(beam_width).repeat(num_candidates)
        parent_AP = np.broadcast_to(parent_P, token_AP.shape)
        best_first_AP = np.lexsort((token_AP, -log_probs_AP))  # the last key is the first to sort by
        return _Continuations(log_probs_AP, token_AP, parent_AP).take(best_first_AP)

    def _finish(self, continuations: _Continuations) -> None:
        """Store the continuations among the best `beam` that end with <eos>."""
        is_eos_AP = (continuations.token == self._eos) & (continuations.logp > -np.inf)
        for index, rank in np.argwhere(is_eos_AP[:, : self._settings.beam]):
            parent = continuations.parent[index, rank]
            ids = [*self.ids_AWT[index, parent, 1:].tolist(), self._eos]
            logp = float(continuations.logp[index, rank])
            hypothesis = _build_hypothesis(ids, logp, self._eos, self._settings)
            results = self.results[self.sentence_A[index]]
            insort(results, hypothesis, key=_negative_score)

    def _extend(self, continuations: _Continuations) -> Ints:
        """Open the best continuations that do not end with <eos>, and return their parents, parent_AW."""
        # A stable sort of the booleans puts the continuations without <eos> first and keeps their order.
        without_eos_first_AP = np.argsort(continuations.token == self._eos, axis=1, kind="stable")
        best = continuations.take(without_eos_first_AP[:, : self._settings.beam])
        log_probs_AQ = np.where(best.token == self._eos, -np.inf, best.logp)

        # Drop continuations with probability zero. They are at the end, because continuations are sorted.
        new_width = max(1, int((log_probs_AQ > -np.inf).any(axis=0).sum()))
        log_probs_AW = log_probs_AQ[:, :new_width]
        token_AW = best.token[:, :new_width]
        parent_AW = best.parent[:, :new_width]

        prefix_AWT = np.take_along_axis(self.ids_AWT, parent_AW[..., None], axis=1)
        self.log_probs_AW = log_probs_AW
        self.ids_AWT = np.concatenate([prefix_AWT, token_AW[..., None]], axis=2)
        return parent_AW

    def _is_done(self, index: int) -> bool:
        """Return whether the search for an active sentence is done. It is done if one of these conditions holds:

        1. The hypotheses of the sentence have reached the length limit, or none is open.
        2. With early_stop: At least `beam` hypotheses are finished, and no open hypothesis scores higher, at its
           current length, than the finished hypothesis of rank `beam`.
        3. No open hypothesis can still become one of the `n_best`. Log p can only decrease and the length can only
           grow, up to the limit M, so no continuation of an open hypothesis has a score above
           log p / M^length_penalty. This condition never changes the result.
        """
        sentence = self.sentence_A[index]
        finished = self.results[sentence]
        length_limit = self._length_limits[sentence]
        best_logp = float(self.log_probs_AW[index, 0])
        length = self.ids_AWT.shape[2] - 1
        if length == length_limit or best_logp == -np.inf:
            return True
        if self._settings.early_stop and self._is_beaten(finished, self._settings.beam, best_logp, length):
            return True
        return self._is_beaten(finished, self._n_best, best_logp, length_limit)

    def _is_beaten(self, finished: Sequence[Hypothesis], count: int, logp: float, length: int) -> bool:
        """Return whether the best `count` finished hypotheses score at least as much as this log p at this length."""
        if len(finished) < count:
            return False
        return finished[count - 1].score >= self._settings.score(logp, length)

    def _complete_results(self, index: int) -> None:
        """Keep the `n_best` results of a sentence that is done. If there are too few, add its open hypotheses."""
        results = self.results[self.sentence_A[index]]
        del results[self._n_best :]
        num_missing = self._n_best - len(results)
        results += self._open_hypotheses(index)[:num_missing]

    def _open_hypotheses(self, index: int) -> list[Hypothesis]:
        """Return the open hypotheses of a sentence, best first."""
        ids_W = self.ids_AWT[index, :, 1:].tolist()
        log_probs_W = self.log_probs_AW[index].tolist()
        hypotheses = []
        for ids, logp in zip(ids_W, log_probs_W, strict=True):
            if logp > -np.inf:
                hypotheses.append(_build_hypothesis(ids, logp, self._eos, self._settings))
        return hypotheses


class _Continuations(NamedTuple):
    """Continuations of the hypotheses of each sentence, best first."""

    logp: Floats
    """Log-probability of all tokens so far, log_probs_AP."""
    token: Ints
    """The new token, token_AP."""
    parent: Ints
    """The hypothesis that is continued, as an index among the W hypotheses of the sentence, parent_AP."""

    def take(self, index_AQ: Ints) -> _Continuations:
        """Select continuations of each sentence by their indices."""
        log_probs_AQ = np.take_along_axis(self.logp, index_AQ, axis=1)
        token_AQ = np.take_along_axis(self.token, index_AQ, axis=1)
        parent_AQ = np.take_along_axis(self.parent, index_AQ, axis=1)
        return _Continuations(log_probs_AQ, token_AQ, parent_AQ)


class _SampledSentences:
    """State of sampling on the host: the ids and log-probabilities of the translations of a batch."""

    def __init__(self, source_BS: Tensor, seed: int, eos: int, settings: SearchSettings) -> None:
        self._eos = eos
        self._settings = settings
        self._length_limits = _length_limits(source_BS, settings)
        # A generator for each sentence, so that a translation does not depend on the rest of the batch.
        self._generators = []
        for padded_ids in source_BS.tolist():
            source_ids = [token for token in padded_ids if token != PAD]
            self._generators.append(np.random.default_rng([seed, *source_ids]))
        num_sentences = len(self._length_limits)
        self._ids: list[list[int]] = [[eos] for _ in range(num_sentences)]
        """Ids of each translation, with <eos> before the first word."""
        self._logp_B = np.zeros(num_sentences)
        """Log-probability of each translation."""
        self._sentence_A: Ints = np.arange(num_sentences)
        """Indices of the sentences that are not done."""

    def last_ids(self) -> Ints:
        """Return the last id of each active sentence."""
        return np.array([self._ids[sentence][-1] for sentence in self._sentence_A])

    def draw_uniform(self) -> Tensor:
        """Return a random number in [0, 1) for each active sentence."""
        numbers = [self._generators[sentence].random() for sentence in self._sentence_A]
        return torch.tensor(numbers, dtype=torch.float64)

    def append(self, log_probs_A: Floats, ids_A: Ints) -> Ints:
        """Add a word to each active sentence, and return the rows of the sentences that remain active.

        Sentences that are done leave the batch. For example, if sentences 0, 2 and 3 are active and 2 is done, the
        remaining rows are 0 and 2.
        """
        self._logp_B[self._sentence_A] += log_probs_A
        stays_active = []
        for sentence, token in zip(self._sentence_A, ids_A.tolist(), strict=True):
            ids = self._ids[sentence]
            ids.append(token)
            is_below_limit = len(ids) <= self._length_limits[sentence]
            stays_active.append(token != self._eos and is_below_limit)
        remaining_rows: Ints = np.flatnonzero(stays_active)
        self._sentence_A = self._sentence_A[remaining_rows]
        return remaining_rows

    def hypotheses(self) -> list[Hypothesis]:
        """Return the translation of each sentence."""
        hypotheses = []
        for ids, logp in zip(self._ids, self._logp_B.tolist(), strict=True):
            hypotheses.append(_build_hypothesis(ids[1:], logp, self._eos, self._settings))
        return hypotheses


def _build_hypothesis(ids: list[int], logp: float, eos: int, settings: SearchSettings) -> Hypothesis:
    """Return the hypothesis with these ids. It is finished if they end with <eos>."""
    score = settings.score(logp, len(ids))
    finished = ids[-1] == eos
    if finished:
        ids = ids[:-1]
    return Hypothesis(tuple(ids), logp, score, finished)


def _negative_score(hypothesis: Hypothesis) -> float:
    return -hypothesis.score


def _sample_index(weights_NK: Tensor, uniform_N: Tensor) -> Tensor:
    """Sample one candidate of each row, index_N1, by inverting the cumulative weights at uniform numbers in [0, 1)."""
    cumulative_NK = weights_NK.double().cumsum(-1)
    totals_N1 = cumulative_NK[:, -1:]
    index_N1 = torch.searchsorted(cumulative_NK, uniform_N[:, None] * totals_N1, right=True)
    # The product may round up to the whole sum. NaN is rejected on the host.
    last_index_N1 = (weights_NK > 0).sum(-1, keepdim=True) - 1
    return index_N1.minimum(last_index_N1).clamp(min=0)


def _copy_to_host(log_probs_NK: Tensor, ids_NK: Tensor) -> tuple[Floats, Ints]:
    """Return both tensors as arrays on the host.

    They are copied together, because the host waits for every copy. float64 is exact for ids.
    """
    both = torch.stack([log_probs_NK.double(), ids_NK.double()])
    host_log_probs_NK, host_ids_NK = both.cpu().numpy()
    if np.isnan(host_log_probs_NK).any():
        raise NonFiniteError("the model gives a translation a probability that is NaN (not a number)")
    return host_log_probs_NK, host_ids_NK.astype(np.int64)


def _length_limits(source_BS: Tensor, settings: SearchSettings) -> list[int]:
    """Return the maximum number of target tokens of each source."""
    source_lengths = (source_BS != PAD).sum(dim=1).tolist()
    return [settings.limit(source_length) for source_length in source_lengths]


def _check_ids(model: Translator, eos: int, banned: Collection[int]) -> None:
    vocab_size = model.output.vocab_size
    if not 0 <= eos < vocab_size:
        raise SettingsError(f"eos = {eos}: must be from 0 to {vocab_size - 1}, the classes of the model")
    if eos in banned:
        raise SettingsError("banned: contains <eos>, so no translation could end; leave <eos> out")
