"""Rates by epoch, as the papers print them, and as the loop applies them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.parts import SCHEDULES
from reefknot.recipe import load_recipe
from reefknot.training.schedules import Constant, Decay


def test_press_halves_the_rate_after_five_epochs() -> None:
    training = load_recipe("press2017/table6").experiments["Small + WT"].training
    schedule = SCHEDULES.build(training.schedule, {})
    rates = [training.optimiser.model_dump()["learning_rate"] * schedule.factor(epoch) for epoch in range(1, 14)]
    assert rates == [1, 1, 1, 1, 1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_decay_from_the_first_epoch_on() -> None:
    assert [Decay(0, 0.8).factor(epoch) for epoch in (1, 2, 3)] == pytest.approx([0.8, 0.64, 0.512])


def test_constant() -> None:
    assert {Constant().factor(epoch) for epoch in range(1, 100)} == {1.0}


def test_the_loop_applies_them(tmp_path: Path, train: Any, metrics: Callable[[Path], list[dict[str, Any]]]) -> None:
    train(tmp_path / "run", "training.epochs=3", "training.optimiser.learning_rate=0.5")
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert {(line["epoch"], line["learning_rate"]) for line in lines} == {(1, 0.5), (2, 0.25), (3, 0.125)}
