"""When training logs, validates, saves and ends, and how much time is left."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from reefknot.lab.text.streams import Streams
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.state import Progress
from reefknot.lab.training.timetable import SessionClock, Timetable

BASE: dict[str, Any] = {
    "batch": 1,
    "steps": 2,
    "optimiser": {"kind": "sgd", "learning_rate": 1.0},
    "schedule": {"kind": "constant"},
    "log_every": 4,
    "save_every": 3,
}
WINDOWS = 5


def timetable(**settings: object) -> Timetable:
    return Timetable(
        TrainingSettings.model_validate(BASE | settings), Streams(np.arange(2 * WINDOWS + 1, dtype=np.int32), 1, 2)
    )


def due_updates(table: Timetable) -> dict[str, list[int]]:
    """Return the updates after which each event is due, until training ends."""
    updates: dict[str, list[int]] = {
        "epoch_ends": [],
        "training_ends": [],
        "log": [],
        "validation": [],
        "checkpoint": [],
    }
    progress = Progress()
    while not table.is_finished(progress):
        progress.step += 1
        progress.window += 1
        due = table.due_actions(progress)
        for name, steps in updates.items():
            steps += [progress.step] if getattr(due, name) else []
        if due.epoch_ends:
            progress.epoch, progress.window = progress.epoch + 1, 0
    return updates


def test_events_are_due_at_epochs_and_intervals() -> None:
    assert due_updates(timetable(epochs=2)) == {
        "epoch_ends": [5, 10],
        "training_ends": [10],
        "log": [4, 5, 8, 10],
        "validation": [5, 10],
        "checkpoint": [3, 5, 6, 9, 10],
    }


def test_training_in_updates_may_end_in_mid_epoch() -> None:
    assert due_updates(timetable(updates=7)) == {
        "epoch_ends": [5],
        "training_ends": [7],
        "log": [4, 5, 7],
        "validation": [5, 7],
        "checkpoint": [3, 5, 6, 7],
    }


@pytest.mark.parametrize("length", [{"epochs": 2}, {"updates": 10}])
def test_validations_may_be_due_between_epochs(length: dict[str, int]) -> None:
    updates = due_updates(timetable(validate_every=4, **length))
    assert updates["validation"] == [4, 8, 10]
    assert updates["checkpoint"] == [3, 4, 6, 8, 9, 10]


def test_early_stop_finishes_training() -> None:
    assert not timetable(updates=7).is_finished(Progress(step=6))
    assert timetable(updates=7).is_finished(Progress(step=6, stopped="enough"))


def test_position_and_share_count_epochs_or_updates() -> None:
    progress = Progress(step=1007, epoch=2, window=2)
    assert timetable(epochs=40).format_position_of_total(progress) == "epoch 2/40"
    assert timetable(updates=286_000).format_position_of_total(progress) == "update 1,007/286,000"
    assert timetable(epochs=40).epochs_done(progress) == 1.4
    assert timetable(epochs=40).epochs_done(Progress(epoch=2, window=WINDOWS)) == 2
    assert timetable(epochs=4).fraction_done(progress) == 0.35
    assert timetable(updates=2014).fraction_done(progress) == 0.5


def test_time_left_includes_validation_and_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1100.0)
    # The second tenth of training took a hundred seconds, and eight tenths are left.
    assert SessionClock(1000.0, fraction_before=0.1, tokens_before=0, seconds_before=0.0).seconds_left(
        0.2
    ) == pytest.approx(800.0)


def test_speed_is_that_of_this_session() -> None:
    clock = SessionClock(0.0, fraction_before=0.5, tokens_before=1_000, seconds_before=100.0)
    assert clock.speed(Progress(tokens=1_600, seconds=103.0)) == pytest.approx(200.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "neither epochs nor updates is set"),
        ({"epochs": 2, "updates": 7}, "epochs = 2 and updates = 7: only one of them"),
        (
            {"epochs": 2, "batching": "blocks", "random_steps": {}},
            'no meaning with batching = "blocks"',
        ),
        (
            {"epochs": 2, "batching": "sentences", "divisor": "batch"},
            'divisor = "batch" counts streams or pairs, .* use "tokens"',
        ),
        ({"epochs": 2, "batching": "pairs", "random_steps": {}}, 'no meaning with batching = "pairs"'),
        ({"epochs": 2, "batch": 4, "accumulate": 3}, "accumulate = 3 does not divide batch = 4"),
    ],
)
def test_contradictory_settings_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        timetable(**settings)


@pytest.mark.parametrize("batching", ["blocks", "sentences", "pairs"])
def test_samples_may_be_split_into_unequal_micro_batches(batching: str) -> None:
    assert timetable(epochs=2, batching=batching, batch=4, accumulate=3).settings.accumulate == 3
