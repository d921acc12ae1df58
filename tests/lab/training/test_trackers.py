"""Trackers, only on request, with the numbers of metrics.jsonl: TensorBoard, wandb and Trackio."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from reefknot.errors import SettingsError, Stopped
from reefknot.lab.training.trackers import check_trackers

Metrics = Callable[[Path], list[dict[str, Any]]]


class RecordingRun:
    """Stands for a run of wandb or Trackio."""

    url = "https://example.test/run"

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.points: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        assert not self.is_finished
        self.points.append((step, values))

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RecordingRun]:
    """Replace wandb and Trackio by modules that record calls, on a machine without an API key."""
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_PROJECT", "TRACKIO_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    opened_runs: list[RecordingRun] = []

    def init(**options: Any) -> RecordingRun:
        print("a message of the program")
        opened_runs.append(RecordingRun(options))
        return opened_runs[-1]

    settings = SimpleNamespace(base_url="https://wandb.example.test")
    for name in ("wandb", "trackio"):
        module = ModuleType(name)
        vars(module).update(init=init, Settings=lambda **_: settings)
        monkeypatch.setitem(sys.modules, name, module)
    return opened_runs


def scalars(run: Path, tag: str) -> list[tuple[int, float]]:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_events_equal_the_metrics(tmp_path: Path, train: Any, metrics: Metrics) -> None:
    pytest.importorskip("tensorboard")
    result = train(tmp_path / "run", track=("tensorboard",))
    lines = metrics(tmp_path / "run")
    for kind, key in (("train", "nll"), ("train", "learning_rate"), ("train", "gradient_norm"), ("valid", "nll")):
        expected = [(line["step"], line[key]) for line in lines if line["kind"] == kind]
        events = scalars(tmp_path / "run", f"{kind}/{key}")
        assert [step for step, _ in events] == [step for step, _ in expected]
        assert [value for _, value in events] == pytest.approx([value for _, value in expected], rel=1e-6)
    penalties = [line["penalties"]["projection"] for line in lines if line["kind"] == "train"]
    written = [value for _, value in scalars(tmp_path / "run", "train/penalties/projection")]
    assert written == pytest.approx(penalties, rel=1e-6)
    [(_, test_perplexity)] = scalars(tmp_path / "run", "result/test/perplexity")
    assert test_perplexity == pytest.approx(result["test"]["perplexity"], rel=1e-6)


def test_resumed_run_writes_each_point_once(
    tmp_path: Path,
    train: Any,
    metrics: Metrics,
    signal_in_step: Callable[[int], None],
    opened: list[RecordingRun],
) -> None:
    pytest.importorskip("tensorboard")
    track = ("tensorboard", "wandb", "trackio")
    signal_in_step(7)
    with pytest.raises(Stopped):
        train(tmp_path / "run", track=track)
    train(tmp_path / "run", track=track)
    expected = [line["step"] for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert [step for step, _ in scalars(tmp_path / "run", "train/nll")] == expected
    for first_session, second_session in (opened[0::2], opened[1::2]):
        points = [*first_session.points, *second_session.points]
        assert [step for step, values in points if "train/nll" in values] == expected
        assert first_session.is_finished
        assert second_session.is_finished
    assert opened[0].options["id"] == opened[2].options["id"]


def test_wandb_and_trackio_get_the_metrics_and_the_settings(
    tmp_path: Path, train: Any, metrics: Metrics, opened: list[RecordingRun]
) -> None:
    result = train(tmp_path / "run", track=("wandb", "trackio"))
    lines = metrics(tmp_path / "run")
    for run in opened:
        assert run.options["project"] == "reefknot"
        assert run.options["name"] == str(tmp_path / "run")
        assert run.options["config"]["row"] == "tied"
        assert [step for step, _ in run.points[:-1]] == [line["step"] for line in lines]
        assert run.points[0][1]["train/nll"] == lines[0]["nll"]
        assert run.points[-1][1]["result/test/perplexity"] == result["test"]["perplexity"]
    assert opened[0].options["mode"] == "offline"
    assert opened[0].options["dir"] == str(tmp_path / "run")
    assert opened[1].options["resume"] == "allow"


@pytest.mark.parametrize(
    ("mode", "has_key", "expected"),
    [
        (None, False, "offline"),
        (None, True, "online"),
        ("offline", True, "offline"),
        ("disabled", False, "disabled"),
    ],
)
def test_wandb_is_online_only_with_a_key(
    tmp_path: Path,
    train: Any,
    opened: list[RecordingRun],
    monkeypatch: pytest.MonkeyPatch,
    mode: str | None,
    has_key: bool,
    expected: str,
) -> None:
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    if has_key:
        (tmp_path / "netrc").write_text("machine wandb.example.test login user password secret\n")
    train(tmp_path / "run", "training.epochs=1", track=("wandb",))
    assert [run.options["mode"] for run in opened] == [expected]


def test_wandb_never_asks_for_a_key(
    tmp_path: Path, train: Any, opened: list[RecordingRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(SettingsError, match="WANDB_MODE=online needs an API key"):
        train(tmp_path / "run", track=("wandb",))
    assert not (tmp_path / "run").exists()
    assert opened == []


def test_failing_tracker_does_not_stop_training(
    tmp_path: Path, train: Any, opened: list[RecordingRun], monkeypatch: pytest.MonkeyPatch, display: Any
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(RecordingRun, "log", fail)
    result = train(tmp_path / "run", track=("wandb",))
    assert result["test"]["perplexity"] > 1
    failures = [line for line in (tmp_path / "run" / "log.txt").read_text().splitlines() if "wandb failed" in line]
    assert len(failures) == 1
    assert "the disk is full" in failures[0]


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("tensorboard", "torch.utils.tensorboard", "track"),
        ("wandb", "wandb", "track"),
        ("trackio", "trackio", "track"),
    ],
)
def test_missing_package_is_an_error_before_the_run_folder_exists(
    tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingsError, match=rf"pip install 'reefknot\[{extra}\]'"):
        train(tmp_path / "run", track=(name,))
    assert not (tmp_path / "run").exists()


def test_unknown_tracker_is_rejected() -> None:
    with pytest.raises(SettingsError, match="--track mlflow: must be one of tensorboard, wandb, trackio"):
        check_trackers(["mlflow"])


UNTRACKED = """
import sys
events = []
sys.addaudithook(lambda name, arguments: events.append(name) if name.startswith("socket.") else None)
from reefknot.lab.cli.main import main
sys.argv = ["reefknot", "train", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
assert not events, events
loaded = {"tensorboard", "wandb", "trackio"} & set(sys.modules)
assert not loaded, loaded
"""


def test_training_without_trackers_creates_no_socket(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> None:
    """An audit hook sees every socket that Python code creates, whatever it connects to."""
    options = ["training.epochs=1", "--row", "tied", "--device", "cpu", "--out", str(tmp_path / "run")]
    training = subprocess.run(
        [sys.executable, "-c", UNTRACKED, str(tiny_recipe()), *options], capture_output=True, text=True, check=False
    )
    assert training.returncode == 0, training.stdout + training.stderr
    assert (tmp_path / "run" / "result.json").exists()
    assert not list((tmp_path / "run").rglob("*tfevents*"))
