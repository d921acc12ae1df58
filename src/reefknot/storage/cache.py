"""The cache folder: what is made once from a text and read ever after. Deleting it is always safe.

An entry is a folder that appears complete or not at all: it is filled under a temporary name, flushed to disk
and renamed. Several processes may make the same entry at once; one rename wins and the others use its result.
What a killed process was filling is removed when this machine next fills an entry.
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

_ATTEMPTS = 5  # each one is lost only when another process swaps the entry in the same instant
_SETTLED_NS = 2_000_000_000  # a file changed more recently than this could change again within one clock tick


def cache_folder(cache: Path | None = None) -> Path:
    """The folder given, else the environment's REEFKNOT_CACHE, else ~/.cache/reefknot."""
    if cache is not None:
        return cache
    named = os.environ.get("REEFKNOT_CACHE")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache" / "reefknot"
    except RuntimeError as error:
        raise DataError("there is no home folder for the cache; name one with REEFKNOT_CACHE") from error


def cached(entry: Path, fill: Callable[[Path], None], read: Callable[[Path], T | None]) -> T:
    """What `read` makes of the folder `entry`; when it finds no sound one (None), `fill` writes it first."""
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


def mended(entry: Path, fill: Callable[[Path], None], read: Callable[[Path], T], say: Callable[[str], None]) -> T:
    """As `cached`, for a `read` that raises DataError where the entry is damaged; `say` hears of it."""

    def sound(folder: Path) -> T | None:
        if not folder.exists():
            return None
        try:
            return read(folder)
        except DataError as damage:
            say(f"the cached text is damaged and is made again: {damage}")
            return None

    return cached(entry, fill, sound)


def file_hash(path: Path, cache: Path) -> str:
    """SHA-256 of a file, remembered in the cache while its path, size and time of change stay the same."""
    try:
        facts = path.stat()
        place = str(path.resolve())
        seen = {"path": place, "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}
        record = cache / "hashes" / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.json"
        remembered = _read_record(record)
        if remembered is not None and all(remembered.get(key) == seen[key] for key in seen):
            return str(remembered["sha256"])
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if time.time_ns() - facts.st_mtime_ns > _SETTLED_NS:
        with contextlib.suppress(OSError, ResourceError):  # what cannot be remembered is computed again
            record.parent.mkdir(parents=True, exist_ok=True)
            durable.write_json(record, {**seen, "sha256": found})
    return found


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
            aside = _temporary(entry)
            entry.replace(aside / entry.name)
            temporary.replace(entry)
            shutil.rmtree(aside, ignore_errors=True)


def _temporary(entry: Path) -> Path:
    """An empty folder beside `entry`, with its owner in the name: a cache may be shared by several machines."""
    return Path(tempfile.mkdtemp(prefix=f".{entry.name}@{platform.node()}-{os.getpid()}-", dir=entry.parent))


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of this machine's dead processes; of another machine's nobody here can tell."""
    ours = re.compile(rf"\..+@{re.escape(platform.node())}-(\d+)-\w+")
    for path in folder.iterdir():
        match = ours.fullmatch(path.name)
        if match:
            try:
                os.kill(int(match[1]), 0)  # signal 0 only asks whether the process is there
            except ProcessLookupError:
                durable.remove(path)
            except PermissionError:
                pass  # alive, and another user's
