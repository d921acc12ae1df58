"""Checkpoints that survive a kill at any instant: prepared aside, checksummed, then renamed.

    RUN/checkpoints/step_00000500/model.safetensors    the parameters
                                  state.safetensors    everything else that is a tensor
                                  state.json           everything that is not
                                  MANIFEST.json        sizes and SHA-256 of the three, written last
                    pause_00000512/                    the same, of where training was asked to stop
                    mean_00000500/                     the same, of weights averaged over the last few steps
    RUN/best                                           a link to one of them

A checkpoint exists when its folder has its final name and its manifest verifies. Nothing is pickled, so a
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

from reefknot.errors import DataError, ResourceError
from reefknot.lab.config.settings import Settings
from reefknot.storage import files as durable

if TYPE_CHECKING:
    from torch import Tensor

MODEL: Final = "model.safetensors"
STATE: Final = "state.safetensors"
VALUES: Final = "state.json"
MANIFEST: Final = "MANIFEST.json"
# Fixed names, so that no manifest can make us read another file.
Name = Literal["model.safetensors", "state.safetensors", "state.json"]
_Stamp = tuple[tuple[int, int, int], ...]  # inode, size and time of the last change, of each file
RESTORE = "restore it, or train the row again with another --out"
"""What to do where a file of a run is damaged or gone."""
_FOLDER = re.compile(r"(step|pause|mean)_(\d{8,})")
_HEADER_BYTES = 256  # a generous guess of what one tensor adds to a file's header


@dataclass(frozen=True)
class Checkpoint:
    """What is saved, and where it lies; one that was loaded is verified."""

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
        self._sound: dict[Path, _Stamp | None] = {}  # as they were when every byte was last known

    def save(
        self,
        step: int,
        model: dict[str, Tensor],
        state: dict[str, Tensor],
        values: dict[str, Any],
        *,
        fingerprint: str,
        pause: bool = False,
    ) -> Path:
        """Commit one step, then prune. Whatever goes wrong, the earlier checkpoints are untouched.

        A `pause` is one that would not be there had nobody asked to stop: it goes with the next one, and is in no mean.
        """
        path = self.folder / f"pause_{step:08d}" if pause else self.path_of(step)
        if not self._is_sound(path):
            self._commit(Checkpoint(path, step, model, state, values, fingerprint))
            self._prune(path)
        return path

    def average(self, last: int) -> Path:
        """Commit the mean of the last so many steps' weights, or of all where there are fewer, and mark it as the best.

        Sums are float64; what is no float is the last step's. Nothing resumes from a mean, and none is pruned.
        """
        if last < 1:
            raise ValueError("last must be at least 1")
        steps = [path for path in self._newest_first() if _is_step(path)][:last]
        if not steps:
            raise DataError(f"{self.run} has no checkpoint that could be averaged: train it first (reefknot train)")
        path = self.folder / steps[0].name.replace("step", "mean")
        if not self._is_sound(path):
            self._commit(_mean(path, steps))
        self._mark_best(path)
        return path

    def _commit(self, made: Checkpoint) -> None:
        """Prepare a checkpoint aside, then give it its name."""
        path = made.path
        encoded = durable.encode_json(made.values)
        tensors = [*made.model.values(), *made.state.values()]
        needed = len(encoded) + sum(t.numel() * t.element_size() + _HEADER_BYTES for t in tensors)
        prepared = durable.temporary(path)
        try:
            with durable.writing(path):
                self._make_room(needed)
                prepared.mkdir()
                files: dict[Name, _File] = {
                    MODEL: _put(prepared / MODEL, durable.encode_tensors(made.model)),
                    STATE: _put(prepared / STATE, durable.encode_tensors(made.state)),
                    VALUES: _put(prepared / VALUES, encoded),
                }
                manifest = _Manifest(step=made.step, fingerprint=made.fingerprint, files=files)
                durable.put(prepared / MANIFEST, manifest.encode())
                durable.sync(prepared)
                if path.exists():
                    shutil.rmtree(path)  # damaged: a sound one is not made again
                stamp = _stamp(prepared)
                durable.commit(prepared, path)
                self._sound[path] = stamp
        except BaseException:
            durable.remove(prepared)
            raise

    def load(self, path: Path) -> Checkpoint:
        """Read one checkpoint: the very bytes that were checked. A `DataError` names the file at fault."""
        stamp = _stamp(path)
        manifest = _read_manifest(path)
        found = Checkpoint(
            path=path,
            step=manifest.step,
            model=durable.decode_tensors(_read(path, MODEL, manifest), path / MODEL),
            state=durable.decode_tensors(_read(path, STATE, manifest), path / STATE),
            values=durable.decode_object(_read(path, VALUES, manifest), path / VALUES),
            fingerprint=manifest.fingerprint,
        )
        self._sound[path] = stamp
        return found

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
        self._mark_best(path)

    def _mark_best(self, path: Path) -> None:
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
        if path.parent != self.folder or not _FOLDER.fullmatch(path.name) or not path.is_dir():
            raise DataError(f"{link} points at {link.readlink()}, which is no checkpoint of this run")
        return path

    def averaged(self) -> list[str]:
        """The steps whose mean is marked as the best; none where it is a step itself."""
        if (best := self.best()) is None:
            return []
        values = durable.decode_object(_read(best, VALUES, _read_manifest(best)), best / VALUES)
        return list(values.get("mean_of", []))

    def _newest_first(self) -> list[Path]:
        """Where training can go on from: steps and pauses."""
        folders = (*self.folder.glob("step_*"), *self.folder.glob("pause_*"))
        found = [(int(match[2]), path) for path in folders if (match := _FOLDER.fullmatch(path.name))]
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
        """Keep `newest`, further sound steps up to `keep`, and the best; the rest goes, damaged ones too."""
        link = self.run / "best"
        best = link.readlink().name if link.is_symlink() else None
        kept = int(_is_step(newest))
        # Reading them all after every save would cost more than saving, so one that was sound counts as such while its
        # files look untouched. A bad disk's rot looks untouched; yet no older step goes before the oldest of `keep` was
        # read whole, just now: whatever rotted between them, that one and the newest, just written, are sound.
        for path in self._newest_first():
            if path == newest:
                continue
            if kept < self.keep and _is_step(path) and self._is_sound(path, afresh=kept == self.keep - 1):
                kept += 1
            elif path.name != best:
                durable.remove(path)
                self._sound.pop(path, None)

    def _is_sound(self, path: Path, *, afresh: bool = True) -> bool:
        """Whether every byte is as the manifest says: read again if `afresh`, or if a file changed since it was so."""
        stamp = _stamp(path)
        if not afresh and stamp is not None and stamp == self._sound.get(path):
            return True
        try:
            manifest = _read_manifest(path)
            for name in get_args(Name):
                _read(path, name, manifest)
        except DataError:
            return False
        self._sound[path] = stamp
        return True


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
    match = _FOLDER.fullmatch(folder.resolve().name)
    if match and int(match[2]) != manifest.step:
        raise DataError(f"{path} is of step {manifest.step}, not of the step its folder is named after")
    return manifest


def _read(folder: Path, name: Name, manifest: _Manifest) -> bytes:
    """The bytes of one file, once they agree with the manifest."""
    path = folder / name
    says = manifest.files[name]
    if path.is_file() and path.stat().st_size != says.size:  # before it is read: it may be anything by now
        raise DataError(f"{path} has {path.stat().st_size} bytes, its manifest says {says.size}; {RESTORE}")
    data = durable.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != says.sha256:
        raise DataError(f"{path} does not have the SHA-256 its manifest says; {RESTORE}")
    return data


def _mean(path: Path, steps: list[Path]) -> Checkpoint:
    """The mean of some steps, the newest first, as a checkpoint of weights alone."""
    newest, *others = steps
    manifest, model = _read_weights(newest)
    sums = {name: tensor.double() for name, tensor in model.items() if tensor.is_floating_point()}
    for step in others:
        other, weights = _read_weights(step)
        if other.fingerprint != manifest.fingerprint or _shapes(weights) != _shapes(model):
            raise DataError(f"{step} is a checkpoint of another run than {newest}, so they have no mean; remove it")
        for name, total in sums.items():
            total += weights[name]
    mean = {name: (total / len(steps)).to(model[name].dtype) for name, total in sums.items()}
    values = {"mean_of": [step.name for step in reversed(steps)]}
    return Checkpoint(path, manifest.step, model | mean, {}, values, manifest.fingerprint)


def _read_weights(step: Path) -> tuple[_Manifest, dict[str, Tensor]]:
    try:
        manifest = _read_manifest(step)
        return manifest, durable.decode_tensors(_read(step, MODEL, manifest), step / MODEL)
    except DataError as error:
        raise DataError(
            f"{error}, so it cannot be averaged; remove {step.name} and all later ones, and run the same command again"
        ) from error


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _is_step(path: Path) -> bool:
    return path.name.startswith("step_")


def _stamp(folder: Path) -> _Stamp | None:
    """What a write to any file of a checkpoint would change, or None where one is missing."""
    try:
        found = [(folder / name).stat() for name in (MANIFEST, *get_args(Name))]
    except OSError:
        return None
    return tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in found)
