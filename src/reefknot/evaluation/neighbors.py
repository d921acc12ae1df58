"""Nearest neighbours of a word, by the cosine of vectors from a table or from the labels."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reefknot.text.symbols import END_OF_WORD
from reefknot.text.vocabulary import Vocabulary

Neighbors = dict[str, list[tuple[str, float]]]


@torch.no_grad()
def nearest(vectors_VD: Tensor, vocabulary: Vocabulary, words: list[str], k: int) -> Neighbors:
    """For each word, the k other words with the largest cosine, best first."""
    unit_VD = F.normalize(vectors_VD.float(), dim=-1)
    ids = torch.tensor([vocabulary.id_of(word) for word in words], dtype=torch.long, device=unit_VD.device)
    cosines = unit_VD[ids] @ unit_VD.T
    cosines.scatter_(1, ids[:, None], -2.0)
    values, near = cosines.topk(min(k, len(vocabulary) - 1), dim=-1)
    return {
        word: [(vocabulary.words[i], round(v, 4)) for i, v in zip(row.tolist(), cos.tolist(), strict=True)]
        for word, row, cos in zip(words, near, values, strict=True)
    }


def examples(vocabulary: Vocabulary, count: int) -> list[str]:
    """Ordinary words to show: letters only, common enough to have been learned, spread over the ranks."""
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
    first = min(8, len(usable) - count)  # the very commonest say little
    ranks = np.unique(np.geomspace(first, len(usable) - 1, count).astype(int))
    return [usable[rank] for rank in ranks]
