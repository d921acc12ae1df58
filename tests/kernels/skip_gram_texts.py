"""Small texts for skip-gram: words that fall in topics, so that there is something to learn, and how well it was."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reefknot.kernels.skip_gram import Rates
from reefknot.kernels.skip_gram_draws import Draws

EOS, UNKNOWN = 0, 1
FIRST = 2
"""The ids before it are no words."""


def text(words: int, topics: int = 4, vocabulary: int = 40, seed: int = 0) -> NDArray[np.int32]:
    """Lines of 2 to 30 words of one topic each, by Zipf's law; word w belongs to topic w mod `topics`."""
    draw = np.random.default_rng(seed)
    ids: list[int] = []
    each = (vocabulary - FIRST) // topics
    shares = 1.0 / np.arange(1, each + 1)
    while len(ids) < words:
        topic = draw.integers(topics)
        ranks = draw.choice(each, size=draw.integers(2, 31), p=shares / shares.sum())
        line = FIRST + topics * ranks + topic
        ids += [UNKNOWN if draw.random() < 0.02 else int(word) for word in line] + [EOS]
    return np.array(ids[:words], np.int32)


def draws_of(ids: NDArray[np.int32], vocabulary: int = 40, **settings: float) -> Draws:
    counts = np.bincount(ids, minlength=vocabulary)
    given = {"window": 3, "negatives": 4, "power": 0.75, "sample": 1e-2, "seed": 7} | settings
    return Draws.of(counts, eos=EOS, unknown=UNKNOWN, **given)  # type: ignore[arg-type]


def tables(
    tied: bool, vocabulary: int = 40, dim: int = 12, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Of some size already, so that the sigmoid is not everywhere a half."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64).to(dtype)
    return first, first if tied else torch.randn(vocabulary, dim, generator=generator, dtype=torch.float64).to(dtype)


def rates_of(ids: NDArray[np.int32], first: float = 0.05) -> Rates:
    return Rates(first, 1e-3, len(ids))


def topic_score(vectors_VD: Tensor, topics: int = 4) -> float:
    """How often the nearest word is one of the same topic."""
    unit = torch.nn.functional.normalize(vectors_VD[FIRST:], dim=1)
    unit = torch.nn.functional.normalize(unit - unit.mean(0), dim=1)
    near = (unit @ unit.T).fill_diagonal_(-2.0).argmax(1)
    words = torch.arange(len(unit))
    return float((near % topics == words % topics).double().mean())
