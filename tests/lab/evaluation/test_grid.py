"""Grid search tries every combination, extends the grid at its edges, and reports a best value at an edge."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from reefknot.errors import NonFiniteError, SettingsError
from reefknot.lab.evaluation.grid import EXTENSIONS, Grid, Point, extend_axis, grid_search
from reefknot.lab.evaluation.perplexity import score
from reefknot.lab.text.dataset import Dataset, Split
from reefknot.lab.text.encoding import shorten_split
from reefknot.nn.models.language_model import LanguageModel
from reefknot.storage.progress import ProgressCallback

Open = Callable[..., Dataset]
Build = Callable[[int], LanguageModel]

SPLIT = Split("valid", np.zeros(1234, dtype=np.int32), words=1, lines=1, bytes=1, unknown=0)


def bowl(point: Point, progress: ProgressCallback) -> float:
    """A loss with its minimum at a = 2, b = 0.25."""
    progress("", 0.5)
    return math.inf if point["a"] > 3 else (point["a"] - 2) ** 2 + (point["b"] - 0.25) ** 2


def tried(grid: Grid, name: str) -> list[float]:
    """Return the values of one setting in the order in which they were tried."""
    return list(dict.fromkeys(point[name] for point, _ in grid.points))


def test_search_tries_every_combination_once() -> None:
    calls: list[tuple[str, float]] = []
    axes = {"a": [1, 2, 3, 4], "b": [0.5, 0.25, 0.125]}
    grid = grid_search(axes, bowl, SPLIT, lambda what, done: calls.append((what, done)))
    assert grid.best == {"a": 2, "b": 0.25}
    assert grid.axes == {"a": [1, 2, 3, 4], "b": [0.125, 0.25, 0.5]}
    assert len(grid.points) == 12
    assert grid.edges == []
    # Each point reports progress twice, relative to the largest possible number of points.
    assert [done for _, done in calls] == [*(step / 40 for step in range(1, 25)), 12 / 16, 1.0]
    assert {what for what, _ in calls} == {"trying 12 settings or more on the valid text"}
    record = grid.summary().record()
    assert record["points"][0] == {"a": 1, "b": 0.5, "nll": 1.0625}
    assert record["points"][-1] == {"a": 4, "b": 0.125, "nll": None}


def test_search_extends_until_the_best_is_inside_the_grid() -> None:
    """One setting is extended at a time, with the others at their best; fixed settings stay."""
    calls: list[float] = []

    def measure(point: Point, progress: ProgressCallback) -> float:
        progress("", 0.5)
        return abs(math.log2(point["up"]) - 4) + abs(math.log2(point["down"]) + 4) + point["fixed"]

    axes = {"up": [1.0, 2.0], "fixed": [3.0], "down": [4.0, 1.0]}
    grid = grid_search(axes, measure, SPLIT, lambda _, done: calls.append(done))
    assert [(point["up"], point["down"]) for point, _ in grid.points[4:]] == [
        *((up, 1.0) for up in (4.0, 8.0, 16.0, 32.0)),
        *((16.0, down) for down in (0.25, 0.0625, 0.01562)),
    ]
    assert grid.best == {"up": 16.0, "fixed": 3.0, "down": 0.0625}
    assert grid.edges == []
    assert len(grid.summary().record()["points"]) == 11
    assert calls == sorted(calls)
    assert calls[-1] == 1.0
    assert calls[-2] < 1.0


def test_search_stops_after_four_extensions() -> None:
    grid = grid_search({"a": [1, 2]}, lambda point, progress: 1 / point["a"], SPLIT)
    assert EXTENSIONS == 4
    assert tried(grid, "a") == [1, 2, 4, 8, 16, 32]
    assert grid.edges == ["a"]
    # If all values are equal, the first one tried is the best.
    flat = grid_search({"a": [1.0, 2.0]}, lambda point, progress: 0.0, SPLIT)
    assert (tried(flat, "a"), flat.best, flat.edges) == ([1.0, 2.0, 0.5], {"a": 1.0}, [])


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_divergence_ends_the_extension(loss: float) -> None:
    grid = grid_search({"a": [1, 2]}, lambda point, progress: loss if point["a"] > 6 else -point["a"], SPLIT)
    assert tried(grid, "a") == [1, 2, 4, 8]
    assert grid.best == {"a": 4}
    assert grid.summary().record()["points"][-1] == {"a": 8, "nll": None}


def test_extension_stays_within_the_bounds() -> None:
    grid = grid_search({"a": [0.2, 0.3]}, lambda point, progress: -point["a"], SPLIT, bounds={"a": (0, 1)})
    assert tried(grid, "a") == [0.2, 0.3, 0.45, 0.675]
    assert grid.edges == ["a"]


@pytest.mark.parametrize(
    ("values", "end", "bounds", "expected"),
    [
        ([100, 500, 2000], 100, None, [20, 4, 1]),
        ([100, 500, 2000], 100, (3, 9_000), [20, 4]),
        ([100, 500, 2000], 2000, (0, 32_000), [8000]),
        ([100, 500, 2000], 500, None, []),
        ([0.7, 1.0], 1.0, None, [1.429, 2.041, 2.916, 4.166]),
        ([2.0, 0.0, 1.0], 0.0, None, [-1.0, -2.0, -3.0, -4.0]),
        ([0.5], 0.5, None, []),
        ([0.5, 0.5], 0.5, None, []),
        ([1e100, 1e300], 1e300, None, []),
    ],
)
def test_further_values_beyond_an_edge(
    values: list[float], end: float, bounds: tuple[float, float] | None, expected: list[float]
) -> None:
    values_beyond = extend_axis(values, end, bounds)
    assert values_beyond == expected
    assert [type(value) for value in values_beyond] == [type(value) for value in expected]


def test_table_marks_the_best_value() -> None:
    grid = grid_search({"a": [1, 2, 3], "b": [0.125, 0.25, 0.5]}, bowl, SPLIT)
    assert grid.table().splitlines() == [
        "perplexity of the valid text, 1,234 tokens (* the best)",
        "a  b 0.125  b 0.25  b 0.5",
        "1    2.76    2.72   2.89",
        "2    1.02    1.00*  1.06",
        "3    2.76    2.72   2.89",
    ]


def test_table_shows_extended_rows_and_columns_in_order() -> None:
    """Points that were not tried are shown as a dash."""
    points = grid_search(
        {"a": [20_000, 10_000], "b": [0.25, 0.5]},
        lambda point, progress: abs(math.log2(point["a"] / 5_000)) - math.log2(point["b"]) / 16,
        SPLIT,
    ).points
    grid = Grid("the valid text, 1,234 tokens", points, note="windows left out")
    assert grid.table().splitlines() == [
        "perplexity of the valid text, 1,234 tokens (* the best)",
        "     a  b 0.25  b 0.5    b 1    b 2    b 4    b 8",
        " 2,500      -   2.89      -      -      -      -",
        " 5,000      -   1.06   1.00   0.94   0.88   0.83*",
        "10,000   3.08   2.89      -      -      -      -",
        "20,000   8.37   7.87      -      -      -      -",
        "the best values (b 8) are at the edge of the grid; there may be better values beyond it",
        "windows left out",
    ]
    assert grid.summary().record()["note"] == "windows left out"
    assert "note" not in Grid("", points).summary().record()


def test_huge_perplexity_is_abbreviated() -> None:
    grid = grid_search({"a": [1, 2, 3]}, lambda point, progress: 1e3 * abs(point["a"] - 2), SPLIT)
    assert grid.table().splitlines()[2] == ">1e304   1.00*  >1e304"


def test_table_of_one_axis() -> None:
    grid = grid_search({"a": [2]}, lambda point, progress: 0.0, SPLIT)
    assert grid.table().splitlines()[1:] == ["  a 2", "1.00*"]
    assert grid.edges == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_search_without_a_finite_loss_is_rejected(loss: float) -> None:
    with pytest.raises(NonFiniteError, match="the loss on the valid text is NaN or infinite at all 2 points"):
        grid_search({"a": [1, 2]}, lambda point, progress: loss, SPLIT)


def test_beginning_scores_like_the_start_of_the_text(opened: Open, model_for: Build) -> None:
    dataset = opened()
    split, vocabulary = dataset.splits["test"], dataset.vocabulary
    half = shorten_split(split, split.tokens // 2, vocabulary)
    assert half.ids.tolist() == split.ids[: split.tokens // 2].tolist()
    assert half.unknown == sum(half.ids == vocabulary.unk) > 0
    assert half.bytes == pytest.approx(split.bytes / 2, abs=1)
    model = model_for(len(vocabulary))
    whole = score(model, split, vocabulary)
    np.testing.assert_allclose(score(model, half, vocabulary).nll, whole.nll[: len(half.ids)], atol=1e-6)
    assert shorten_split(split, None, vocabulary) is shorten_split(split, split.tokens, vocabulary) is split
    with pytest.raises(SettingsError, match="the first 0 tokens"):
        shorten_split(split, 0, vocabulary)


def test_beginning_cuts_spellings_too(opened: Open) -> None:
    dataset = opened(keep_spellings=True)
    split = dataset.splits["test"]
    cut = shorten_split(split, 7, dataset.vocabulary)
    assert cut.inputs.tolist() == split.inputs[:7].tolist()
    assert cut.inputs.tolist() != cut.ids.tolist()
