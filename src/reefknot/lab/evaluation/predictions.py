"""Predictions of the next word (Inan et al. 2017, section 6.4 and Table 4).

`predict` returns the most probable words after a phrase, and the probabilities of a few frequent words that are safe
guesses. `tendency` returns the mean probability over a text of these frequent words, and of the neighbours of the
target, which the augmented loss is meant to favour.

Shapes: N contexts, D hidden dimension, V classes, W watched words, K neighbours of a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.contexts import contexts, inputs_and_targets
from reefknot.lab.evaluation.generation import prompt_ids
from reefknot.lab.evaluation.neighbors import nearest_ids
from reefknot.lab.evaluation.windows import Windows
from reefknot.lab.text.dataset import Split
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.constants import UNKNOWN
from reefknot.nn.models.language_model import LanguageModel, evaluating

WATCHED = (UNKNOWN, "a", "an", "the")
"""The words whose probabilities Inan et al. report. They are safe guesses, because they are very frequent."""
SCORES_AT_ONCE = 2**24
"""Number of scores in memory at once. It bounds the memory and does not change the result."""


@dataclass(frozen=True)
class Prediction:
    """Predictions of the word after a phrase."""

    words: list[tuple[str, float]]
    """Words or sub-words with their probabilities, best first."""
    watched: dict[str, float]
    """Probabilities of the words of `WATCHED` that are in the vocabulary."""


@dataclass(frozen=True)
class Tendency:
    """Mean probabilities over the contexts of a text."""

    contexts: int
    target: float
    """Mean probability of the target."""
    neighbors: float
    """Mean total probability of the `k` words nearest to the target, by the cosine of the vectors of the input end."""
    k: int
    watched: dict[str, float]
    """Mean probabilities of the words of `WATCHED` that are in the vocabulary."""


@torch.no_grad()
def predict(model: LanguageModel, words: list[str], vocabulary: Vocabulary, k: int = 10) -> Prediction:
    """Return the k most probable words after a phrase that begins a line, or all words if there are fewer than k."""
    device = next(model.parameters()).device
    watched = watched_ids(vocabulary)
    with evaluating(model):
        h_1D = model(torch.tensor([prompt_ids(words, vocabulary)], device=device)).output[:, -1]
        logp_1K, ids_1K = model.output.topk(h_1D, min(k, model.output.vocab_size))
        ids_W = torch.tensor(list(watched.values()), dtype=torch.long, device=device)
        logp_W = model.output.target_log_probs(h_1D.expand(len(ids_W), -1), ids_W)
    best = zip(ids_1K[0].tolist(), logp_1K[0].exp().tolist(), strict=True)
    return Prediction(
        [(vocabulary.words[index], value) for index, value in best],
        dict(zip(watched, logp_W.exp().tolist(), strict=True)),
    )


def watched_ids(vocabulary: Vocabulary, words: Sequence[str] = WATCHED) -> dict[str, int]:
    """Return the ids of the words that are single tokens of the vocabulary."""
    cuts = {word: vocabulary.encode([word]) for word in words if word in vocabulary}
    return {word: ids[0] for word, ids in cuts.items() if len(ids) == 1}


@torch.no_grad()
def tendency(
    model: LanguageModel, split: Split, vocabulary: Vocabulary, k: int = 10, windows: Windows | None = None
) -> Tendency:
    """Return mean probabilities over all contexts of a text, which is read as one stream or in evaluation windows.

    The first token of the text is not a target.
    """
    classes = model.output.vocab_size
    if not 1 <= k < classes:
        raise SettingsError(
            f"neighbours: cannot take {k:,} of {classes - 1:,} other words; choose from 1 to {classes - 1:,}"
        )
    watched = watched_ids(vocabulary)
    device = next(model.parameters()).device
    ids_W = torch.tensor(list(watched.values()), dtype=torch.long, device=device)
    rows = max(1, SCORES_AT_ONCE // (model.output.rows_per_token * classes))
    x_T, y_T = inputs_and_targets(split)
    spans = windows.spans(y_T, vocabulary.eos) if windows else None
    y_T = y_T.to(device)
    target = torch.zeros((), dtype=torch.float64, device=device)
    near, total_W = torch.zeros_like(target), torch.zeros(len(ids_W), dtype=torch.float64, device=device)
    with evaluating(model):
        near_VK = _neighbors(model.input.vectors(), classes, k)
        for chunk in contexts(model, x_T, spans):
            pairs = zip(torch.split(chunk.output, rows), torch.split(chunk.position, rows), strict=True)
            for h_ND, position_N in pairs:
                p_NV, y_N = model.output.log_probs(h_ND).exp(), y_T[position_N]
                target += p_NV.gather(1, y_N[:, None]).sum(dtype=torch.float64)
                near += p_NV.gather(1, near_VK[y_N]).sum(dtype=torch.float64)
                total_W += p_NV[:, ids_W].sum(0, dtype=torch.float64)
    count = len(y_T)
    means = (total_W / count).tolist()
    return Tendency(count, float(target) / count, float(near) / count, k, dict(zip(watched, means, strict=True)))


def _neighbors(vectors_SD: Tensor, classes: int, k: int) -> Tensor:
    """Return the ids of the k nearest classes of each class, near_VK, computed in chunks that bound the memory."""
    unit_SD = F.normalize(vectors_SD.float(), dim=-1)
    ids_V = torch.arange(classes, device=unit_SD.device)
    rows = max(1, SCORES_AT_ONCE // classes)
    return torch.cat([nearest_ids(unit_SD, ids_W, classes, k)[1] for ids_W in torch.split(ids_V, rows)])
