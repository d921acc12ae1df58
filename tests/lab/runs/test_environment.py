"""The environment record says which code ran on which machine, and does not identify the user."""

from __future__ import annotations

import getpass
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import reefknot.lab.runs.environment as environment
from reefknot.lab.runs.environment import capture_environment, peak_memory_bytes


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small repository with a copy of the module, from which the package seems to run."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    package = tmp_path / "src" / "reefknot"
    package.mkdir(parents=True)
    (package / "environment.py").write_text("'code'\n")
    (tmp_path / ".gitignore").write_text("runs/\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "first")
    monkeypatch.setattr(environment, "_PACKAGE", package)
    monkeypatch.setattr(environment, "__file__", str(package / "environment.py"))
    monkeypatch.delenv("REEFKNOT_COMMIT", raising=False)
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_record_is_complete_and_valid_json() -> None:
    record = capture_environment()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["torch"] == torch.__version__
    assert record["threads"] == torch.get_num_threads()
    assert record["cpus"] >= 1
    assert record["cpu"]
    assert len(record["source_sha256"]) == 64
    assert {
        "python",
        "platform",
        "gpus",
        "cuda",
        "numpy",
        "reefknot",
        "commit",
        "dirty",
        "command",
    } < record.keys()


def test_record_names_neither_user_nor_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/penelope")
    arguments = ["train", "--out", "/home/penelope/my run", "--data=/home/penelope", "/home/penelope2", "a'b"]
    monkeypatch.setattr(sys, "argv", ["/home/penelope/.venv/bin/reefknot", *arguments])
    record = capture_environment()
    assert record["command"] == "reefknot train --out '~/my run' --data=~ /home/penelope2 'a'\"'\"'b'"
    text = json.dumps({key: value for key, value in record.items() if key != "command"})
    assert socket.gethostname() not in text
    assert "penelope" not in text
    if getpass.getuser() != "root":
        assert getpass.getuser() not in text


@pytest.mark.parametrize("program", ["/x/reefknot/__main__.py", "/usr/bin/reefknot", "reefknot"])
def test_command_starts_with_reefknot(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(sys, "argv", [program, "ls", "\udcff"])
    assert environment._command_line() == "reefknot ls '?'"


def test_commit_and_dirty_flag_of_a_checkout(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert environment._git_revision() == (head, False)
    (checkout / "runs").mkdir()
    (checkout / "runs" / "ignored").write_text("")
    assert environment._git_revision() == (head, False)
    (checkout / "new.py").write_text("")
    assert environment._git_revision() == (head, True)


def test_git_dir_variable_is_ignored(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert environment._git_revision()[1] is False


def test_installed_copy_inside_another_checkout_has_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = checkout / "runs" / "site-packages" / "reefknot"
    copy.mkdir(parents=True)
    (copy / "environment.py").write_text("")
    monkeypatch.setattr(environment, "_PACKAGE", copy)
    monkeypatch.setattr(environment, "__file__", str(copy / "environment.py"))
    assert environment._git_revision() == (None, None)
    monkeypatch.setenv("REEFKNOT_COMMIT", "abc123")
    assert environment._git_revision() == ("abc123", None)


def test_commit_variable_is_used_only_if_the_checkout_differs(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, dirty = environment._git_revision()
    assert dirty is False
    monkeypatch.setenv("REEFKNOT_COMMIT", "abc123")
    assert environment._git_revision() == (head, False)
    (checkout / "src" / "reefknot" / "other.py").write_text("changed\n")
    assert environment._git_revision() == ("abc123", None)
    monkeypatch.delenv("REEFKNOT_COMMIT")
    assert environment._git_revision() == (head, True)


def test_without_git_there_is_no_commit(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout / "nothing"))
    assert environment._git_revision() == (None, None)


def test_source_hash_depends_on_names_and_contents_of_code(checkout: Path) -> None:
    package = checkout / "src" / "reefknot"
    hashes = {environment.source_sha256(package)}
    (package / "recipe.toml").write_text("a = 1\n")
    hashes.add(environment.source_sha256(package))
    (package / "recipe.toml").rename(package / "other.toml")
    hashes.add(environment.source_sha256(package))
    (package / "other.toml").write_text("a = 2\n")
    hashes.add(environment.source_sha256(package))
    (package / "notes.md").write_text("not code")
    hashes.add(environment.source_sha256(package))
    assert len(hashes) == 4


def test_peak_memory_grows_with_allocated_memory() -> None:
    before = peak_memory_bytes("cpu")
    assert before > 10_000_000
    tensor = torch.ones(80_000_000)
    assert peak_memory_bytes(torch.device("cpu")) >= before
    assert peak_memory_bytes("cpu") > tensor.numel() * tensor.element_size()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_excludes_the_parent_process() -> None:
    tensor = torch.ones(400 * 2**20, dtype=torch.uint8)
    code = "from reefknot.lab.runs.environment import peak_memory_bytes; print(peak_memory_bytes('cpu'))"
    child_peak = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert child_peak < peak_memory_bytes("cpu") - tensor.numel() // 2
