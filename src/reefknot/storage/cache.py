"""A cache on disk for data that takes long to compute, such as encoded texts. It can be deleted at any time.

`load_or_create` reads a cache entry, and writes it first if it is missing. `file_hash` caches the SHA-256 of a file.
After `check_files`, which the option --check calls, both read their source files again.

    CACHE/.../ENTRY/                          a cache entry, which is a folder with a manifest (`manifest.py`)
    CACHE/.../.ENTRY@MACHINE-PROCESS-XXXX/    the entry while a process writes it
    CACHE/hashes/XXXX.json                    the SHA-256 of a file, with its path, size, mtime and ctime

An entry appears complete or not at all: it is written under a temporary name, flushed to disk and renamed. If several
processes write the same entry, one rename wins and the others use its result. All files of an entry are compared with
its manifest before the entry is read, and a damaged entry is written again.
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
from reefknot.storage import manifest
from reefknot.storage.progress import Notify, silent

T = TypeVar("T")

_checked_files: set[str] | None = None  # the files that were read again since `check_files`; None before that

_MAX_ATTEMPTS = 5  # an attempt fails only if another process replaces the entry at the same moment
_MIN_AGE_NS = 2_000_000_000  # a file that was modified more recently may change again within one clock tick


def cache_folder(cache: Path | None = None) -> Path:
    """Return `cache` if it is given, else REEFKNOT_CACHE from the environment, else ~/.cache/reefknot."""
    if cache is not None:
        return cache
    environment_cache = os.environ.get("REEFKNOT_CACHE")
    if environment_cache:
        return Path(environment_cache)
    try:
        return Path.home() / ".cache" / "reefknot"
    except RuntimeError as error:
        raise DataError("there is no home folder for the cache; set REEFKNOT_CACHE to a folder") from error


def load_or_create(
    entry: Path,
    write: Callable[[Path], None],
    read: Callable[[Path], T],
    notify: Notify = silent,
    *,
    always_write: bool = False,
) -> T:
    """Return a cache entry. Write it first if it is missing, damaged or from before entries had manifests.

    Args:
        entry: The folder of the entry.
        write: Writes the entry into an empty folder.
        read: Reads the entry, whose files match its manifest. It raises a `DataError` if the entry cannot be used.
        notify: Called with a message before a damaged entry is written again.
        always_write: Write the entry even if it is intact, because its sources are read again.
    """

    def read_if_intact(notify: Notify = silent) -> T | None:
        if not entry.exists():
            return None
        try:
            manifest.verify(entry)
            return read(entry)
        except DataError as error:
            notify(f"a cache entry is damaged and is written again: {error}")
            return None

    if always_write:
        durable.remove_folder(entry)
    for _ in range(_MAX_ATTEMPTS):
        value = read_if_intact(notify)
        if value is not None:
            return value
        _write_entry(entry, write, read_if_intact)
    raise DataError(f"{entry}: another process keeps replacing this cache entry; delete it and try again")


def check_files() -> None:
    """Let this process read every source file of the cache again once, even if its size and times are unchanged."""
    global _checked_files
    _checked_files = set()


def needs_check(path: Path) -> bool:
    """Return whether a file or a cache entry must be made again because of `check_files`. It is true once per path."""
    name = str(path.resolve())
    if _checked_files is None or name in _checked_files:
        return False
    _checked_files.add(name)
    return True


def file_hash(path: Path, cache: Path) -> str:
    """Return the SHA-256 of a file. The cache keeps it while path, size, mtime and ctime stay the same.

    Args:
        path: The file.
        cache: The folder of the cache.
    """
    try:
        # A stored hash is valid only for the same path, size and times. A program can set the modification time of a
        # file, but not the time of the last change of its inode, which is ctime.
        file_status = path.stat()
        resolved_path = str(path.resolve())
        identity = {
            "path": resolved_path,
            "size": file_status.st_size,
            "mtime_ns": file_status.st_mtime_ns,
            "ctime_ns": file_status.st_ctime_ns,
        }
        path_hash = hashlib.sha256(os.fsencode(resolved_path)).hexdigest()
        record_path = cache / "hashes" / f"{path_hash[:32]}.json"
        record = _read_hash_record(record_path)
        is_known = record is not None and all(record.get(key) == identity[key] for key in identity)
        if record is not None and is_known and not needs_check(path):
            return str(record["content_sha256"])

        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error

    age_ns = time.time_ns() - max(file_status.st_mtime_ns, file_status.st_ctime_ns)
    if age_ns > _MIN_AGE_NS:
        _write_hash_record(record_path, {**identity, "content_sha256": sha256})
    return sha256


def _read_hash_record(record_path: Path) -> dict[str, object] | None:
    """Return the stored hash of a file, with the file's path, size and times, or None."""
    with contextlib.suppress(DataError):
        record = durable.decode_sealed(durable.read_bytes(record_path), record_path)
        if isinstance(record.get("content_sha256"), str):
            return record
    return None


def _write_hash_record(record_path: Path, record: dict[str, object]) -> None:
    """Store the hash of a file. A failure is ignored, because the hash can be computed again next time."""
    with contextlib.suppress(OSError, ResourceError):
        record_path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_bytes(record_path, durable.encode_sealed(record))


def _write_entry(entry: Path, write: Callable[[Path], None], read_if_intact: Callable[[], object]) -> None:
    """Write a cache entry and its manifest in a temporary folder, flush it to disk and rename it."""
    with durable.writing(entry):
        entry.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(entry.parent)
        temporary = _create_temporary(entry)
        try:
            write(temporary)
            paths = list(temporary.rglob("*"))
            manifest.create(temporary, [path for path in paths if path.is_file()])
            for path in (*paths, temporary):
                durable.sync(path)
            _move_into_place(temporary, entry, read_if_intact)
            durable.sync(entry.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _move_into_place(temporary: Path, entry: Path, read_if_intact: Callable[[], object]) -> None:
    """Rename the temporary folder to `entry`, unless another process has written an intact entry first."""
    try:
        temporary.replace(entry)
    except OSError:
        if not entry.exists():
            raise
        is_damaged = read_if_intact() is None
        if is_damaged:
            trash = _create_temporary(entry)
            entry.replace(trash / entry.name)
            temporary.replace(entry)
            shutil.rmtree(trash, ignore_errors=True)


def _create_temporary(entry: Path) -> Path:
    """Create an empty folder next to `entry`. Its name has machine and process, because machines may share a cache."""
    prefix = f".{entry.name}@{platform.node()}-{os.getpid()}-"
    return Path(tempfile.mkdtemp(prefix=prefix, dir=entry.parent))


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of processes of this machine that have ended."""
    temporary_name = re.compile(rf"\..+@{re.escape(platform.node())}-(?P<process_id>\d+)-\w+")
    for path in folder.iterdir():
        match = temporary_name.fullmatch(path.name)
        if not match:
            continue
        try:
            os.kill(int(match["process_id"]), 0)  # signal 0 only checks whether the process exists
        except ProcessLookupError:
            durable.remove(path)
        except PermissionError:
            pass  # the process exists and belongs to another user
