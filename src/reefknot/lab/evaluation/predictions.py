"""Predict the next word after a phrase or in a text (Inan et al. 2017, section 6.4 and Table 4).

`predict` returns the most probable words after a phrase, and the probabilities of a few frequent words that are safe
guesses. `measure_tendency` returns the mean probability over a text of these frequent words, and of the neighbours of
the target, which the augmented loss is meant to favour.

Shapes: N contexts, D hidden dimension, V classes, W watched words, K neighbours of a word, S vectors of the input end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.errors import SettingsError
from reefknot.lab.evaluation.contexts import inputs_and_targets, iterate_contexts
from reefknot.lab.evaluation.generation import encode_prompt
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
        hidden_1D = model(torch.tensor([encode_prompt(words, vocabulary)], device=device)).output[:, -1]
        logp_1K, ids_1K = model.output.topk(hidden_1D, min(k, model.output.vocab_size))
        ids_W = torch.tensor(list(watched.values()), dtype=torch.long, device=device)
        log_probs_W = model.output.target_log_probs(hidden_1D.expand(len(ids_W), -1), ids_W)
    best_ids = zip(ids_1K[0].tolist(), logp_1K[0].exp().tolist(), strict=True)
    best_words = [(vocabulary.words[index], probability) for index, probability in best_ids]
    return Prediction(best_words, dict(zip(watched, log_probs_W.exp().tolist(), strict=True)))


def watched_ids(vocabulary: Vocabulary, words: Sequence[str] = WATCHED) -> dict[str, int]:
    """Return the ids of the words that are single tokens of the vocabulary."""
    encoded_words = {word: vocabulary.encode([word]) for word in words if word in vocabulary}
    return {word: ids[0] for word, ids in encoded_words.items() if len(ids) == 1}


@torch.no_grad()
def measure_tendency(
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
    chunk_size = max(1, SCORES_AT_ONCE // (model.output.rows_per_token * classes))
    inputs_T, targets_T = inputs_and_targets(split)
    spans = windows.spans(targets_T, vocabulary.eos) if windows else None
    targets_T = targets_T.to(device)
    target_sum = torch.zeros((), dtype=torch.float64, device=device)
    neighbor_sum = torch.zeros_like(target_sum)
    watched_sum_W = torch.zeros(len(ids_W), dtype=torch.float64, device=device)
    with evaluating(model):
        neighbors_VK = _neighbor_ids(model.input.vectors(), classes, k)
        for chunk in iterate_contexts(model, inputs_T, spans):
            parts = zip(torch.split(chunk.output, chunk_size), torch.split(chunk.positions, chunk_size), strict=True)
            for hidden_ND, positions_N in parts:
                probs_NV, targets_N = model.output.log_probs(hidden_ND).exp(), targets_T[positions_N]
                target_sum += probs_NV.gather(1, targets_N[:, None]).sum(dtype=torch.float64)
                neighbor_sum += probs_NV.gather(1, neighbors_VK[targets_N]).sum(dtype=torch.float64)
                watched_sum_W += probs_NV[:, ids_W].sum(0, dtype=torch.float64)
    count = len(targets_T)
    watched_means = dict(zip(watched, (watched_sum_W / count).tolist(), strict=True))
    return Tendency(count, float(target_sum) / count, float(neighbor_sum) / count, k, watched_means)


def _neighbor_ids(vectors_SD: Tensor, classes: int, k: int) -> Tensor:
    """Return the ids of the k nearest classes of each class, neighbors_VK, computed in chunks that bound the memory."""
    unit_SD = F.normalize(vectors_SD.float(), dim=-1)
    ids_V = torch.arange(classes, device=unit_SD.device)
    chunk_size = max(1, SCORES_AT_ONCE // classes)
    return torch.cat([nearest_ids(unit_SD, ids_W, classes, k)[1] for ids_W in torch.split(ids_V, chunk_size)])
