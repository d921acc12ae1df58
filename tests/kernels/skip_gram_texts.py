"""Small texts for skip-gram with words that belong to topics, and a score of how well the topics are learned."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.kernels.skip_gram import RateSchedule
from reefknot.kernels.skip_gram_draws import PairSampler

EOS, UNKNOWN = 0, 1
FIRST = 2
"""The first id of a word; smaller ids are special tokens."""


def text(words: int, topics: int = 4, vocabulary: int = 40, seed: int = 0) -> NDArray[np.int32]:
    """Return lines of 2 to 30 words, with one topic per line and counts that follow Zipf's law.

    Word w has the topic w mod `topics`.
    """
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    words_per_topic = (vocabulary - FIRST) // topics
    shares = 1.0 / np.arange(1, words_per_topic + 1)
    while len(ids) < words:
        topic = generator.integers(topics)
        ranks = generator.choice(words_per_topic, size=generator.integers(2, 31), p=shares / shares.sum())
        line = FIRST + topics * ranks + topic
        ids += [UNKNOWN if generator.random() < 0.02 else int(word) for word in line] + [EOS]
    return np.array(ids[:words], np.int32)


def draws_of(ids: NDArray[np.int32], vocabulary: int = 40, **settings: float) -> PairSampler:
    """Return the random choices of skip-gram for a text, with small default settings."""
    counts = np.bincount(ids, minlength=vocabulary)
    arguments = {"window": 3, "negatives": 4, "power": 0.75, "sample": 1e-2, "seed": 7} | settings
    return PairSampler.from_counts(counts, eos=EOS, unknown=UNKNOWN, **arguments)  # type: ignore[arg-type]


def tables(
    tied: bool, vocabulary: int = 40, dim: int = 12, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return input and output vectors that are large enough for the sigmoid to differ from one half."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64).to(dtype)
    return first, first if tied else torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64).to(dtype)


def rates_of(ids: NDArray[np.int32], first: float = 0.05) -> RateSchedule:
    """Return a learning rate that falls from `first` over the text."""
    return RateSchedule(first, 1e-3, len(ids))


def topic_score(vectors_VD: Tensor, topics: int = 4) -> float:
    """Return the share of words whose nearest neighbour has the same topic."""
    unit = torch.nn.functional.normalize(vectors_VD[FIRST:], dim=1)
    unit = torch.nn.functional.normalize(unit - unit.mean(0), dim=1)
    nearest = (unit @ unit.T).fill_diagonal_(-2.0).argmax(1)
    words = torch.arange(len(unit))
    return float((nearest % topics == words % topics).double().mean())
