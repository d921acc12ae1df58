"""Loss by frequency: bands that hold every token once and add up to the whole."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from reefknot.evaluation.frequency import EDGES, loss_by_frequency
from reefknot.evaluation.perplexity import Score, score
from reefknot.models.language_model import LanguageModel
from reefknot.text.dataset import Dataset, Split
from reefknot.text.vocabulary import Vocabulary


@pytest.mark.parametrize("end_of_line", [True, False])
def test_bands_add_up_to_the_whole(
    opened: Callable[..., Dataset], model_for: Callable[[int], LanguageModel], end_of_line: bool
) -> None:
    dataset = opened(end_of_line=end_of_line)
    found = score(model_for(len(dataset.vocabulary)), dataset.splits["test"], dataset.vocabulary)
    for bands in loss_by_frequency(found, dataset.splits["test"], dataset.vocabulary).values():
        assert sum(band["tokens"] for band in bands) == len(found.nll)
        total = sum(band["tokens"] * band["nll"] for band in bands)
        assert total == pytest.approx(float(found.nll.sum(dtype=np.float64)))
        assert [band["low"] for band in bands] == sorted(band["low"] for band in bands)


def test_bands_by_hand() -> None:
    vocabulary = Vocabulary(("<eos>", "often", "some", "rare", "<unk>"), (20_000, 1_000, 10, 9, 0))
    ids = np.array([1, 3, 4, 2, 0], dtype=np.int32)
    losses = np.array([1.0, 2.0, 4.0, 8.0, 16.0], dtype=np.float32)
    split = Split("test", ids, words=4, lines=1, bytes=20, unknown=1)
    found = loss_by_frequency(Score(losses, 0, 5, 20, ""), split, vocabulary)
    assert found["target"] == [
        {"low": 0, "high": 9, "tokens": 2, "types": 2, "nll": 3.0},
        {"low": 10, "high": 99, "tokens": 1, "types": 1, "nll": 8.0},
        {"low": 1_000, "high": 9_999, "tokens": 1, "types": 1, "nll": 1.0},
        {"low": 10_000, "high": None, "tokens": 1, "types": 1, "nll": 16.0},
    ]
    # <eos> stands before the first word; then every word before the next.
    previous = {band["low"]: (band["tokens"], band["nll"]) for band in found["previous"]}
    assert previous == {0: (2, 6.0), 10: (1, 16.0), 1_000: (1, 2.0), 10_000: (1, 1.0)}


def test_without_line_ends_the_first_token_is_only_a_previous_one() -> None:
    vocabulary = Vocabulary(("a", "b"), (500, 5))
    split = Split("test", np.array([1, 0, 0], dtype=np.int32), words=3, lines=1, bytes=6, unknown=0)
    found = loss_by_frequency(Score(np.array([1.0, 3.0], dtype=np.float32), 1, 2, 6, ""), split, vocabulary)
    assert [(band["low"], band["tokens"], band["nll"]) for band in found["target"]] == [(100, 2, 2.0)]
    assert [(band["low"], band["nll"]) for band in found["previous"]] == [(0, 1.0), (100, 3.0)]


def test_edges_rise_from_zero() -> None:
    assert EDGES[0] == 0
    assert list(EDGES) == sorted(set(EDGES))
