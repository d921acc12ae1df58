"""Log-probability of given sentences, token by token; each sentence starts afresh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reefknot.errors import DataError
from reefknot.models.language_model import LanguageModel, evaluating
from reefknot.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class ScoredWord:
    word: str
    """Or a piece of one."""
    log_prob: float
    unknown: bool
    """The word was scored as <unk>."""


@torch.no_grad()
def score_sentence(model: LanguageModel, words: list[str], vocabulary: Vocabulary) -> list[ScoredWord]:
    """Score one sentence. With <eos> in the vocabulary it stands before the first word and is scored after the last."""
    ids, inputs = vocabulary.encode(words), vocabulary.encode_inputs(words)
    shown = [token for word in words for token in vocabulary.cut(word)]
    if vocabulary.eos is not None:
        ids, inputs = [*ids, vocabulary.eos], [vocabulary.eos, *inputs]
        shown.append(vocabulary.words[vocabulary.eos])
    else:
        ids, inputs, shown = ids[1:], inputs[:-1], shown[1:]
    if not ids:
        raise DataError("a sentence needs at least two words when the vocabulary has no <eos>")
    device = next(model.parameters()).device
    x_BT, y_BT = torch.tensor([[inputs], [ids]], device=device)
    with evaluating(model):
        logp_BT, _ = model.target_log_probs(x_BT, y_BT)
    return [
        ScoredWord(word, value, token == vocabulary.unk)
        for word, value, token in zip(shown, logp_BT[0].tolist(), ids, strict=True)
    ]
