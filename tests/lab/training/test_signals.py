"""Signals from a scheduler or a user, sent to separate processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import Stopped
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.training.signals import STOP_SIGNALS, StopRequest, raise_on_signal
from tiny import PATIENCE

Command = Callable[..., list[str]]
Start = Callable[[list[str]], "subprocess.Popen[str]"]
WaitFor = Callable[[Callable[[], object]], None]

LONG = ("training.epochs=100000", "training.save_every=1000000", "training.log_every=1")


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def has_lines(run: Path, least: int) -> bool:
    return lines(run) >= least


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_exits_with_code_75(
    tmp_path: Path, tiny_recipe: Callable[..., Path], command: Command, start: Start, wait_for: WaitFor, number: int
) -> None:
    out = tmp_path / "run"
    words = command("train", tiny_recipe(2000), "--row", "tied", "--out", out, *LONG)
    reached = 0
    for _ in range(2):  # stopped once, resumed, stopped again
        process = start(words)
        wait_for(partial(has_lines, out, reached + 4))
        process.send_signal(number)
        output, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 75
        assert "saved; the same command resumes" in errors
        assert "Traceback" not in errors
        checkpoint = RunFolder.open(out).checkpoints.load_latest(pytest.fail)
        assert checkpoint is not None
        assert checkpoint.step > reached
        assert checkpoint.state_values["progress"]["metrics_lines"] == lines(out)
        assert ("resumed at step" in output) == (reached > 0)
        reached = lines(out)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_second_signal_ends_the_process_at_once(start: Start, number: signal.Signals) -> None:
    """After the first signal, the loop below ignores the request, like a step that hangs."""
    code = """
import time
from reefknot.lab.training.signals import StopRequest
with StopRequest() as stop:
    print("listening", flush=True)
    while not stop:
        time.sleep(0.01)
    print("noted", flush=True)
    time.sleep(600)
"""
    process = start([sys.executable, "-c", code])
    assert process.stdout is not None
    for expected in ("listening", "noted"):
        assert process.stdout.readline().strip() == expected
        process.send_signal(number)
    assert process.wait(timeout=PATIENCE) == -number
    process.communicate()


@pytest.mark.parametrize("moment", ["print", "update"])
def test_run_stopped_before_training_or_while_scoring_resumes(
    tmp_path: Path, train: Any, display: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """There is nothing to save before the first step, nor while the best weights are scored."""
    original = getattr(display, moment)

    def interrupt(text: str) -> None:
        original(text)
        if moment == "print" or "scoring" in text:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(display, moment, interrupt)
    with pytest.raises(Stopped, match="stopped; run the same command again"):
        train(tmp_path / "run")
    monkeypatch.undo()
    assert train(tmp_path / "run")["training"]["steps"] == 12


def test_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopRequest() as stop:
        assert not stop
        signal.raise_signal(signal.SIGUSR1)
        assert stop
        assert stop.signal is signal.SIGUSR1
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    with pytest.raises(Stopped, match="enough"), raise_on_signal("enough"):
        signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


@pytest.mark.parametrize("jobs", [1, 2])
def test_table_forwards_the_signal_to_its_runs(
    tmp_path: Path, tiny_recipe: Callable[..., Path], command: Command, start: Start, wait_for: WaitFor, jobs: int
) -> None:
    root = tmp_path / "runs"
    words = command("table", tiny_recipe(2000), "--out", root, "--jobs", str(jobs), *LONG)
    process = start(words)
    wait_for(lambda: sum(lines(run) > 3 for run in root.glob("*/seed0")) == jobs)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75
    assert errors.splitlines()[-1] == "reefknot: stopped; run the same command to resume"
    for run in list(root.glob("*/seed0"))[:jobs]:
        checkpoint = RunFolder.open(run).checkpoints.load_latest(pytest.fail)
        assert checkpoint is not None
        assert checkpoint.step > 3
        RunFolder.open_for_training(run, RunFolder.open(run).config).close()  # no process trains there any more


def test_table_stopped_while_its_runs_start_exits_with_code_75(
    tmp_path: Path, tiny_recipe: Callable[..., Path], command: Command, start: Start
) -> None:
    """The run does not handle signals yet and dies, but the table reports the requested stop."""
    process = start(command("table", tiny_recipe(), "--out", tmp_path / "runs", *LONG))
    assert process.stdout is not None
    while "2 runs in" not in process.stdout.readline():
        pass
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, errors
