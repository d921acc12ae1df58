"""Two processes that train together: if one of them ends, the other ends with a message, and both can resume."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reefknot.lab.runs.folder import RunFolder
from tiny import PATIENCE

Start = Callable[..., list[subprocess.Popen[str]]]
SETTINGS = ("training.epochs=2000", "training.log_every=1", "training.save_every=20", "training.keep=1")


@pytest.fixture
def start_two(tiny_recipe: Callable[..., Path]) -> Iterator[Start]:
    """A function that starts two ranks without torchrun, which would end the other rank itself."""
    recipe = tiny_recipe()
    started: list[subprocess.Popen[str]] = []

    def start(out: Path, *settings: str, code: tuple[str, str] = ("", "")) -> list[subprocess.Popen[str]]:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        for rank in (0, 1):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            run_main = "from reefknot.lab.cli.main import main; main()"
            words = ["train", str(recipe), "--row", "tied", "--out", str(out), *SETTINGS, *settings]
            started.append(
                subprocess.Popen(
                    [sys.executable, "-c", f"{code[rank]}\n{run_main}", *words],
                    env=os.environ | variables | {"MASTER_PORT": str(port)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started[-2:]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("killed_rank", [0, 1])
def test_other_process_ends_with_a_message_if_one_is_killed(
    tmp_path: Path, start_two: Start, wait_for: Callable[[Callable[[], object]], None], killed_rank: int
) -> None:
    out = tmp_path / "run"
    processes = start_two(out)
    wait_for(lambda: any(out.glob("checkpoints/step_" + "[0-9]" * 8)))
    survivor = processes[1 - killed_rank]
    processes[killed_rank].kill()
    killed_at = time.monotonic()
    _, errors = survivor.communicate(timeout=PATIENCE)
    assert time.monotonic() - killed_at < 120  # a minute, and as much again on a busy machine
    assert survivor.returncode == 75, errors
    assert "run the same command again" in errors
    assert "Traceback" not in errors
    assert RunFolder.open(out).checkpoints.load_latest(pytest.fail) is not None


FULL_DISK = """
import errno
from reefknot.lab.runs.checkpoints import Checkpoints
def fail(self, needed_bytes):
    raise OSError(errno.ENOSPC, "No space left on device")
Checkpoints._prepare_folder = fail
"""
FULL_CACHE = """
import errno, os
os.environ["REEFKNOT_CACHE"] += "-of-another-machine"  # otherwise the other process may write the cache first
from reefknot.storage import cache
def fail(entry, write, read_if_intact):
    with cache.durable.writing(entry):
        raise OSError(errno.ENOSPC, "No space left on device")
cache._write_entry = fail
"""


@pytest.mark.parametrize(("code", "full_rank"), [((FULL_DISK, ""), 0), (("", FULL_CACHE), 1)])
def test_full_disk_of_one_process_ends_the_other_with_its_message(
    tmp_path: Path, start_two: Start, monkeypatch: pytest.MonkeyPatch, code: tuple[str, str], full_rank: int
) -> None:
    """The first process writes checkpoints. Every process writes the cache of its machine."""
    monkeypatch.setenv("REEFKNOT_CACHE", str(tmp_path / "cache"))
    processes = start_two(tmp_path / "run", code=code)
    outputs = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    assert (processes[full_rank].returncode, processes[1 - full_rank].returncode) == (5, 75), outputs
    assert "No space left on device" in outputs[full_rank]
    assert f"process {full_rank} has ended" in outputs[1 - full_rank]
    assert "No space left on device" in outputs[1 - full_rank]
    assert "Traceback" not in "".join(outputs)
