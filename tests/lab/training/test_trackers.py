"""TensorBoard events, on request, with the numbers of metrics.jsonl."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import SettingsError, Stopped
from reefknot.lab.training.trackers import open_tensorboard

Metrics = Callable[[Path], list[dict[str, Any]]]


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_events_equal_the_metrics(tmp_path: Path, train: Any, metrics: Metrics) -> None:
    train(tmp_path / "run", track=True)
    lines = metrics(tmp_path / "run")
    for kind, key in (("train", "nll"), ("train", "learning_rate"), ("train", "gradient_norm"), ("valid", "nll")):
        expected = [(line["step"], line[key]) for line in lines if line["kind"] == kind]
        events = scalars(tmp_path / "run", f"{kind}/{key}")
        assert [step for step, _ in events] == [step for step, _ in expected]
        assert [value for _, value in events] == pytest.approx([value for _, value in expected], rel=1e-6)
    penalties = [line["penalties"]["projection"] for line in lines if line["kind"] == "train"]
    written = [value for _, value in scalars(tmp_path / "run", "train/penalties/projection")]
    assert written == pytest.approx(penalties, rel=1e-6)


def test_resumed_run_writes_each_point_once(
    tmp_path: Path, train: Any, metrics: Metrics, signal_in_step: Callable[[int], None]
) -> None:
    signal_in_step(7)
    with pytest.raises(Stopped):
        train(tmp_path / "run", track=True)
    train(tmp_path / "run", track=True)
    expected = [line["step"] for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert [step for step, _ in scalars(tmp_path / "run", "train/nll")] == expected


def test_tensorboard_is_off_by_default(tmp_path: Path, train: Any) -> None:
    train(tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*tensorboard*"))
    assert not list((tmp_path / "run").rglob("*tfevents*"))


def test_missing_tensorboard_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SettingsError, match=r"pip install 'reefknot\[track\]'"):
        open_tensorboard(tmp_path)
