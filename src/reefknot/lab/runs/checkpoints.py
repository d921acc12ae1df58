"""Checkpoints that survive a kill at any time: written to a temporary folder, checksummed, then renamed.

Start reading at `Checkpoints`, which saves, loads and deletes the checkpoints of one run folder, and marks the best
checkpoint. A run is one training of a model. Its folder, RUN, contains:

    RUN/checkpoints/step_00000500/model.safetensors    the parameters
                                  state.safetensors    all other tensors of the training state
                                  state.json           values of the training state that are not tensors
                                  MANIFEST.json        sizes and SHA-256 of the three files, written last
                    pause_00000512/                    the same files, saved when training was interrupted
                    mean_00000500/                     the same files, with weights averaged over the last few steps
    RUN/best                                           a link to one of these folders

A checkpoint exists when its folder has its final name and its manifest verifies. Nothing is pickled, so a
checkpoint from an untrusted source can be damaged or wrong, but it cannot run code.
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
from reefknot.storage import files

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE: Final = "model.safetensors"
STATE_FILE: Final = "state.safetensors"
VALUES_FILE: Final = "state.json"
MANIFEST_FILE: Final = "MANIFEST.json"
FileName = Literal["model.safetensors", "state.safetensors", "state.json"]
"""The files that a manifest lists. Their names are fixed, so that a manifest cannot make us read any other file."""
RESTORE_ADVICE = "restore it, or train the row again with another --out"
"""The end of messages about a damaged or missing file of a run."""
_FileStats = tuple[tuple[int, int, int], ...]  # inode, size and modification time of each file of a checkpoint
_FOLDER_NAME = re.compile(r"(step|pause|mean)_(\d{8,})")
_HEADER_BYTES = 256  # a generous estimate of the size of a tensor's entry in the header of a file


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint and its folder. A checkpoint returned by `load` has been verified."""

    path: Path
    step: int
    weights: dict[str, Tensor]
    """The parameters and buffers of the model (model.safetensors)."""
    state_tensors: dict[str, Tensor]
    """All other tensors of the training state, such as those of the optimiser (state.safetensors)."""
    state_values: dict[str, Any]
    """Values of the training state that are not tensors, such as the step (state.json)."""
    fingerprint: str
    """Hash of the settings of the run."""


class _FileEntry(Settings):
    """The entry of one file in a manifest."""

    size: int
    sha256: str


class _Manifest(Settings):
    """The content of MANIFEST.json."""

    format: Literal[2] = 2
    step: int
    fingerprint: str
    files: dict[FileName, _FileEntry]
    sha256: str = ""

    def encode(self) -> bytes:
        """Return JSON that ends with a checksum of itself, so that every byte of a checkpoint is covered."""
        return files.encode_sealed(self.model_dump(exclude={"sha256"}))


class Checkpoints:
    """The checkpoints of one run. One process at a time may save; any number may load.

        checkpoints = Checkpoints(run_folder)
        checkpoints.save(500, weights, state_tensors, state_values, fingerprint=config_hash)
        checkpoints.mark_best(500)
        checkpoint = checkpoints.load_latest(notify=print)

    Args:
        run_folder: The folder of the run.
        keep: Number of recent steps to keep when `save` deletes old checkpoints (`training.keep` in a recipe).
    """

    def __init__(self, run_folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError("keep must be at least 1")
        self.run_folder = Path(run_folder)
        self.folder = self.run_folder / "checkpoints"
        self._num_steps_to_keep = keep
        # The stats of the files of each checkpoint when every byte of them was last verified.
        self._verified_stats: dict[Path, _FileStats | None] = {}

    # -- save and load ---------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        weights: dict[str, Tensor],
        state_tensors: dict[str, Tensor],
        state_values: dict[str, Any],
        *,
        fingerprint: str,
        pause: bool = False,
    ) -> Path:
        """Commit a checkpoint, then delete old checkpoints. If the commit fails, earlier checkpoints are untouched.

        An intact checkpoint of the same step is kept and not written again.

        Args:
            step: The step of the training.
            weights: The parameters and buffers of the model.
            state_tensors: All other tensors of the training state.
            state_values: Values of the training state that are not tensors, as plain JSON.
            fingerprint: Hash of the settings of the run.
            pause: Whether the checkpoint is saved only because training was interrupted. The next checkpoint replaces
                it, and it is never part of an average.

        Returns:
            The folder of the checkpoint.
        """
        if pause:
            path = self.folder / f"pause_{step:08d}"
        else:
            path = self.step_path(step)
        if self._verify(path):
            return path

        checkpoint = Checkpoint(
            path=path,
            step=step,
            weights=weights,
            state_tensors=state_tensors,
            state_values=state_values,
            fingerprint=fingerprint,
        )
        self._commit(checkpoint)
        self._delete_old(newest=path)
        return path

    def save_average(self, num_steps: int) -> Path:
        """Commit the mean of the weights of the last steps, and mark it as the best checkpoint.

        Sums are computed in float64. Tensors that are not floating point are copied from the newest step. Training
        never resumes from a mean, and a mean is never deleted.

        Args:
            num_steps: The number of steps to average. If there are fewer steps, all of them are averaged.

        Returns:
            The folder of the mean.
        """
        if num_steps < 1:
            raise ValueError("num_steps must be at least 1")
        all_step_paths = [path for path in self._newest_first() if _is_step(path)]
        step_paths = all_step_paths[:num_steps]
        if not step_paths:
            raise DataError(f"{self.run_folder} has no checkpoint to average: train it first (reefknot train)")

        mean_path = self.folder / step_paths[0].name.replace("step", "mean")
        if not self._verify(mean_path):
            self._commit(_compute_mean(mean_path, step_paths))
        self._link_best(mean_path)
        return mean_path

    def _commit(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint to a temporary folder, then rename the folder."""
        path = checkpoint.path
        encoded_values = files.encode_json(checkpoint.state_values)
        needed_bytes = len(encoded_values)
        for tensor in (*checkpoint.weights.values(), *checkpoint.state_tensors.values()):
            needed_bytes += tensor.numel() * tensor.element_size() + _HEADER_BYTES

        temporary = files.temporary_path(path)
        try:
            with files.writing(path):
                self._prepare_folder(needed_bytes)
                temporary.mkdir()
                _write_files(temporary, checkpoint, encoded_values)
                if path.exists():
                    shutil.rmtree(path)  # it is damaged, because intact checkpoints are never written again
                stats = _file_stats(temporary)
                files.commit(temporary, path)
                self._verified_stats[path] = stats
        except BaseException:
            files.remove(temporary)
            raise

    def load(self, path: Path) -> Checkpoint:
        """Read and verify a checkpoint. Only bytes that were verified are decoded.

        Raises:
            DataError: A file is missing or damaged. The message names it.
        """
        stats = _file_stats(path)
        manifest = _read_manifest(path)
        weights = _read_tensors(path, MODEL_FILE, manifest)
        state_tensors = _read_tensors(path, STATE_FILE, manifest)
        state_values = _read_values(path, manifest)
        self._verified_stats[path] = stats
        return Checkpoint(
            path=path,
            step=manifest.step,
            weights=weights,
            state_tensors=state_tensors,
            state_values=state_values,
            fingerprint=manifest.fingerprint,
        )

    def load_latest(self, notify: Callable[[str], None]) -> Checkpoint | None:
        """Load the newest intact checkpoint, or return None if no checkpoint was ever committed.

        Args:
            notify: Called with a message about every damaged checkpoint that was skipped.
        """
        error_messages: list[str] = []
        for path in self._newest_first():
            try:
                checkpoint = self.load(path)
            except DataError as error:
                error_messages.append(str(error))
                continue
            for message in error_messages:
                notify(f"{message}; using {path.name}")
            return checkpoint
        if error_messages:
            raise DataError(f"no checkpoint of {self.run_folder} can be used: {error_messages[0]}; use another --out")
        return None

    def step_path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step, whether it exists or not."""
        return self.folder / f"step_{step:08d}"

    def describe_kept(self) -> str:
        """Return the beginning of a sentence that says whether training has saved a checkpoint."""
        return "The last checkpoint is kept" if self._newest_first() else "No checkpoint was saved"

    # -- the best checkpoint ---------------------------------------------------------------------------------------

    def mark_best(self, step: int) -> None:
        """Point RUN/best at a committed step."""
        path = self.step_path(step)
        if not path.is_dir():
            raise DataError(f"{path} is missing, so it cannot be marked as the best checkpoint")
        self._link_best(path)

    def _link_best(self, path: Path) -> None:
        """Replace the link RUN/best by a link to the checkpoint at `path`, in one atomic rename."""
        link = self.run_folder / "best"
        temporary = files.temporary_path(link)
        files.remove_leftovers(self.run_folder)
        with files.writing(link):
            temporary.symlink_to(path.relative_to(self.run_folder))
            if link.is_dir() and not link.is_symlink():
                files.remove(link)  # a link cannot replace the folder of a run that was copied with its links resolved
            files.commit(temporary, link)

    def best_path(self) -> Path | None:
        """Return the folder that RUN/best points to, or None if no checkpoint was marked as the best."""
        link = self.run_folder / "best"
        if not link.is_symlink():
            # It is a folder if the run was copied with its links resolved.
            return link if link.is_dir() else None
        path = self.run_folder / link.readlink()
        is_checkpoint = path.parent == self.folder and _FOLDER_NAME.fullmatch(path.name) and path.is_dir()
        if not is_checkpoint:
            raise DataError(f"{link} points to {link.readlink()}, which is not a checkpoint of this run")
        return path

    def averaged_steps(self) -> list[str]:
        """Return the names of the steps whose mean is marked as the best. The list is empty if the best is a step."""
        best_path = self.best_path()
        if best_path is None:
            return []
        manifest = _read_manifest(best_path)
        state_values = _read_values(best_path, manifest)
        return list(state_values.get("mean_of", []))

    # -- the folder, and what is deleted from it -------------------------------------------------------------------

    def _newest_first(self) -> list[Path]:
        """Return the folders of the checkpoints that training can resume from: steps and pauses."""
        numbered_paths = []
        for path in (*self.folder.glob("step_*"), *self.folder.glob("pause_*")):
            match = _FOLDER_NAME.fullmatch(path.name)
            if match:
                numbered_paths.append((int(match[2]), path))
        return [path for _, path in sorted(numbered_paths, reverse=True)]

    def _prepare_folder(self, needed_bytes: int) -> None:
        """Create the folder, remove what a killed process left in it, and check that enough bytes are free."""
        if not self.folder.is_dir():
            self.folder.mkdir()
            files.sync(self.run_folder)
        files.remove_leftovers(self.folder)
        disk = os.statvfs(self.folder)
        free_bytes = disk.f_bavail * disk.f_frsize
        reports_size = disk.f_blocks > 0  # some network file systems report no blocks at all
        if reports_size and free_bytes < needed_bytes:
            raise ResourceError(
                f"a checkpoint needs {needed_bytes:,} bytes and {self.folder} has {free_bytes:,} free; "
                "free some space and run the same command again"
            )

    def _delete_old(self, newest: Path) -> None:
        """Delete all checkpoints except `newest`, which was just saved, the steps to keep, and the best checkpoint.

        With keep = 2, after step 400 was saved and step 100 was marked as the best:

            step_00000400     stays: just saved
            pause_00000350    deleted: a newer checkpoint replaces it
            step_00000300     stays if it is intact
            step_00000200     deleted; if step 300 is damaged, this step stays instead
            step_00000100     stays: the best
        """
        link = self.run_folder / "best"
        best_name = link.readlink().name if link.is_symlink() else None
        paths_to_keep = {newest, *self._find_steps_to_keep(newest)}
        for path in self._newest_first():
            if path not in paths_to_keep and path.name != best_name:
                files.remove_folder(path)
                self._verified_stats.pop(path, None)
        files.remove_leftovers(self.folder)

    def _find_steps_to_keep(self, newest: Path) -> list[Path]:
        """Return the newest intact steps, including `newest` if it is a step.

        Reading all checkpoints after every save would cost more than saving. So a step counts as intact while its files
        look unchanged since they were last verified. A failing disk can damage a file that looks unchanged. So the
        oldest step to keep is read in full before anything older is deleted. Then at least two steps are certainly
        intact: this one and the newest, which was just written. With keep = 1, only the newest is.
        """
        steps = [newest] if _is_step(newest) else []
        for path in self._newest_first():
            if len(steps) == self._num_steps_to_keep:
                break
            if path == newest or not _is_step(path):
                continue
            is_oldest_to_keep = len(steps) == self._num_steps_to_keep - 1
            if is_oldest_to_keep:
                is_intact = self._verify(path)
            else:
                is_intact = self._looks_unchanged(path) or self._verify(path)
            if is_intact:
                steps.append(path)
        return steps

    def _looks_unchanged(self, path: Path) -> bool:
        """Return whether the stats of the files are the same as when every byte was last verified."""
        stats = _file_stats(path)
        return stats is not None and stats == self._verified_stats.get(path)

    def _verify(self, path: Path) -> bool:
        """Read all files of a checkpoint, and return whether every byte matches the manifest."""
        stats = _file_stats(path)
        try:
            manifest = _read_manifest(path)
            for name in get_args(FileName):
                _read_file(path, name, manifest)
        except DataError:
            return False
        self._verified_stats[path] = stats
        return True


def _write_files(folder: Path, checkpoint: Checkpoint, encoded_values: bytes) -> None:
    """Write the three files of a checkpoint, and then the manifest."""
    entries: dict[FileName, _FileEntry] = {}
    entries[MODEL_FILE] = _write_file(folder / MODEL_FILE, files.encode_tensors(checkpoint.weights))
    entries[STATE_FILE] = _write_file(folder / STATE_FILE, files.encode_tensors(checkpoint.state_tensors))
    entries[VALUES_FILE] = _write_file(folder / VALUES_FILE, encoded_values)
    manifest = _Manifest(step=checkpoint.step, fingerprint=checkpoint.fingerprint, files=entries)
    files.write_and_sync(folder / MANIFEST_FILE, manifest.encode())
    files.sync(folder)


def _write_file(path: Path, data: bytes) -> _FileEntry:
    """Write one file of a checkpoint and return its entry in the manifest."""
    files.write_and_sync(path, data)
    return _FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _read_manifest(folder: Path) -> _Manifest:
    """Read and check the manifest of a checkpoint."""
    path = folder / MANIFEST_FILE
    data = files.read_bytes(path)
    try:
        manifest = _Manifest.model_validate_json(data)
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first_error["loc"])) or "JSON"
        raise DataError(f"{path} is truncated or has another format ({field}: {first_error['msg']})") from error
    if manifest.encode() != data:
        raise DataError(f"{path} does not match its own SHA-256")
    if len(manifest.files) < len(get_args(FileName)):
        raise DataError(f"{path} does not list all of {', '.join(get_args(FileName))}")
    # `resolve` follows the link RUN/best, whose own name has no step.
    match = _FOLDER_NAME.fullmatch(folder.resolve().name)
    if match and int(match[2]) != manifest.step:
        raise DataError(f"{path} is for step {manifest.step}, but the name of its folder has another step")
    return manifest


def _read_tensors(folder: Path, name: FileName, manifest: _Manifest) -> dict[str, Tensor]:
    """Return the tensors of one file of a checkpoint, after checking its bytes against the manifest."""
    data = _read_file(folder, name, manifest)
    return files.decode_tensors(data, folder / name)


def _read_values(folder: Path, manifest: _Manifest) -> dict[str, Any]:
    """Return the content of state.json, after checking its bytes against the manifest."""
    data = _read_file(folder, VALUES_FILE, manifest)
    return files.decode_object(data, folder / VALUES_FILE)


def _read_file(folder: Path, name: FileName, manifest: _Manifest) -> bytes:
    """Return the bytes of one file after checking them against the manifest."""
    path = folder / name
    entry = manifest.files[name]
    # The size is checked before the file is read, because a wrong file may be very large.
    if path.is_file() and path.stat().st_size != entry.size:
        raise DataError(f"{path} has {path.stat().st_size} bytes, but its manifest says {entry.size}; {RESTORE_ADVICE}")
    data = files.read_bytes(path)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise DataError(f"{path} does not match the SHA-256 in its manifest; {RESTORE_ADVICE}")
    return data


def _compute_mean(mean_path: Path, step_paths: list[Path]) -> Checkpoint:
    """Return the mean of the weights of some steps as a checkpoint without other tensors.

    Args:
        mean_path: The folder in which the mean will be saved.
        step_paths: The folders of the steps, newest first.
    """
    newest_path, *older_paths = step_paths
    manifest, newest_weights = _read_weights(newest_path)

    # Add up the floating-point tensors of all steps.
    sums = {name: weight.double() for name, weight in newest_weights.items() if weight.is_floating_point()}
    for older_path in older_paths:
        older_manifest, older_weights = _read_weights(older_path)
        same_settings = older_manifest.fingerprint == manifest.fingerprint
        if not same_settings or _shapes(older_weights) != _shapes(newest_weights):
            raise DataError(
                f"{older_path} and {newest_path} belong to different runs and cannot be averaged; "
                f"remove {older_path.name}"
            )
        for name, weight_sum in sums.items():
            weight_sum += older_weights[name]

    # Divide the sums, and convert the means to the types of the weights.
    mean_weights = dict(newest_weights)
    for name, weight_sum in sums.items():
        mean = weight_sum / len(step_paths)
        mean_weights[name] = mean.to(newest_weights[name].dtype)
    oldest_first_names = [step_path.name for step_path in reversed(step_paths)]
    return Checkpoint(
        path=mean_path,
        step=manifest.step,
        weights=mean_weights,
        state_tensors={},
        state_values={"mean_of": oldest_first_names},
        fingerprint=manifest.fingerprint,
    )


def _read_weights(step_path: Path) -> tuple[_Manifest, dict[str, Tensor]]:
    """Return the manifest and the weights of a step that is averaged."""
    try:
        manifest = _read_manifest(step_path)
        weights = _read_tensors(step_path, MODEL_FILE, manifest)
    except DataError as error:
        raise DataError(
            f"{error}; {step_path.name} cannot be averaged: remove it and all later checkpoints, and run the same "
            "command again"
        ) from error
    return manifest, weights


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _is_step(path: Path) -> bool:
    return path.name.startswith("step_")


def _file_stats(folder: Path) -> _FileStats | None:
    """Return the inode, size and modification time of every file of a checkpoint, or None if a file is missing."""
    try:
        all_stats = [(folder / name).stat() for name in (MANIFEST_FILE, *get_args(FileName))]
    except OSError:
        return None
    return tuple((stats.st_ino, stats.st_size, stats.st_mtime_ns) for stats in all_stats)
