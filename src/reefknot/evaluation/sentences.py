"""Log-probability of given sentences, word by word; each sentence starts afresh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reefknot.errors import DataError
from reefknot.models.language_model import LanguageModel, evaluating
from reefknot.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class ScoredWord:
    word: str
    log_prob: float
    unknown: bool
    """The word was scored as <unk>."""


@torch.no_grad()
def score_sentence(model: LanguageModel, words: list[str], vocabulary: Vocabulary) -> list[ScoredWord]:
    """Score one sentence. With <eos> in the vocabulary it stands before the first word and is scored after the last."""
    ids = vocabulary.encode(words)
    shown = list(words)
    if vocabulary.eos is not None:
        ids = [vocabulary.eos, *ids, vocabulary.eos]
        shown.append(vocabulary.words[vocabulary.eos])
    else:
        shown = shown[1:]
    if len(ids) < 2:
        raise DataError("a sentence needs at least two words when the vocabulary has no <eos>")
    device = next(model.parameters()).device
    tokens = torch.tensor([ids], device=device)
    with evaluating(model):
        logp_BT, _ = model.target_log_probs(tokens[:, :-1], tokens[:, 1:])
    return [
        ScoredWord(word, value, token == vocabulary.unk)
        for word, value, token in zip(shown, logp_BT[0].tolist(), ids[1:], strict=True)
    ]
