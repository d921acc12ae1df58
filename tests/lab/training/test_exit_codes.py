"""Exit codes of `reefknot train`, each with a one-line message."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reefknot.lab.cli.main import main
from reefknot.lab.runs.folder import RunFolder

RunTrain = Callable[..., tuple[int, str]]


@pytest.fixture
def run_train(
    tiny_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> RunTrain:
    """A function that runs `reefknot train` in this process and returns the exit code and the message."""
    recipe = str(tiny_recipe(classifier="plain"))

    def run(out: Path, *overrides: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["reefknot", "train", recipe, "--row", "tied", "--out", str(out), *overrides])
        with pytest.raises(SystemExit) as exited:
            main()
        message = capsys.readouterr().err
        assert message.count("\n") == (exited.value.code != 0)
        return int(exited.value.code or 0), message

    return run


def test_exit_code_of_a_finished_run(tmp_path: Path, run_train: RunTrain) -> None:
    assert run_train(tmp_path / "run") == (0, "")


def test_exit_code_of_changed_settings(tmp_path: Path, run_train: RunTrain) -> None:
    run_train(tmp_path / "run")
    code, message = run_train(tmp_path / "run", "training.epochs=3")
    assert code == 2
    assert "other settings (training.epochs: 2 -> 3)" in message


def test_exit_code_of_a_text_that_is_too_short(tmp_path: Path, run_train: RunTrain) -> None:
    code, message = run_train(tmp_path / "run", "training.batch=100")
    assert code == 3
    assert "100 streams need at least 200" in message
    assert not (tmp_path / "run").exists()


def test_exit_code_of_a_nonfinite_loss(tmp_path: Path, run_train: RunTrain) -> None:
    optimiser = '{kind = "sgd", learning_rate = 1e9, weight_decay = 1e9}'
    code, message = run_train(tmp_path / "run", f"training.optimiser={optimiser}")
    assert code == 4
    assert "No checkpoint was saved" in message
    assert "is kept" not in message
    assert str(tmp_path / "run" / "nonfinite.json") in message
    assert (tmp_path / "run" / "nonfinite.json").exists()


def test_exit_code_of_a_folder_name_that_is_not_utf8(tmp_path: Path, run_train: RunTrain) -> None:
    code, message = run_train(tmp_path / "run\udcff")
    assert code == 2
    assert "run\\xff' has bytes that are not UTF-8" in message
    assert not list(tmp_path.glob("run*"))


def test_exit_code_when_a_file_size_limit_is_reached(tmp_path: Path, run_train: RunTrain) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        code, message = run_train(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 5
    assert "File too large" in message
    assert run_train(tmp_path / "run")[0] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with space for three of the tiny checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_exit_code_when_the_disk_is_full(small_disk: Path, run_train: RunTrain) -> None:
    code, message = run_train(small_disk / "run", "training.keep=100", "training.save_every=1")
    assert code == 5
    assert "free some space and run the same command again" in message
    checkpoint = RunFolder.open(small_disk / "run").checkpoints.load_latest(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step >= 1
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert run_train(small_disk / "run", "training.keep=100", "training.save_every=1") == (0, "")
