"""Predict the next word after a phrase or in a text (Inan et al. 2017, section 6.4 and Table 4).

`predict` returns the most probable words after a phrase:

    predict(model, ["the", "white"], vocabulary, k=3).words    # [("house", 0.6), ("paper", 0.1), ("<unk>", 0.05)]

It also returns the probabilities of the watched words, a few frequent words that are safe guesses. `measure_tendency`
returns the mean probability over a text of the watched words, and of the neighbours of the target, which the augmented
loss is meant to favour. A context is the text before a token.

Shapes: N contexts, D hidden dimension, V classes, W watched words, K best words or neighbours, S vectors of the input
end, T tokens of the text.
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
    """Number of contexts."""
    target: float
    """Mean probability of the target."""
    neighbors: float
    """Mean total probability of the `k` words nearest to the target, by the cosine of the vectors of the input end."""
    k: int
    """Number of neighbours."""
    watched: dict[str, float]
    """Mean probabilities of the words of `WATCHED` that are in the vocabulary."""


@torch.no_grad()
def predict(model: LanguageModel, words: list[str], vocabulary: Vocabulary, k: int = 10) -> Prediction:
    """Return the k most probable words after a phrase that begins a line, or all words if there are fewer than k."""
    device = next(model.parameters()).device
    id_of_watched = watched_ids(vocabulary)
    ids_W = torch.tensor(list(id_of_watched.values()), dtype=torch.long, device=device)
    inputs_1T = torch.tensor([encode_prompt(words, vocabulary)], device=device)
    with evaluating(model):
        hidden_1D = model(inputs_1T).output[:, -1]
        log_probs_1K, ids_1K = model.output.topk(hidden_1D, min(k, model.output.vocab_size))
        log_probs_W = model.output.target_log_probs(hidden_1D.expand(len(ids_W), -1), ids_W)

    best_words = [vocabulary.words[word_id] for word_id in ids_1K[0].tolist()]
    best_probs = log_probs_1K[0].exp().tolist()
    watched_probs = log_probs_W.exp().tolist()
    return Prediction(
        words=list(zip(best_words, best_probs, strict=True)),
        watched=dict(zip(id_of_watched, watched_probs, strict=True)),
    )


def watched_ids(vocabulary: Vocabulary, words: Sequence[str] = WATCHED) -> dict[str, int]:
    """Return the ids of the words that are single tokens of the vocabulary, by word."""
    id_of_word = {}
    for word in words:
        if word in vocabulary:
            ids = vocabulary.encode([word])
            if len(ids) == 1:
                id_of_word[word] = ids[0]
    return id_of_word


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
    device = next(model.parameters()).device
    id_of_watched = watched_ids(vocabulary)
    ids_W = torch.tensor(list(id_of_watched.values()), dtype=torch.long, device=device)
    inputs_T, targets_T = inputs_and_targets(split)
    spans = windows.spans(targets_T, vocabulary.eos) if windows else None
    targets_T = targets_T.to(device)

    # Add up the probabilities over all contexts, in chunks that bound the memory.
    chunk_size = max(1, SCORES_AT_ONCE // (model.output.rows_per_token * classes))
    target_sum = torch.zeros((), dtype=torch.float64, device=device)
    neighbor_sum = torch.zeros_like(target_sum)
    watched_sum_W = torch.zeros(len(ids_W), dtype=torch.float64, device=device)
    with evaluating(model):
        neighbors_VK = _neighbor_ids(model.input.vectors(), classes, k)
        for contexts in iterate_contexts(model, inputs_T, spans):
            hidden_chunks = torch.split(contexts.output, chunk_size)
            position_chunks = torch.split(contexts.positions, chunk_size)
            for hidden_ND, positions_N in zip(hidden_chunks, position_chunks, strict=True):
                probs_NV = model.output.log_probs(hidden_ND).exp()
                targets_N = targets_T[positions_N]
                target_sum += probs_NV.gather(1, targets_N[:, None]).sum(dtype=torch.float64)
                neighbor_sum += probs_NV.gather(1, neighbors_VK[targets_N]).sum(dtype=torch.float64)
                watched_sum_W += probs_NV[:, ids_W].sum(0, dtype=torch.float64)

    num_contexts = len(targets_T)
    watched_means = (watched_sum_W / num_contexts).tolist()
    return Tendency(
        contexts=num_contexts,
        target=float(target_sum) / num_contexts,
        neighbors=float(neighbor_sum) / num_contexts,
        k=k,
        watched=dict(zip(id_of_watched, watched_means, strict=True)),
    )


def _neighbor_ids(vectors_SD: Tensor, classes: int, k: int) -> Tensor:
    """Return the ids of the k nearest classes of each class, neighbors_VK, computed in chunks that bound the memory."""
    unit_SD = F.normalize(vectors_SD.float(), dim=-1)
    ids_V = torch.arange(classes, device=unit_SD.device)
    chunk_size = max(1, SCORES_AT_ONCE // classes)
    neighbor_chunks = []
    for query_ids in torch.split(ids_V, chunk_size):
        _, neighbor_ids = nearest_ids(unit_SD, query_ids, classes, k)
        neighbor_chunks.append(neighbor_ids)
    return torch.cat(neighbor_chunks)
