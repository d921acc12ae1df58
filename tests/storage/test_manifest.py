"""A file that changes without its manifest is rejected by name. A kill or a second process leaves a folder valid."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reefknot.errors import DataError
from reefknot.storage import files, manifest
from tiny import PATIENCE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    manifest.create(tmp_path)
    return tmp_path


def test_changed_file_is_rejected_by_name(folder: Path) -> None:
    for name in ("a.json", "inner/b.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        manifest.write_json(folder / name, {"score": 1})
        assert manifest.read_object(folder / name) == {"score": 1}
        (folder / name).write_bytes(files.encode_json({"score": 2}))
        with pytest.raises(DataError, match=f"{name} is damaged: it does not match its SHA-256"):
            manifest.read_bytes(folder / name)
        (folder / name).write_bytes(b"")
        with pytest.raises(DataError, match=f"{name} is damaged: it has 0 bytes instead of 17"):
            manifest.read_bytes(folder / name)


def test_changed_manifest_is_rejected(folder: Path) -> None:
    manifest.write_bytes(folder / "a", b"1")
    path = folder / manifest.MANIFEST_FILE
    for data in (path.read_bytes().replace(b'"size": 1', b'"size": 2'), b"", b"{}", b'"\\ud800"'):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"MANIFEST\.json .*restore it, or delete it"):
            manifest.read_bytes(folder / "a")
    path.unlink()
    assert manifest.read_bytes(folder / "a") == b"1"


def test_kill_between_manifest_and_file_leaves_a_valid_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest.write_bytes(folder / "a", b"old")

    def kill(path: Path, data: bytes) -> None:
        if path.name == "a":
            raise KeyboardInterrupt
        write(path, data)

    write = files.write_bytes
    monkeypatch.setattr(files, "write_bytes", kill)
    with pytest.raises(KeyboardInterrupt):
        manifest.write_bytes(folder / "a", b"new")
    monkeypatch.undo()
    assert manifest.read_bytes(folder / "a") == b"old"
    manifest.write_bytes(folder / "a", b"newest")
    assert manifest.read_bytes(folder / "a") == b"newest"


def test_growing_file_is_listed_when_it_is_finished(folder: Path) -> None:
    log = folder / "log"
    log.write_bytes(b"one\n")
    manifest.add(log)
    manifest.forget(log)
    log.write_bytes(b"one\ntwo\n")
    assert manifest.read_bytes(log) == b"one\ntwo\n"
    manifest.add(log)
    log.write_bytes(b"one\n")
    with pytest.raises(DataError, match="log is damaged"):
        manifest.read_bytes(log)
    with pytest.raises(DataError, match="log is damaged"):
        manifest.verify(folder)


def test_processes_that_write_at_the_same_time_are_all_listed(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from reefknot.storage import manifest\n"
        "for i in range(20): manifest.write_bytes(Path(sys.argv[1]) / f'{sys.argv[2]}{i}', b'x')"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(folder), name]) for name in "ab"]
    assert [writer.wait(timeout=PATIENCE) for writer in writers] == [0, 0]
    for name in [f"{writer}{number}" for writer in "ab" for number in range(20)]:
        (folder / name).write_bytes(b"y")
        with pytest.raises(DataError, match=name):
            manifest.read_bytes(folder / name)
