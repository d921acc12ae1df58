"""Nearest neighbours of words, by the cosine of the vectors of a table or classifier.

Shapes: W query words, V words of the vocabulary, S = V + number of words in `Vocabulary.spelled`, K neighbours, D
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


@torch.no_grad()
def nearest(vectors_SD: Tensor, vocabulary: Vocabulary, words: list[str], k: int) -> NearestWords:
    """Return, for each word, the k other words of the vocabulary with the largest cosine, best first.

    An input end may have additional vectors, for the words of `Vocabulary.spelled`. These words have neighbours but are
    never neighbours of other words.
    """
    ids_W = torch.tensor([vocabulary.id_of(word) for word in words], dtype=torch.long, device=vectors_SD.device)
    near = nearest_ids(F.normalize(vectors_SD.float(), dim=-1), ids_W, len(vocabulary), k)
    return _named(words, vocabulary.words, *near)


def nearest_words(vectors: WordVectors, words: list[str], k: int) -> NearestWords:
    """Return, for each word, the k other words with the largest cosine in a table of word vectors, best first."""
    ids_W = torch.tensor([vectors.id_of(word) for word in words], dtype=torch.long)
    return _named(words, vectors.words, *nearest_ids(torch.from_numpy(vectors.unit_VD), ids_W, len(vectors), k))


def _named(words: list[str], known: tuple[str, ...], values_WK: Tensor, near_WK: Tensor) -> NearestWords:
    return {
        word: tuple(
            (known[index], round(cosine, 4))
            for index, cosine in zip(row.tolist(), cosines.tolist(), strict=True)
            if cosine > -torch.inf
        )
        for word, row, cosines in zip(words, near_WK, values_WK, strict=True)
    }


def nearest_ids(unit_SD: Tensor, ids_W: Tensor, classes: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and ids of the k nearest neighbours among the first `classes` vectors.

    The cosine of a word with itself is set to minus infinity, so the word itself comes last.
    """
    unit_VD = unit_SD[:classes]
    is_self_WV = ids_W[:, None] == torch.arange(len(unit_VD), device=unit_SD.device)
    cosines_WV = (unit_SD[ids_W] @ unit_VD.T).masked_fill(is_self_WV, -torch.inf)
    values, near = cosines_WV.topk(min(k, classes), dim=-1)
    return values, near


EXAMPLES = 8
"""Number of example words in results and pictures."""


def examples(vocabulary: Vocabulary, count: int = EXAMPLES) -> list[str]:
    """Select example words that consist of letters, are frequent enough, and are spread over the frequency ranks."""
    usable = [
        word
        for word, seen in zip(vocabulary.words, vocabulary.counts, strict=True)
        if seen >= 20
        and len(text := word.removesuffix(END_OF_WORD)) > 3
        and text.isalpha()
        and vocabulary.ends_word(word)
    ]
    if len(usable) <= count:
        return usable
    first = min(8, len(usable) - count)  # the most frequent words are not informative
    ranks = np.unique(np.geomspace(first, len(usable) - 1, count).astype(int))
    return [usable[rank] for rank in ranks]
