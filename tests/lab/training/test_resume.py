"""A run that was stopped or damaged, or that ran out of disk space, resumes bit for bit. Dropout is on."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import DataError, ResourceError, SettingsError, Stopped
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.training.loop import Trainer

STEPS = 12
"""Updates of the tiny recipe: two epochs of six windows. The last window of an epoch is shorter."""

Outcome = Callable[[Path], dict[str, Any]]


@pytest.fixture
def unbroken(tmp_path: Path, train: Any, outcome: Outcome) -> dict[str, Any]:
    """The outcome of a run without interruptions."""
    assert train(tmp_path / "unbroken")["training"]["steps"] == STEPS
    return outcome(tmp_path / "unbroken")


def test_runs_depend_only_on_the_seed(tmp_path: Path, train: Any, outcome: Outcome, unbroken: dict[str, Any]) -> None:
    train(tmp_path / "again")
    assert outcome(tmp_path / "again") == unbroken
    train(tmp_path / "other", "training.seed=1")
    other = outcome(tmp_path / "other")
    assert other["weights"].keys() == unbroken["weights"].keys()
    assert all(other["weights"][step] != unbroken["weights"][step] for step in other["weights"])


def test_dropout_changes_the_metrics(tmp_path: Path, train: Any, outcome: Outcome, unbroken: dict[str, Any]) -> None:
    train(tmp_path / "dry", "encoder.dropout=0.0")
    assert outcome(tmp_path / "dry")["metrics"] != unbroken["metrics"]


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_run_stopped_at_any_step_resumes_bit_for_bit(
    tmp_path: Path,
    train: Any,
    outcome: Outcome,
    unbroken: dict[str, Any],
    signal_in_step: Callable[[int], None],
    step: int,
) -> None:
    out = tmp_path / "stopped"
    signal_in_step(step)
    with pytest.raises(Stopped, match=f"step {step} "):
        train(out)
    (_,) = (out / "checkpoints").glob(f"*_{step:08d}")
    train(out)
    resumed = outcome(out)
    # The stop saved a checkpoint that the unbroken run does not have. All checkpoints of both runs are equal.
    assert resumed["weights"].keys() >= {f"step_{STEPS:08d}", unbroken["link"]}
    shared = resumed["weights"].keys() & unbroken["weights"].keys()
    assert all(resumed["weights"][name] == unbroken["weights"][name] for name in shared)
    assert {**resumed, "weights": None} == {**unbroken, "weights": None}


def test_run_stopped_after_every_step_resumes_bit_for_bit(
    tmp_path: Path, train: Any, outcome: Outcome, unbroken: dict[str, Any], signal_in_step: Callable[[int], None]
) -> None:
    out = tmp_path / "stopped"
    for _ in range(STEPS):
        signal_in_step(1)
        with pytest.raises(Stopped):
            train(out)
    signal_in_step(0)
    train(out)
    assert {**outcome(out), "weights": None} == {**unbroken, "weights": None}


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("log_every", "save_every"), [(4, 100), (100, 4), (5, 3)])
def test_runs_stopped_or_killed_between_reports_resume_bit_for_bit(
    tmp_path: Path,
    train: Any,
    outcome: Outcome,
    signal_in_step: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    log_every: int,
    save_every: int,
) -> None:
    """Checkpoints include the sums that have accumulated on the device since the last report."""
    often = (f"training.log_every={log_every}", f"training.save_every={save_every}")
    train(tmp_path / "unbroken", *often)
    for step in (3, 2, 5):
        signal_in_step(step)
        with pytest.raises(Stopped):
            train(tmp_path / "stopped", *often)
    signal_in_step(0)
    train(tmp_path / "stopped", *often)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", kill_before(STEPS))
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "killed", *often)
    train(tmp_path / "killed", *often)
    expected = {**outcome(tmp_path / "unbroken"), "weights": None}
    assert {**outcome(tmp_path / "stopped"), "weights": None} == expected
    assert {**outcome(tmp_path / "killed"), "weights": None} == expected


def kill_before(number: int) -> Callable[[Trainer, Any], bool]:
    """Return a training step that raises KeyboardInterrupt, without saving, before step `number`."""
    step = Trainer._step

    def step_or_interrupt(self: Trainer, stop: Any) -> bool:
        if self.state.progress.step + 1 == number:
            raise KeyboardInterrupt
        return step(self, stop)

    return step_or_interrupt


def test_finished_run_is_not_changed(tmp_path: Path, train: Any, display: Any) -> None:
    first = train(tmp_path / "run")
    before = contents(tmp_path / "run")
    assert train(tmp_path / "run") == first
    assert "done already" in display.lines[-1]
    assert contents(tmp_path / "run") == before


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "MANIFEST.json"])
def test_training_falls_back_from_a_damaged_checkpoint(
    tmp_path: Path,
    train: Any,
    outcome: Outcome,
    unbroken: dict[str, Any],
    signal_in_step: Callable[[int], None],
    display: Any,
    name: str,
) -> None:
    out = tmp_path / "damaged"
    signal_in_step(8)
    with pytest.raises(Stopped):
        train(out)
    newest = out / "checkpoints" / "pause_00000008" / name
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    display.lines.clear()
    train(out)
    assert any(str(newest) in line and "using step_0000000" in line for line in display.lines)
    assert {**outcome(out), "weights": None} == {**unbroken, "weights": None}


def test_damaged_best_checkpoint_is_computed_again(
    tmp_path: Path, train: Any, outcome: Outcome, unbroken: dict[str, Any], signal_in_step: Callable[[int], None]
) -> None:
    out = tmp_path / "damaged"
    signal_in_step(6)
    with pytest.raises(Stopped):
        train(out)
    assert (out / "best").readlink().name == "step_00000006"
    (out / "checkpoints" / "step_00000006" / "model.safetensors").write_bytes(b"")
    train(out)
    assert outcome(out) == unbroken


def test_error_if_no_checkpoint_can_be_read(tmp_path: Path, train: Any, signal_in_step: Callable[[int], None]) -> None:
    out = tmp_path / "damaged"
    signal_in_step(4)
    with pytest.raises(Stopped):
        train(out)
    for path in out.glob("checkpoints/*/model.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match=r"no checkpoint of .* can be used: .*model\.safetensors.*another --out"):
        train(out)


@pytest.mark.parametrize("stop", [5, STEPS])
def test_changed_settings_are_rejected_with_the_difference(
    tmp_path: Path, train: Any, signal_in_step: Callable[[int], None], stop: int
) -> None:
    out = tmp_path / "run"
    signal_in_step(stop)
    with pytest.raises(Stopped):
        train(out)
    before = contents(out)
    with pytest.raises(SettingsError, match=r"\(training\.seed: 0 -> 3\); use another --out"):
        train(out, "training.seed=3")
    with pytest.raises(SettingsError, match='row: "tied" -> "untied"'):
        train(out, row="untied")
    assert contents(out) == before


def test_two_trainers_cannot_share_a_folder(tmp_path: Path, train: Any) -> None:
    config: dict[str, Any] = {}
    with (
        RunFolder.open_for_training(tmp_path / "run", config),
        pytest.raises(SettingsError, match=f"process {os.getpid()} is training in"),
    ):
        train(tmp_path / "run")


@pytest.mark.parametrize("victim", ["metrics.jsonl", "model.safetensors", "state.safetensors"])
def test_failed_write_keeps_the_last_checkpoint(
    tmp_path: Path, train: Any, outcome: Outcome, signal_in_step: Callable[[int], None], victim: str
) -> None:
    """A write fails in the middle of a file. The last checkpoint stays valid, and the run resumes later."""
    train(tmp_path / "unbroken", "training.log_every=1")
    out = tmp_path / "full"
    signal_in_step(8)
    with pytest.raises(Stopped):
        train(out, "training.log_every=1")
    newest = out / "checkpoints" / "pause_00000008"
    limit = (out / victim).stat().st_size + 100 if victim == "metrics.jsonl" else (newest / victim).stat().st_size - 1
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(ResourceError, match=r"cannot write .*: File too large"):
            train(out, "training.log_every=1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.rglob("*.tmp-*"))
    checkpoint = RunFolder.open(out).checkpoints.load_latest(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.path == newest
    train(out, "training.log_every=1")
    assert outcome(out) == outcome(tmp_path / "unbroken")


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder except the lock, which names the process that held it last."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
