"""Figure 2 of Inan et al.: curves over seeds, a panel per size."""

from __future__ import annotations

from typing import Any

import pytest

from reefknot.errors import DataError
from reefknot.figures.curves import Progress

from .conftest import Write

RECIPE = "inan2017/table1"


def settings(units: int, *, tied: bool = False, augmented: bool = False) -> dict[str, Any]:
    labels = {"kind": "plain", "table": "words" if tied else "classes"}
    return {
        "input": {"table": "words"},
        "encoder": {"hidden_dim": units},
        "output": {"kind": "augmented" if augmented else "softmax", "labels": labels},
    }


def test_a_curve_is_the_mean_over_seeds_after_each_epoch(write: Write) -> None:
    runs = [write(RECIPE, "VD large", seed, settings=settings(1500), curve=[700, 100 + seed, 90]) for seed in (0, 2)]
    (curve,) = Progress().measure(runs)["curves"]
    assert (curve["method"], curve["size"], curve["seeds"], curve["epochs"]) == ("VD", 1500, [0, 2], [1, 2])
    assert [point["mean"] for point in curve["perplexity"]] == [101, 90]
    assert curve["perplexity"][0]["low"] < 100
    assert curve["perplexity"][1]["low"] == curve["perplexity"][1]["high"] == 90


def test_methods_are_told_by_their_settings(write: Write) -> None:
    kinds = {"VD": (False, False), "VD+AL": (False, True), "VD+RE": (True, False), "VD+REAL": (True, True)}
    for wanted, (tied, augmented) in kinds.items():
        run = write(RECIPE, wanted, settings=settings(200, tied=tied, augmented=augmented), curve=[9, 8])
        assert Progress().measure([run])["curves"][0]["method"] == wanted


def test_the_picture_has_a_panel_for_each_size(write: Write) -> None:
    runs = [write(RECIPE, f"{n}", settings=settings(n), curve=[400, *range(120, 90, -1)]) for n in (1500, 200)]
    measured = Progress().measure(runs)
    drawing = Progress().draw(measured)
    assert [text in drawing.svg for text in ("200 units", "1500 units", "epoch", "VD")] == [True] * 4
    assert drawing.svg == Progress().draw(measured).svg
    assert drawing.png.startswith(b"\x89PNG")
    head, first, _ = Progress().lines(measured)
    assert head.split() == ["row", "lowest", "epoch", "paper", "at", "a", "third", "epochs", "seeds"]
    assert first.split() == ["200", "91.0", "30", "110.0", "30", "1"]


def test_runs_without_epochs_are_refused(write: Write) -> None:
    with pytest.raises(DataError, match="logged no validation perplexity by epoch"):
        Progress().measure([write(RECIPE, "VD", curve=[100])])
