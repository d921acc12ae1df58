"""Early stopping: the rules agree with the code of the papers, and end a run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reefknot.errors import SettingsError, Stopped
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.training.averaging import StoppingSettings, is_nonmonotone, is_out_of_patience

LOSSES = st.lists(st.floats(1.0, 9.0), min_size=1, max_size=30)
PATIENCE = "training.stop={rule = 'patience', interval = 1}"


@given(LOSSES, st.integers(1, 6))
def test_nonmonotone_rule_agrees_with_the_authors_code(losses: list[float], interval: int) -> None:
    """The code stores each loss after it has compared it with all stored losses but the last `interval`."""
    stored: list[float] = []
    for current in losses:
        old = stored[: len(stored) - interval] if len(stored) > interval else []
        assert is_nonmonotone(stored, current, interval) == any(current > loss for loss in old)
        stored.append(current)


def test_nonmonotone_rule_ignores_the_last_validations() -> None:
    assert not is_nonmonotone([3.0, 2.0], 9.0, 2)  # too few validations
    assert not is_nonmonotone([3.0, 1.0, 1.0], 2.5, 2)  # worse than the last two, but not than the one before
    assert is_nonmonotone([3.0, 1.0, 1.0], 3.5, 2)
    assert not is_nonmonotone([3.0, 1.0, 1.0], 3.0, 2)  # an equal loss is not worse


def test_patience_counts_validations_without_a_new_best() -> None:
    falling = [5.0, 4.0, 3.0]
    assert not is_out_of_patience(falling, 2.0, 1)
    assert is_out_of_patience(falling, 3.0, 1)  # an equal loss is not a new best
    assert not is_out_of_patience(falling, 3.5, 2)
    assert is_out_of_patience([*falling, 3.5], 3.6, 2)
    assert not is_out_of_patience([], 1.0, 1)


def test_reason_to_stop_names_the_rule() -> None:
    losses = [2.0, 3.0, 3.0]
    assert "patience: no new best loss in 3 validations" in str(
        StoppingSettings(rule="patience", interval=3).reason_to_stop(losses, 2.5)
    )
    assert "non-monotone rule" in str(StoppingSettings(rule="nonmonotone", interval=2).reason_to_stop(losses, 2.5))
    assert StoppingSettings(rule="nonmonotone", interval=2).reason_to_stop(losses, 1.5) is None


def test_run_that_stops_early_is_finished(
    tmp_path: Path, train: Any, metrics: Any, display: Any, signal_in_step: Callable[[int], None]
) -> None:
    wild = ("training.epochs=40", "training.optimiser.learning_rate=8.0", PATIENCE)
    result = train(tmp_path / "run", *wild)
    valid = [line["nll"] for line in metrics(tmp_path / "run") if line["kind"] == "valid"]
    assert len(valid) < 40
    assert valid[-1] >= min(valid[:-1])
    assert all(later < earlier for earlier, later in pairwise(valid[:-1]))
    reason = f"stopped after epoch {len(valid)} by patience: no new best loss in 1 validations"
    assert result["training"]["stopped"] == reason
    assert any(reason in line for line in display.lines)
    assert train(tmp_path / "run", *wild) == result
    # A run that was stopped between the last checkpoint and the result does not train further.
    signal_in_step(result["training"]["steps"])
    with pytest.raises(Stopped):
        train(tmp_path / "again", *wild)
    assert train(tmp_path / "again", *wild)["training"]["stopped"] == reason


def test_run_to_the_last_epoch_has_no_reason_to_stop(tmp_path: Path, train: Any) -> None:
    assert train(tmp_path / "run", "training.stop={rule = 'nonmonotone'}")["training"]["stopped"] is None


def test_stopping_rule_has_no_effect_after_the_last_epoch(tmp_path: Path, train: Any, metrics: Any) -> None:
    wild = ("training.epochs=40", "training.optimiser.learning_rate=8.0", PATIENCE)
    train(tmp_path / "long", *wild)
    epochs = sum(line["kind"] == "valid" for line in metrics(tmp_path / "long"))
    result = train(tmp_path / "short", *wild, f"training.epochs={epochs}")
    assert metrics(tmp_path / "short") == metrics(tmp_path / "long")
    assert result["training"]["stopped"] is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stop.rule=never", "training.stop.rule: must be 'nonmonotone' or 'patience'"),
        ("training.stop.interval=3", "training.stop.rule: must be set"),
        ("training.averaging={start = 'at_once', interval = 0}", "training.averaging.interval: must be greater"),
        ("training.averaging.starts=at_once", "did you mean training.averaging.start"),
        ("training.random_steps={least = 9, most = 5}", "most = 5 is less than least = 9"),
        ("training.random_steps.probability=1.5", "training.random_steps.probability: must be less than or equal to 1"),
        ("training.optimiser.decoupled_decay=1.0", "training.optimiser.decoupled_decay: must be less than 1"),
    ],
)
def test_invalid_settings_are_rejected(tiny_recipe: Callable[..., Path], override: str, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_recipe(str(tiny_recipe()), (override,), "tied")
    assert message in str(caught.value)
