"""How many threads compute on the CPU, and how they wait. A resumed run uses the threads of its first session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch

from reefknot.lab.runs import threads
from tiny import PATIENCE

from .conftest import Outcome

Cli = Callable[..., Outcome]
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that the variables are restored after the test
        monkeypatch.delenv(name)


def test_threads_sleep_soon_unless_the_user_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    threads.configure_threads()
    assert os.environ["GOMP_SPINCOUNT"] == str(threads.SPIN_COUNT)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    threads.configure_threads()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    threads.configure_threads()
    assert "GOMP_SPINCOUNT" not in os.environ


def test_policy_is_set_before_torch_is_imported() -> None:
    check = (
        "import os, sys, reefknot.lab.cli.main as cli\n"
        "cli.app = lambda: print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))\n"
        "cli.main()"
    )
    completed = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=PATIENCE)
    assert completed.stdout.split() == ["False", str(threads.SPIN_COUNT)], completed.stderr


def test_jobs_share_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_cpus", lambda: 6)
    monkeypatch.setattr(threads, "_busy_seconds", lambda: None)
    counts = [threads.environment_for_jobs(number).get("OMP_NUM_THREADS") for number in (1, 2, 4, 64)]
    assert counts == [None, "3", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads.environment_for_jobs(2)["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("busy_cpus", "expected"), [(0.0, 4), (0.4, 4), (0.8, 3), (1.7, 2), (4.0, 1), (40.0, 1), (None, 4)]
)
def test_threads_leave_out_cpus_that_other_programs_use(
    monkeypatch: pytest.MonkeyPatch, busy_cpus: float | None, expected: int
) -> None:
    clock = count()
    monkeypatch.setattr(threads, "_cpus", lambda: 4)
    monkeypatch.setattr(threads, "_busy_seconds", lambda: None if busy_cpus is None else busy_cpus * next(clock))
    monkeypatch.setattr(threads.time, "monotonic", count().__next__)
    monkeypatch.setattr(threads.time, "sleep", lambda seconds: None)
    assert threads.count_free_threads(4) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads.count_free_threads(4) == 4


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system has no /proc/stat")
def test_busy_seconds_of_all_programs_include_a_loop_in_this_process() -> None:
    before, started_at = threads._busy_seconds(), time.process_time()
    while time.process_time() - started_at < 0.5:
        pass
    assert threads._busy_seconds() - before > 0.4


@pytest.mark.parametrize(("niceness", "ticks"), [(0, 100 + 10 + 1 + 2 + 3), (5, 100 + 50 + 10 + 1 + 2 + 3)])
def test_programs_with_a_low_priority_count_only_for_programs_with_a_low_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, niceness: int, ticks: int
) -> None:
    counters = tmp_path / "stat"
    # user, nice, system, idle, waiting, interrupts, soft interrupts, other machines
    counters.write_text("cpu 900 900 900 900 0 0 0 0\ncpu0 100 50 10 700 70 1 2 3 0 0\ncpu1 9 9 9 9 9 9 9 9\n")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setattr(threads.os, "nice", lambda increment: niceness)
    assert threads._busy_seconds(counters) == ticks / os.sysconf("SC_CLK_TCK")


def test_new_run_leaves_busy_cpus_to_other_programs(
    cli: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reefknot.lab.experiment.count_free_threads", lambda number: number - 1)
    out = tmp_path / "run"
    torch.set_num_threads(2)
    try:
        outcome = cli("train", recipe, "training.epochs=1", "--row", "tied", "--out", out)
        assert outcome.code == 0
        assert "uses 1 of 2 CPU threads, because other programs use the other CPUs" in outcome.out
        assert json.loads((out / "environment.json").read_text())["threads"] == 1
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("limit", "cpus"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None), ("", None)]
)
def test_limit_of_a_container_is_read(tmp_path: Path, limit: str, cpus: int | None) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert threads._container_cpus(tmp_path) == cpus
    assert threads._container_cpus(tmp_path / "missing") is None


def test_resumed_run_uses_the_recorded_number_of_threads(
    cli: Cli, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    words = ("train", recipe, "training.epochs=1", "--row", "tied", "--out", out)
    monkeypatch.setattr("reefknot.lab.experiment.count_free_threads", lambda number: number)
    torch.set_num_threads(2)
    try:
        assert cli(*words).code == 0
        environment = json.loads((out / "environment.json").read_text())
        assert (environment["threads"], environment["processes"]) == (2, 1)

        # Resume the scoring with another number of threads.
        (out / "result.json").unlink()
        torch.set_num_threads(1)
        outcome = cli(*words)
        assert outcome.code == 0
        assert "uses 2 CPU threads, as when the run was started" in outcome.out
        assert torch.get_num_threads() == 2
        assert json.loads((out / "environment.json").read_text())["threads"] == 2
    finally:
        torch.set_num_threads(1)
