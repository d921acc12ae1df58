"""What `reefknot train` leaves with, and that it says why in one sentence."""

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

Leave = Callable[..., tuple[int, str]]


@pytest.fixture
def leave(
    tiny_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Leave:
    """Runs `reefknot train` in this process; its exit code and its complaint."""
    recipe = str(tiny_recipe(classifier="plain"))

    def run(out: Path, *overrides: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["reefknot", "train", recipe, "--row", "tied", "--out", str(out), *overrides])
        with pytest.raises(SystemExit) as left:
            main()
        complaint = capsys.readouterr().err
        assert complaint.count("\n") == (left.value.code != 0)
        return int(left.value.code or 0), complaint

    return run


def test_done(tmp_path: Path, leave: Leave) -> None:
    assert leave(tmp_path / "run") == (0, "")


def test_other_settings(tmp_path: Path, leave: Leave) -> None:
    leave(tmp_path / "run")
    code, complaint = leave(tmp_path / "run", "training.epochs=3")
    assert code == 2
    assert "settings.training.epochs: 2 -> 3" in complaint


def test_too_little_text(tmp_path: Path, leave: Leave) -> None:
    code, complaint = leave(tmp_path / "run", "training.batch=100")
    assert code == 3
    assert "100 streams need at least 200" in complaint
    assert not (tmp_path / "run").exists()


def test_not_a_number(tmp_path: Path, leave: Leave) -> None:
    optimiser = '{kind = "sgd", learning_rate = 1e9, weight_decay = 1e9}'
    code, complaint = leave(tmp_path / "run", f"training.optimiser={optimiser}")
    assert code == 4
    assert str(tmp_path / "run" / "nonfinite.json") in complaint
    assert (tmp_path / "run" / "nonfinite.json").exists()


def test_a_file_that_may_not_grow(tmp_path: Path, leave: Leave) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        code, complaint = leave(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 5
    assert "File too large" in complaint
    assert leave(tmp_path / "run")[0] == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for three of the tiny checkpoints."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(small_disk: Path, leave: Leave) -> None:
    code, complaint = leave(small_disk / "run", "training.keep=100", "training.save_every=1")
    assert code == 5
    assert "free some space and run the same command again" in complaint
    found = RunFolder.open(small_disk / "run").checkpoints.latest(pytest.fail)
    assert found is not None
    assert found.step >= 1
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    assert leave(small_disk / "run", "training.keep=100", "training.save_every=1") == (0, "")
