"""The cache folder, which stores data that is derived from texts. It can be deleted at any time.

An entry is a folder that appears complete or not at all: it is written under a temporary name, flushed to disk and
renamed. If several processes write the same entry, one rename wins and the others use its result. Temporary folders of
killed processes are removed when the same machine next writes an entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from reefknot.errors import DataError, ResourceError
from reefknot.storage import files as durable

T = TypeVar("T")

_ATTEMPTS = 5  # an attempt fails only if another process replaces the entry at the same moment
_SETTLED_NS = 2_000_000_000  # a file that was modified more recently may change again within one clock tick


def cache_folder(cache: Path | None = None) -> Path:
    """Return `cache` if it is given, else REEFKNOT_CACHE from the environment, else ~/.cache/reefknot."""
    if cache is not None:
        return cache
    variable = os.environ.get("REEFKNOT_CACHE")
    if variable:
        return Path(variable)
    try:
        return Path.home() / ".cache" / "reefknot"
    except RuntimeError as error:
        raise DataError("there is no home folder for the cache; set REEFKNOT_CACHE to a folder") from error


def load_or_create(entry: Path, fill: Callable[[Path], None], read: Callable[[Path], T | None]) -> T:
    """Return a cache entry, and write it first if it is missing or damaged.

    Args:
        entry: The folder of the entry.
        fill: Writes the entry into an empty folder.
        read: Reads the entry. It returns None if the entry is missing or damaged.
    """
    for _ in range(_ATTEMPTS):
        value = read(entry)
        if value is not None:
            return value
        with durable.writing(entry):
            entry.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(entry.parent)
            temporary = _temporary(entry)
            try:
                fill(temporary)
                for path in (*temporary.iterdir(), temporary):
                    durable.sync(path)
                _rename(temporary, entry, read)
                durable.sync(entry.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    raise DataError(f"{entry}: another process keeps replacing this cache entry; delete it and try again")


def load_or_rebuild(
    entry: Path, fill: Callable[[Path], None], read: Callable[[Path], T], notify: Callable[[str], None]
) -> T:
    """Return a cache entry as `cached` does, with a `read` that raises a DataError if the entry is damaged.

    Args:
        entry: The folder of the entry.
        fill: Writes the entry into an empty folder.
        read: Reads the entry. It raises a DataError if the entry is damaged.
        notify: Called with the error before the entry is written again.
    """

    def read_if_intact(folder: Path) -> T | None:
        if not folder.exists():
            return None
        try:
            return read(folder)
        except DataError as damage:
            notify(f"the cached text is damaged and is encoded again: {damage}")
            return None

    return load_or_create(entry, fill, read_if_intact)


def file_hash(path: Path, cache: Path) -> str:
    """Return the SHA-256 of a file. The cache keeps it while path, size and modification time stay the same."""
    try:
        stat = path.stat()
        location = str(path.resolve())
        identity = {"path": location, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        record = cache / "hashes" / f"{hashlib.sha256(os.fsencode(location)).hexdigest()[:32]}.json"
        stored = _read_record(record)
        if stored is not None and all(stored.get(key) == identity[key] for key in identity):
            return str(stored["sha256"])
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if time.time_ns() - stat.st_mtime_ns > _SETTLED_NS:
        with contextlib.suppress(OSError, ResourceError):  # a hash that cannot be stored is computed again
            record.parent.mkdir(parents=True, exist_ok=True)
            durable.write_json(record, {**identity, "sha256": sha256})
    return sha256


def _read_record(path: Path) -> dict[str, object] | None:
    with contextlib.suppress(DataError):
        record = durable.decode_object(durable.read_bytes(path), path)
        if isinstance(record.get("sha256"), str):
            return record
    return None


def _rename(temporary: Path, entry: Path, read: Callable[[Path], T | None]) -> None:
    try:
        temporary.replace(entry)
    except OSError:
        if not entry.exists():
            raise
        if read(entry) is None:  # damaged
            old = _temporary(entry)
            entry.replace(old / entry.name)
            temporary.replace(entry)
            shutil.rmtree(old, ignore_errors=True)


def _temporary(entry: Path) -> Path:
    """Create an empty folder next to `entry`. Its name has machine and process, because machines may share a cache."""
    return Path(tempfile.mkdtemp(prefix=f".{entry.name}@{platform.node()}-{os.getpid()}-", dir=entry.parent))


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of processes of this machine that have ended."""
    ours = re.compile(rf"\..+@{re.escape(platform.node())}-(\d+)-\w+")
    for path in folder.iterdir():
        match = ours.fullmatch(path.name)
        if match:
            try:
                os.kill(int(match[1]), 0)  # signal 0 only checks whether the process exists
            except ProcessLookupError:
                durable.remove(path)
            except PermissionError:
                pass  # the process exists and belongs to another user
