"""How many threads compute on the CPU, and how they wait. A resumed run uses the threads of its first session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reefknot.lab.cli import threads
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
    counts = [threads.environment_for_jobs(number)["OMP_NUM_THREADS"] for number in (1, 2, 4, 64)]
    assert counts == ["6", "3", "1", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads.environment_for_jobs(2)["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("limit", "cpus"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None), ("", None)]
)
def test_limit_of_a_container_is_read(tmp_path: Path, limit: str, cpus: int | None) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert threads._container_cpus(tmp_path) == cpus
    assert threads._container_cpus(tmp_path / "missing") is None


def test_resumed_run_uses_the_recorded_number_of_threads(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("train", recipe, "training.epochs=1", "--row", "tied", "--out", out)
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
