"""Log-probability of every word of a sentence under a language model. Each sentence is scored independently.

Start with `score_sentence`, or with `score_sentences` for many sentences, which are scored in batches:

    for word in score_sentence(model, ["the", "cat", "sat"], vocabulary):
        print(word.word, word.log_prob)

Shapes: S sentences, B sentences of a batch, T tokens of the longest sentence of a batch.
"""

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
    encoded_sentences = [_encode(words, vocabulary) for words in sentences]
    lengths_S = np.array([len(sentence.targets) for sentence in encoded_sentences], dtype=np.int64)
    longest_first_S = np.argsort(-lengths_S, kind="stable")
    max_tokens = max(ROWS_AT_ONCE // model.output.rows_per_token, int(lengths_S.max()))

    scored_sentences: list[list[ScoredWord]] = [[] for _ in sentences]
    with evaluating(model):
        for start, stop in pack_windows(lengths_S[longest_first_S], max_tokens):
            indices = longest_first_S[start:stop].tolist()
            batch = [encoded_sentences[index] for index in indices]
            for index, sentence, log_probs_T in zip(indices, batch, _log_probs(model, batch), strict=True):
                scored_sentences[index] = _scored_words(sentence, log_probs_T, vocabulary)
    return scored_sentences


class _EncodedSentence(NamedTuple):
    """A sentence as the model reads it, with one entry per scored token."""

    tokens: list[str]
    """The scored words or sub-words."""
    inputs: list[int]
    """The id before each scored token."""
    targets: list[int]
    """The id of each scored token."""


def _encode(words: list[str], vocabulary: Vocabulary) -> _EncodedSentence:
    """Encode a sentence. With <eos>, the words "a b" have the inputs <eos> a b and the targets a b <eos>."""
    ids = vocabulary.encode(words)
    inputs = vocabulary.encode_inputs(words)
    tokens: list[str] = []
    for word in words:
        tokens.extend(vocabulary.split_word(word))
    eos = vocabulary.eos
    if eos is not None:
        return _EncodedSentence([*tokens, vocabulary.words[eos]], [eos, *inputs], [*ids, eos])
    if len(ids) < 2:
        raise DataError("a sentence needs at least two words when the vocabulary has no <eos>")
    return _EncodedSentence(tokens[1:], inputs[:-1], ids[1:])


def _log_probs(model: LanguageModel, batch: Sequence[_EncodedSentence]) -> list[list[float]]:
    """Return the log-probabilities of the targets of each sentence, log_probs_BT, padding included.

    Shorter sentences are padded on the right, which does not affect the tokens before the padding.
    """
    device = next(model.parameters()).device
    longest = max(len(sentence.targets) for sentence in batch)

    def pad(ids: list[int], filler: int) -> list[int]:
        return ids + [filler] * (longest - len(ids))

    inputs_BT = torch.tensor([pad(sentence.inputs, 0) for sentence in batch], device=device)
    targets_BT = torch.tensor([pad(sentence.targets, IGNORE) for sentence in batch], device=device)
    log_probs_BT, _ = model.target_log_probs(inputs_BT, targets_BT)
    log_probs: list[list[float]] = log_probs_BT.tolist()
    return log_probs


def _scored_words(sentence: _EncodedSentence, log_probs_T: list[float], vocabulary: Vocabulary) -> list[ScoredWord]:
    """Return the words of a sentence with their log-probabilities."""
    words = []
    # The log-probabilities also cover the padding, which comes last.
    for token, log_prob, target in zip(sentence.tokens, log_probs_T, sentence.targets, strict=False):
        words.append(ScoredWord(token, log_prob, unknown=target == vocabulary.unk))
    return words
