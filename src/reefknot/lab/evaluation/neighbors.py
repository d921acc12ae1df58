"""Nearest neighbours of words, by the cosine of their vectors in a table or classifier.

Start with `nearest_words` if you have `WordVectors`, or with `nearest_neighbors` for a tensor and a vocabulary:

    nearest_words(vectors, ["king"], k=2)    # {"king": (("queen", 0.71), ("prince", 0.65))}

`select_examples` chooses the example words of results and pictures.

Shapes: W query words, V words of the vocabulary, S = V + number of words in `Vocabulary.spelled_words`, K neighbours, D
dimension.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.lab.runs.result import NearestWords
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.nn.constants import END_OF_WORD
from reefknot.vectors.word_vectors import WordVectors

NUM_EXAMPLES = 8
"""Number of example words in results and pictures."""


@torch.no_grad()
def nearest_neighbors(vectors_SD: Tensor, vocabulary: Vocabulary, words: list[str], k: int) -> NearestWords:
    """Return, for each word, the k other words of the vocabulary with the largest cosine, best first.

    An input end that reads the characters of words also has vectors for words outside the vocabulary
    (`Vocabulary.spelled_words`). These words have neighbours but are never neighbours of other words.
    """
    ids_W = torch.tensor([vocabulary.id_of(word) for word in words], dtype=torch.long, device=vectors_SD.device)
    unit_SD = F.normalize(vectors_SD.float(), dim=-1)
    cosines_WK, neighbor_ids_WK = nearest_ids(unit_SD, ids_W, len(vocabulary), k)
    return _name_neighbors(words, vocabulary.words, cosines_WK, neighbor_ids_WK)


def nearest_words(vectors: WordVectors, words: list[str], k: int) -> NearestWords:
    """Return, for each word, the k other words with the largest cosine in a table of word vectors, best first."""
    ids_W = torch.tensor([vectors.id_of(word) for word in words], dtype=torch.long)
    cosines_WK, neighbor_ids_WK = nearest_ids(torch.from_numpy(vectors.unit_VD), ids_W, len(vectors), k)
    return _name_neighbors(words, vectors.words, cosines_WK, neighbor_ids_WK)


def _name_neighbors(
    words: list[str], all_words: tuple[str, ...], cosines_WK: Tensor, neighbor_ids_WK: Tensor
) -> NearestWords:
    """Return the neighbours of each word with their cosines. The word itself, whose cosine is -inf, is left out."""
    neighbors: NearestWords = {}
    for word, ids_K, cosines_K in zip(words, neighbor_ids_WK.tolist(), cosines_WK.tolist(), strict=True):
        named_neighbors = []
        for neighbor_id, cosine in zip(ids_K, cosines_K, strict=True):
            if cosine > -torch.inf:
                named_neighbors.append((all_words[neighbor_id], round(cosine, 4)))
        neighbors[word] = tuple(named_neighbors)
    return neighbors


def nearest_ids(unit_SD: Tensor, ids_W: Tensor, classes: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the cosines cosines_WK and the ids neighbor_ids_WK of the k nearest neighbours of each word, best first.

    Neighbours are among the first `classes` vectors. The cosine of a word with itself is set to minus infinity, so the
    word itself comes last.
    """
    unit_VD = unit_SD[:classes]
    is_self_WV = ids_W[:, None] == torch.arange(len(unit_VD), device=unit_SD.device)
    cosines_WV = unit_SD[ids_W] @ unit_VD.T
    cosines_WV = cosines_WV.masked_fill(is_self_WV, -torch.inf)
    cosines_WK, neighbor_ids_WK = cosines_WV.topk(min(k, classes), dim=-1)
    return cosines_WK, neighbor_ids_WK


def select_examples(vocabulary: Vocabulary, count: int = NUM_EXAMPLES) -> list[str]:
    """Select example words that consist of letters, are frequent enough, and are spread over the frequency ranks."""
    candidates = []
    for word, count_in_training in zip(vocabulary.words, vocabulary.counts, strict=True):
        letters = word.removesuffix(END_OF_WORD)
        is_plain_word = len(letters) > 3 and letters.isalpha() and vocabulary.ends_word(word)
        if count_in_training >= 20 and is_plain_word:
            candidates.append(word)
    if len(candidates) <= count:
        return candidates
    first_rank = min(8, len(candidates) - count)  # the most frequent words are not informative
    last_rank = len(candidates) - 1
    ranks = np.unique(np.geomspace(first_rank, last_rank, count).astype(int))
    return [candidates[rank] for rank in ranks]
