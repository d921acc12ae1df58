"""Checkpoints that survive a kill at any instant: prepared aside, checksummed, then renamed.

    RUN/checkpoints/step_00000500/model.safetensors    the parameters
                                  state.safetensors    everything else that is a tensor
                                  state.json           everything that is not
                                  MANIFEST.json        sizes and SHA-256 of the three, written last
    RUN/best                                           a link to one of them

A step exists when its folder has its final name and its manifest verifies. Nothing is pickled, so a
checkpoint from a stranger can be damaged or wrong, but it cannot run code.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from pydantic import ValidationError

from reefknot import durable
from reefknot.errors import DataError, ResourceError
from reefknot.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

MODEL: Final = "model.safetensors"
STATE: Final = "state.safetensors"
VALUES: Final = "state.json"
MANIFEST: Final = "MANIFEST.json"
# Fixed names, so that no manifest can make us read another file.
Name = Literal["model.safetensors", "state.safetensors", "state.json"]
_STEP = re.compile(r"step_(\d{8,})")
_HEADER_BYTES = 256  # a generous guess of what one tensor adds to a file's header


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: what was saved, and where it lies."""

    path: Path
    step: int
    model: dict[str, Tensor]
    state: dict[str, Tensor]
    values: dict[str, Any]
    fingerprint: str


class _File(Settings):
    size: int
    sha256: str


class _Manifest(Settings):
    format: Literal[2] = 2
    step: int
    fingerprint: str
    files: dict[Name, _File]
    sha256: str = ""

    def encode(self) -> bytes:
        """Ends with a checksum of itself, so that every byte of a checkpoint is under one."""
        body = self.model_dump(exclude={"sha256"})
        return durable.encode_json({**body, "sha256": hashlib.sha256(durable.encode_json(body)).hexdigest()})


class Checkpoints:
    """The checkpoints of one run. One process at a time may save; any number may load."""

    def __init__(self, run_folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError("keep must be at least 1")
        self.run = Path(run_folder)
        self.folder = self.run / "checkpoints"
        self.keep = keep

    def save(
        self,
        step: int,
        model: dict[str, Tensor],
        state: dict[str, Tensor],
        values: dict[str, Any],
        *,
        fingerprint: str,
    ) -> Path:
        """Commit one step, then prune. Whatever goes wrong, the earlier checkpoints are untouched."""
        path = self.path_of(step)
        if path.exists() and _is_sound(path):
            return path
        encoded = durable.encode_json(values)
        tensors = [*model.values(), *state.values()]
        needed = len(encoded) + sum(t.numel() * t.element_size() + _HEADER_BYTES for t in tensors)
        prepared = durable.temporary(path)
        try:
            with durable.writing(path):
                self._make_room(needed)
                prepared.mkdir()
                files: dict[Name, _File] = {
                    MODEL: _put(prepared / MODEL, durable.encode_tensors(model)),
                    STATE: _put(prepared / STATE, durable.encode_tensors(state)),
                    VALUES: _put(prepared / VALUES, encoded),
                }
                manifest = _Manifest(step=step, fingerprint=fingerprint, files=files)
                durable.put(prepared / MANIFEST, manifest.encode())
                durable.sync(prepared)
                if path.exists():
                    shutil.rmtree(path)  # damaged: a sound one has returned above
                durable.commit(prepared, path)
        except BaseException:
            durable.remove(prepared)
            raise
        self._prune(path)
        return path

    def load(self, path: Path) -> Checkpoint:
        """Read one checkpoint: the very bytes that were checked. A `DataError` names the file at fault."""
        manifest = _read_manifest(path)
        return Checkpoint(
            path=path,
            step=manifest.step,
            model=durable.decode_tensors(_read(path, MODEL, manifest), path / MODEL),
            state=durable.decode_tensors(_read(path, STATE, manifest), path / STATE),
            values=durable.decode_object(_read(path, VALUES, manifest), path / VALUES),
            fingerprint=manifest.fingerprint,
        )

    def latest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest sound checkpoint, or None where none was ever committed; `say` hears of damaged ones."""
        faults: list[str] = []
        for path in self._newest_first():
            try:
                found = self.load(path)
            except DataError as error:
                faults.append(str(error))
                continue
            for fault in faults:
                say(f"{fault}; using {path.name}")
            return found
        if faults:
            raise DataError(f"no checkpoint of {self.run} can be used: {faults[0]}; train to another --out")
        return None

    def path_of(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def mark_best(self, step: int) -> None:
        """Point RUN/best at a committed step."""
        path = self.path_of(step)
        if not path.is_dir():
            raise DataError(f"{path} is missing, so it cannot be marked as the best checkpoint")
        link = self.run / "best"
        prepared = durable.temporary(link)
        durable.remove_leftovers(self.run)
        with durable.writing(link):
            prepared.symlink_to(path.relative_to(self.run))
            durable.commit(prepared, link)

    def best(self) -> Path | None:
        """The folder RUN/best points at, or None when no step was marked."""
        link = self.run / "best"
        if not link.is_symlink():
            return link if link.is_dir() else None  # a folder: the run was copied with its links followed
        path = self.run / link.readlink()
        if path.parent != self.folder or not _STEP.fullmatch(path.name) or not path.is_dir():
            raise DataError(f"{link} points at {link.readlink()}, which is no checkpoint of this run")
        return path

    def _newest_first(self) -> list[Path]:
        found = [(int(m[1]), p) for p in self.folder.glob("step_*") if (m := _STEP.fullmatch(p.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def _make_room(self, needed: int) -> None:
        """Make the folder, clear what a killed process left in it, and see that `needed` bytes are free."""
        if not self.folder.is_dir():
            self.folder.mkdir()
            durable.sync(self.run)
        durable.remove_leftovers(self.folder)
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if disk.f_blocks and free < needed:  # some network file systems report no blocks at all
            raise ResourceError(
                f"a checkpoint needs {needed:,} bytes and {self.folder} has {free:,} free; "
                "free some space and run the same command again"
            )

    def _prune(self, newest: Path) -> None:
        """Keep `newest`, further sound ones up to `keep`, and the best; the rest goes, damaged ones too."""
        link = self.run / "best"
        best = link.readlink().name if link.is_symlink() else None
        kept = 1
        for path in self._newest_first():
            if path == newest:
                continue
            if kept < self.keep and _is_sound(path):
                kept += 1
            elif path.name != best:
                durable.remove(path)


def _put(path: Path, data: bytes) -> _File:
    """Write one file of a checkpoint, and tell what the manifest is to say of it."""
    durable.put(path, data)
    return _File(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _read_manifest(folder: Path) -> _Manifest:
    path = folder / MANIFEST
    data = durable.read_bytes(path)
    try:
        manifest = _Manifest.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, fault["loc"])) or "JSON"
        raise DataError(f"{path} is torn or of another format ({field}: {fault['msg']})") from error
    if manifest.encode() != data:
        raise DataError(f"{path} does not have the SHA-256 it says")
    if len(manifest.files) < len(get_args(Name)):
        raise DataError(f"{path} does not list all of {', '.join(get_args(Name))}")
    match = _STEP.fullmatch(folder.resolve().name)
    if match and int(match[1]) != manifest.step:
        raise DataError(f"{path} is of step {manifest.step}, not of the step its folder is named after")
    return manifest


def _read(folder: Path, name: Name, manifest: _Manifest) -> bytes:
    """The bytes of one file, once they agree with the manifest."""
    path = folder / name
    says = manifest.files[name]
    if path.is_file() and path.stat().st_size != says.size:  # before it is read: it may be anything by now
        raise DataError(f"{path} has {path.stat().st_size} bytes, its manifest says {says.size}")
    data = durable.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != says.sha256:
        raise DataError(f"{path} does not have the SHA-256 its manifest says")
    return data


def _is_sound(path: Path) -> bool:
    try:
        manifest = _read_manifest(path)
        for name in get_args(Name):
            _read(path, name, manifest)
    except DataError:
        return False
    return True
