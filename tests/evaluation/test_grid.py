"""Settings tried in every combination: the best is found, told, and doubted where it lies at an edge."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.evaluation.grid import Point, Progress, beginning, search
from reefknot.evaluation.perplexity import score
from reefknot.models.language_model import LanguageModel
from reefknot.text.dataset import Dataset, Split

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]

SPLIT = Split("valid", np.zeros(1234, dtype=np.int32), words=1, lines=1, bytes=1, unknown=0)


def bowl(point: Point, progress: Progress) -> float:
    progress("", 0.5)
    return math.inf if point["a"] > 3 else (point["a"] - 2) ** 2 + point["b"]


def test_every_combination_once() -> None:
    told: list[tuple[str, float]] = []
    grid = search({"a": [1, 2, 3, 4], "b": [0.5, 0.25]}, bowl, SPLIT, lambda what, done: told.append((what, done)))
    assert grid.best == {"a": 2, "b": 0.25}
    assert grid.axes == {"a": [1, 2, 3, 4], "b": [0.5, 0.25]}
    assert grid.edges == ["b"]
    assert [done for _, done in told] == [step / 16 for step in range(1, 17)]
    assert {what for what, _ in told} == {"trying 8 settings on the valid text"}
    record = grid.record()
    assert record["points"][0] == {"a": 1, "b": 0.5, "nll": 1.5}
    assert record["points"][-1] == {"a": 4, "b": 0.25, "nll": None}


def test_table() -> None:
    grid = search({"a": [1, 2, 3], "b": [0.25, 0.5]}, bowl, SPLIT)
    assert grid.table().splitlines() == [
        "perplexity of the valid text, 1,234 tokens (* the best)",
        "a  b 0.25  b 0.5",
        "1   3.49   4.48",
        "2   1.28*  1.65",
        "3   3.49   4.48",
        "the best values tried (b 0.25) lie at the edge of the grid; there may be better beyond it",
    ]


def test_a_perplexity_without_end_is_short() -> None:
    grid = search({"a": [1, 2]}, lambda point, progress: 1e3 * point["a"] - 1e3, SPLIT)
    assert grid.table().splitlines()[2] == "1.00*  1.0e+304"


def test_one_axis_fits_a_table_too() -> None:
    grid = search({"a": [2]}, lambda point, progress: 0.0, SPLIT)
    assert grid.table().splitlines()[1:] == ["  a 2", "1.00*"]
    assert grid.edges == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_but_bad_points(bad: float) -> None:
    with pytest.raises(NonFiniteError, match="none of 2 settings gives the valid text a loss that is a number"):
        search({"a": [1, 2]}, lambda point, progress: bad, SPLIT)


def test_the_beginning_of_a_text(opened: Open, model_for: Build) -> None:
    dataset = opened()
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    half = beginning(split, split.tokens // 2, vocabulary)
    assert half.ids.tolist() == split.ids[: split.tokens // 2].tolist()
    assert half.unknown == sum(half.ids == vocabulary.unk) > 0
    assert half.bytes == pytest.approx(split.bytes / 2, abs=1)
    model = model_for(len(vocabulary))
    whole = score(model, split, vocabulary)
    np.testing.assert_allclose(score(model, half, vocabulary).nll, whole.nll[: len(half.ids)], atol=1e-6)
    assert beginning(split, None, vocabulary) is beginning(split, split.tokens, vocabulary) is split
    with pytest.raises(SettingsError, match="the first 0 tokens"):
        beginning(split, 0, vocabulary)


def test_spellings_are_cut_too(opened: Open) -> None:
    dataset = opened(keep_spellings=True)
    split = dataset.splits["test"]
    cut = beginning(split, 7, dataset.vocabulary)
    assert cut.inputs.tolist() == split.inputs[:7].tolist()
    assert cut.inputs.tolist() != cut.ids.tolist()
