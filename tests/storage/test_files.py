"""Writes are atomic, and unreadable files raise clear errors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reefknot.errors import DataError, ResourceError
from reefknot.storage import files as durable


@pytest.fixture(autouse=True)
def fast_disk() -> None:
    """Override the fixture of all tests, so that files are synced to disk here."""


def test_json_keeps_order_text_and_floats(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    value = {"z": 1, "a": [0.1 + 0.2, None, True], "word": "naïve\n\u2028<eos>\x00"}
    durable.write_json(path, value)
    assert durable.read_json(path) == value
    assert list(durable.read_json(path)) == ["z", "a", "word"]
    assert "naïve" in path.read_text(encoding="utf-8")
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_nonfinite_numbers_are_rejected_and_the_old_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    durable.write_json(path, 1)
    with pytest.raises(ValueError, match="JSON"):
        durable.write_json(path, {"loss": float("nan")})
    assert durable.read_json(path) == 1


@pytest.mark.parametrize("data", [b"", b'{"a": 1', b"\xff\xfe", b"NaN", b"[" * 100_000, b"1" * 5_000])
def test_invalid_json_is_a_data_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.json"):
        durable.read_json(path)


def test_missing_file_and_folder_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.json is missing"):
        durable.read_json(tmp_path / "gone.json")
    with pytest.raises(DataError, match="is not a file"):
        durable.read_json(tmp_path)


@pytest.mark.parametrize("system_call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system_call: str, error_number: int
) -> None:
    path = tmp_path / "a.txt"
    durable.write_text(path, "old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(os, system_call, fail)
    with pytest.raises(ResourceError, match=r"a\.txt") as caught:
        durable.write_text(path, "new")
    monkeypatch.undo()
    assert ("free some space" in str(caught.value)) == (error_number != errno.EIO)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:3])))
    durable.write_text(tmp_path / "a.txt", "ten letters")
    assert (tmp_path / "a.txt").read_text() == "ten letters"


def test_leftovers_are_removed_only_if_their_process_has_ended(tmp_path: Path) -> None:
    ended_process = subprocess.Popen([sys.executable, "-c", ""])
    ended_process.wait()
    names = [
        f"a.json.tmp-{ended_process.pid}",
        f"b.tmp-{os.getpid()}",
        f"c.tmp-{os.getppid()}",
        "notes.tmp-x",
        "d.json",
    ]
    for name in names:
        (tmp_path / name).write_text("")
    (tmp_path / f"step.tmp-{ended_process.pid}").mkdir()
    (tmp_path / f"step.tmp-{ended_process.pid}" / "file").write_text("")
    durable.remove_leftovers(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(names[2:])


def test_tensors_that_share_memory_are_rejected() -> None:
    weight = torch.zeros(4, 3)
    with pytest.raises(ValueError, match="share memory"):
        durable.encode_tensors({"input": weight, "output": weight})
    with pytest.raises(ValueError, match="share memory"):
        durable.encode_tensors({"input": weight, "output": weight.view(12)[3:5]})


def test_separate_slices_of_one_storage_are_saved(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    durable.write_tensors(tmp_path / "t.safetensors", {"a": flat[:4], "b": flat[4:]})
    tensors = durable.read_tensors(tmp_path / "t.safetensors")
    assert torch.equal(tensors["a"], flat[:4])
    assert torch.equal(tensors["b"], flat[4:])


def test_run_folders_do_not_import_torch() -> None:
    check = "import sys, reefknot.lab.runs.folder; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
