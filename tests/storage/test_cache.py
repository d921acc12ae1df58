"""Cache entries are complete or absent, and cached hashes are updated when a file changes."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reefknot.errors import ResourceError
from reefknot.storage import cache as cache_module
from reefknot.storage import manifest
from reefknot.storage.cache import cache_folder, check_files, file_hash, load_or_create
from tiny import PATIENCE


def write_value(folder: Path) -> None:
    (folder / "value").write_text("made")


def read_value(folder: Path) -> str:
    return (folder / "value").read_text()


def test_entry_is_made_once(tmp_path: Path) -> None:
    entry = tmp_path / "a" / "entry"
    assert load_or_create(entry, write_value, read_value) == "made"
    assert load_or_create(entry, lambda _: pytest.fail("the entry was made twice"), read_value) == "made"
    assert [path.name for path in entry.parent.iterdir()] == ["entry"]


def test_broken_entry_is_replaced(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    load_or_create(entry, write_value, read_value)
    (entry / "value").write_text("Made")
    messages: list[str] = []
    assert load_or_create(entry, write_value, read_value, messages.append) == "made"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]
    (message,) = messages
    assert f"{entry / 'value'} is damaged" in message


def test_entry_from_before_manifests_is_made_again(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    entry.mkdir()
    (entry / "value").write_text("unverified")
    messages: list[str] = []
    assert load_or_create(entry, write_value, read_value, messages.append) == "made"
    assert "MANIFEST.json is missing" in messages[0]


def test_slower_of_two_processes_uses_the_existing_entry(tmp_path: Path) -> None:
    entry = tmp_path / "entry"

    def write_too_late(folder: Path) -> None:
        write_value(folder)
        entry.mkdir()
        (entry / "value").write_text("the winner's")
        manifest.create(entry, [entry / "value"])

    assert load_or_create(entry, write_too_late, read_value) == "the winner's"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_failed_entry_leaves_no_files(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write_value(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ResourceError, match="free some space"):
        load_or_create(tmp_path / "entry", fail, read_value)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from reefknot.storage.cache import load_or_create
load_or_create(Path(sys.argv[1]), lambda folder: os.kill(os.getpid(), signal.SIGKILL), print)
"""


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "entry")])
    assert killed.wait(timeout=PATIENCE) == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    assert f"-{killed.pid}-" in leftover.name
    of_live_process = leftover.with_name(leftover.name.replace(f"-{killed.pid}-", f"-{os.getppid()}-"))
    of_other_machine = leftover.with_name(leftover.name.replace(f"@{platform.node()}-", "@another-machine-"))
    for folder in (of_live_process, of_other_machine):
        folder.mkdir()
    assert load_or_create(tmp_path / "other", write_value, read_value) == "made"
    assert {path.name for path in tmp_path.iterdir()} == {"other", of_live_process.name, of_other_machine.name}


def test_unwritable_cache_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResourceError, match="cannot write"):
        load_or_create(tmp_path / "file" / "entry", write_value, read_value)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the clock of the cache forward by a minute, so that files are old enough for their hashes to be cached."""
    now = time.time_ns()
    monkeypatch.setattr(cache_module.time, "time_ns", lambda: now + 60 * 10**9)


@pytest.mark.usefixtures("later")
def test_change_that_keeps_size_and_modification_time_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"one")
    status = path.stat()
    assert file_hash(path, tmp_path / "cache") == hashlib.sha256(b"one").hexdigest()
    assert (tmp_path / "cache" / "hashes").is_dir()
    time.sleep(0.05)  # longer than a tick of the kernel's clock
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert file_hash(path, tmp_path / "cache") == hashlib.sha256(b"two").hexdigest()


@pytest.mark.usefixtures("later")
def test_hash_is_cached_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"one")
    one = hashlib.sha256(b"one").hexdigest()
    assert file_hash(path, tmp_path / "cache") == one

    with monkeypatch.context() as patched:
        patched.setattr(cache_module.hashlib, "file_digest", lambda *_: pytest.fail("the file was read again"))
        assert file_hash(path, tmp_path / "cache") == one

    path.write_bytes(b"two")
    assert file_hash(path, tmp_path / "cache") == hashlib.sha256(b"two").hexdigest()
    for damage in (lambda data: b"[torn", lambda data: data.replace(b'_sha256": "', b'_sha256": "0')):
        for record in (tmp_path / "cache" / "hashes").iterdir():
            record.write_bytes(damage(record.read_bytes()))
        assert file_hash(path, tmp_path / "cache") == hashlib.sha256(b"two").hexdigest()


@pytest.mark.usefixtures("later")
def test_check_reads_a_file_again_although_it_looks_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a disk image, for example, can restore all times of a file."""
    path = tmp_path / "text"
    path.write_bytes(b"one")
    one = file_hash(path, tmp_path / "cache")
    status = path.stat()
    path.write_bytes(b"two")
    with monkeypatch.context() as patched:
        patched.setattr(cache_module, "_checked_files", None)
        patched.setattr(Path, "stat", lambda self, **_: status)
        assert file_hash(path, tmp_path / "cache") == one
        check_files()
        assert file_hash(path, tmp_path / "cache") == hashlib.sha256(b"two").hexdigest()


def test_hash_of_a_file_just_written_is_not_cached(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))  # the time of the last change of the inode remains
    file_hash(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_cache_folder_is_an_argument_a_variable_or_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REEFKNOT_CACHE", "/named")
    assert cache_folder(Path("/given")) == Path("/given")
    assert cache_folder() == Path("/named")
    monkeypatch.delenv("REEFKNOT_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/reefknot")


def test_hash_works_without_a_writable_cache(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    assert file_hash(path, path / "below-a-file") == hashlib.sha256(b"one").hexdigest()
