"""Log-probabilities of the tokens of sentences. Each sentence is scored independently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from reefknot.errors import DataError
from reefknot.kernels.scores import IGNORE
from reefknot.lab.evaluation.perplexity import ROWS_AT_ONCE
from reefknot.lab.text.samples import pack_windows
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.models.language_model import LanguageModel, evaluating


@dataclass(frozen=True)
class ScoredWord:
    """A word of a sentence with its log-probability."""

    word: str
    """A word or a sub-word."""
    log_prob: float
    unknown: bool
    """Whether the word was scored as <unk>."""


class _Tokens(NamedTuple):
    shown: list[str]
    inputs: list[int]
    targets: list[int]


def score_sentence(model: LanguageModel, words: list[str], vocabulary: Vocabulary) -> list[ScoredWord]:
    """Score one sentence.

    If the vocabulary has <eos>, it is the input before the first word, and it is scored after the last word.
    """
    (scored,) = score_sentences(model, [words], vocabulary)
    return scored


@torch.no_grad()
def score_sentences(
    model: LanguageModel, sentences: Sequence[list[str]], vocabulary: Vocabulary
) -> list[list[ScoredWord]]:
    """Score several sentences. Sentences of similar length are batched, which changes scores only by rounding."""
    if not sentences:
        return []
    tokens = [_tokens(words, vocabulary) for words in sentences]
    lengths_S = np.array([len(sentence.targets) for sentence in tokens], dtype=np.int64)
    order_S = np.argsort(-lengths_S, kind="stable")
    capacity = max(ROWS_AT_ONCE // model.output.rows_per_token, int(lengths_S.max()))
    scores: list[list[ScoredWord]] = [[] for _ in tokens]
    with evaluating(model):
        for first, stop in pack_windows(lengths_S[order_S], capacity):
            indices = order_S[first:stop].tolist()
            batch = [tokens[index] for index in indices]
            for index, sentence, logp_T in zip(indices, batch, _log_probs(model, batch), strict=True):
                # The log-probabilities also cover the padding, which comes last.
                scored = zip(sentence.shown, logp_T, sentence.targets, strict=False)
                scores[index] = [ScoredWord(word, logp, target == vocabulary.unk) for word, logp, target in scored]
    return scores


def _tokens(words: list[str], vocabulary: Vocabulary) -> _Tokens:
    ids, inputs = vocabulary.encode(words), vocabulary.encode_inputs(words)
    shown = [token for word in words for token in vocabulary.split_word(word)]
    if vocabulary.eos is not None:
        return _Tokens([*shown, vocabulary.words[vocabulary.eos]], [vocabulary.eos, *inputs], [*ids, vocabulary.eos])
    if len(ids) < 2:
        raise DataError("a sentence needs at least two words when the vocabulary has no <eos>")
    return _Tokens(shown[1:], inputs[:-1], ids[1:])


def _log_probs(model: LanguageModel, batch: Sequence[_Tokens]) -> list[list[float]]:
    """Return the log-probabilities of the targets of each sentence, padding included.

    Shorter sentences are padded on the right, which does not affect the tokens before the padding.
    """
    device, steps = next(model.parameters()).device, max(len(sentence.targets) for sentence in batch)
    x_BT = torch.tensor([row.inputs + [0] * (steps - len(row.inputs)) for row in batch], device=device)
    y_BT = torch.tensor([row.targets + [IGNORE] * (steps - len(row.targets)) for row in batch], device=device)
    logp_BT, _ = model.target_log_probs(x_BT, y_BT)
    log_probs: list[list[float]] = logp_BT.tolist()
    return log_probs
