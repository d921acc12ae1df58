"""The manifest of a folder: the size and the SHA-256 of its files, which are compared whenever a file is read.

A run folder and a cache entry each have a file MANIFEST.json. `read_bytes` and `write_bytes` replace the functions of
`files.py` for files that may be in such a folder or in a subfolder of it:

    manifest.create(folder)
    manifest.write_bytes(folder / "result.json", data)    # lists the new content, then writes it
    manifest.read_bytes(folder / "result.json")           # raises a DataError if the file has other content

A file is written after the manifest that lists it. The manifest keeps the hash of the old content too, so that a folder
stays valid if the process is killed between the two writes. The manifest ends with a SHA-256 of itself. Files that it
does not list, such as logs, and folders without a manifest are read without a check.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from reefknot.errors import DataError
from reefknot.storage import files

MANIFEST_FILE = "MANIFEST.json"
FORMAT = 1

Entry = dict[str, Any]
"""The entry of a file: `size`, `sha256`, and `previous`, the SHA-256 of the content that this content replaces."""


def create(folder: Path, paths: Iterable[Path] = ()) -> None:
    """Write the manifest of a folder. It lists the given files with their current content."""
    entries = {_name_in(folder, path): _hash_file(path) for path in sorted(paths)}
    _write(folder, entries)


def exists(folder: Path) -> bool:
    """Return whether a folder has a manifest."""
    return (folder / MANIFEST_FILE).is_file()


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raise a DataError if it is not the content that the manifest lists."""
    data = files.read_bytes(path)
    folder = _find_folder(path)
    if folder is None:
        return data
    try:
        entries = _read(folder)
    except DataError as error:
        raise DataError(f"{error}; restore it, or delete it to read the folder without checks") from error
    entry = entries.get(_name_in(folder, path))
    if entry is not None:
        try:
            _compare(path, entry, len(data), hashlib.sha256(data).hexdigest())
        except DataError as error:
            raise DataError(f"{error}; restore the file, or make it again") from error
    return data


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, after comparing the file with the manifest."""
    return files.decode_object(read_bytes(path), path)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of a file, and list the new content in the manifest of its folder if there is one."""
    folder = _find_folder(path)
    if folder is None:
        files.write_bytes(path, data)
        return
    with _locked(folder):
        _list(folder, path, {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        files.write_bytes(path, data)


def write_json(path: Path, value: Any) -> None:
    """Replace the content of a file with `value` as JSON, as `write_bytes` does."""
    write_bytes(path, files.encode_json(value))


def add(path: Path) -> None:
    """List the current content of a file that was not written by `write_bytes`, such as a finished log."""
    folder = _find_folder(path)
    if folder is not None and path.is_file():
        with _locked(folder):
            _list(folder, path, _hash_file(path))


def forget(path: Path) -> None:
    """Remove a file from the manifest, because its content is about to change many times."""
    folder = _find_folder(path)
    if folder is None:
        return
    with _locked(folder):
        entries = _read(folder)
        if entries.pop(_name_in(folder, path), None) is not None:
            _write(folder, entries)


def verify(folder: Path) -> None:
    """Compare all files of a folder with its manifest. Raise a DataError that names the first file that differs."""
    for name, entry in _read(folder).items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing")
        hashed = _hash_file(path)
        _compare(path, entry, hashed["size"], hashed["sha256"])


# -- the file MANIFEST.json ----------------------------------------------------------------------------------------


def _find_folder(path: Path) -> Path | None:
    """Return the folder whose manifest may list a file: the folder of the file, or the folder above it."""
    for folder in (path.parent, path.parent.parent):
        if exists(folder):
            return folder
    return None


def _name_in(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _read(folder: Path) -> dict[str, Entry]:
    """Return the entries of a manifest by the name of the file."""
    path = folder / MANIFEST_FILE
    content = files.decode_sealed(files.read_bytes(path), path)
    if content.get("format") != FORMAT:
        raise DataError(f"{path} has another format; use the version of Reefknot that wrote it")
    entries: dict[str, Entry] = content["files"]
    return entries


def _write(folder: Path, entries: dict[str, Entry]) -> None:
    files.write_bytes(folder / MANIFEST_FILE, files.encode_sealed({"format": FORMAT, "files": entries}))


def _list(folder: Path, path: Path, entry: Entry) -> None:
    """List new content of a file. The hash of its old content is kept until the file is written again."""
    entries = _read(folder)
    name = _name_in(folder, path)
    old_entry = entries.get(name)
    if old_entry and old_entry["sha256"] == entry["sha256"]:
        return
    if old_entry:
        entry = {**entry, "previous": old_entry["sha256"]}
    _write(folder, {**entries, name: entry})


def _compare(path: Path, entry: Entry, size: int, sha256: str) -> None:
    """Raise a DataError if a file has neither the listed content nor the content before it."""
    if sha256 in (entry["sha256"], entry.get("previous")):
        return
    difference = "does not match its SHA-256"
    if size != entry["size"]:
        difference = f"has {size:,} bytes instead of {entry['size']:,}"
    raise DataError(f"{path} is damaged: it {difference} in {MANIFEST_FILE}")


def _hash_file(path: Path) -> Entry:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size": path.stat().st_size, "sha256": sha256}


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time change the manifest of a folder, for example if two evaluations are saved at once."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock a folder
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
