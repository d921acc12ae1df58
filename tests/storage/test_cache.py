"""The cache: entries that are whole or absent, and remembered hashes that notice a change."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reefknot.errors import ResourceError
from reefknot.storage import cache as module
from reefknot.storage.cache import cache_folder, cached, file_hash


def fill(folder: Path) -> None:
    (folder / "value").write_text("made")


def read(folder: Path) -> str | None:
    try:
        value = (folder / "value").read_text()
    except OSError:
        return None
    return value if value != "broken" else None


def test_an_entry_is_made_once(tmp_path: Path) -> None:
    entry = tmp_path / "a" / "entry"
    assert cached(entry, fill, read) == "made"
    assert cached(entry, lambda _: pytest.fail("made twice"), read) == "made"
    assert [path.name for path in entry.parent.iterdir()] == ["entry"]


def test_a_broken_entry_is_replaced(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    entry.mkdir()
    (entry / "value").write_text("broken")
    assert cached(entry, fill, read) == "made"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_the_loser_of_a_race_uses_the_winners_entry(tmp_path: Path) -> None:
    entry = tmp_path / "entry"

    def overtaken(folder: Path) -> None:
        fill(folder)
        entry.mkdir()
        (entry / "value").write_text("the winner's")

    assert cached(entry, overtaken, read) == "the winner's"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_a_failure_while_filling_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ResourceError, match="free some space"):
        cached(tmp_path / "entry", fail, read)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from reefknot.storage.cache import cached
cached(Path(sys.argv[1]), lambda folder: os.kill(os.getpid(), signal.SIGKILL), lambda folder: None)
"""


def test_what_a_killed_process_was_filling_is_removed(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "entry")])
    assert killed.wait(timeout=60) == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    assert f"-{killed.pid}-" in leftover.name
    alive = leftover.with_name(leftover.name.replace(f"-{killed.pid}-", f"-{os.getppid()}-"))
    elsewhere = leftover.with_name(leftover.name.replace(f"@{platform.node()}-", "@another-machine-"))
    for folder in (alive, elsewhere):
        folder.mkdir()
    assert cached(tmp_path / "other", fill, read) == "made"
    assert {path.name for path in tmp_path.iterdir()} == {"other", alive.name, elsewhere.name}


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResourceError, match="cannot write"):
        cached(tmp_path / "file" / "entry", fill, read)


def test_hashes_are_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    one = hashlib.sha256(b"one").hexdigest()
    assert file_hash(path, tmp_path / "cache") == one

    with monkeypatch.context() as patched:
        patched.setattr(module.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        assert file_hash(path, tmp_path / "cache") == one

    path.write_bytes(b"two")
    assert file_hash(path, tmp_path / "cache") == hashlib.sha256(b"two").hexdigest()
    for record in (tmp_path / "cache" / "hashes").iterdir():
        record.write_bytes(b"[torn")
    assert file_hash(path, tmp_path / "cache") == hashlib.sha256(b"two").hexdigest()


def test_the_hash_of_a_file_just_written_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"one")
    file_hash(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_the_cache_folder_given_named_or_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REEFKNOT_CACHE", "/named")
    assert cache_folder(Path("/given")) == Path("/given")
    assert cache_folder() == Path("/named")
    monkeypatch.delenv("REEFKNOT_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/reefknot")


def test_a_cache_that_cannot_be_written_forgets(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    assert file_hash(path, path / "below-a-file") == hashlib.sha256(b"one").hexdigest()
