"""Results of a run before it was trained longer.

A finished run can be trained longer. Its result then moves to a subfolder that is named after the earlier length:

    RUN/earlier/epochs-10/config.json, environment.json, metrics.jsonl, result.json, scores.safetensors
                          evaluations/, texts/, translations/, MANIFEST.json

Such a folder is the record of a run: it has no weights, and reports and comparisons read it like any other run. A
folder that contains several runs is searched for runs without these records.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reefknot.errors import SettingsError
from reefknot.lab.runs.changes import Change
from reefknot.storage import files, manifest

FOLDER = "earlier"
LENGTH_KEYS = ("training.epochs", "training.updates")
"""The settings that are the length of a training."""
_FOLDER_NAME = re.compile(r"(epochs|updates)-\d+")
_RESULT_FILES = ("result.json", "scores.safetensors")
_OTHER_FILES = ("config.json", "environment.json", "metrics.jsonl")
_RESULT_FOLDERS = ("evaluations", "texts", "translations")


def format_length(training: Mapping[str, Any]) -> str:
    """Return the length in the settings of a training, such as "10 epochs" or "5,000 updates"."""
    unit, length = _find_length(training)
    return f"{length:,} {unit}"


def earlier_folders(run_folder: Path) -> list[Path]:
    """Return the records of the run before it was trained longer, the shortest first."""
    folders = [path for path in (run_folder / FOLDER).glob("*") if _FOLDER_NAME.fullmatch(path.name)]
    return sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]))


def is_earlier(folder: Path) -> bool:
    """Return whether a folder is the record of a run before it was trained longer."""
    return folder.parent.name == FOLDER and (folder.parent.parent / "config.json").is_file()


def is_longer(old_config: Mapping[str, Any], new_config: Mapping[str, Any], changes: list[Change]) -> bool:
    """Return whether the only change to a config is a longer training, in the same unit."""
    if not changes or any(change.key.removeprefix("settings.") not in LENGTH_KEYS for change in changes):
        return False
    return is_longer_training(old_config["settings"]["training"], new_config["settings"]["training"])


def is_longer_training(old_training: Mapping[str, Any], new_training: Mapping[str, Any]) -> bool:
    """Return whether the length in the new settings of a training is larger than in the old ones, in the same unit."""
    unit, length = _find_length(old_training)
    new_unit, new_length = _find_length(new_training)
    return unit == new_unit and new_length > length


def move_result(run_folder: Path, training: Mapping[str, Any]) -> None:
    """Move the result of a finished run to `RUN/earlier`. Nothing happens if the run has no result.

    A process that is killed in between leaves the result in one of the two places, or in both.

    Args:
        run_folder: The folder of the run.
        training: The training settings that the result belongs to.
    """
    if not (run_folder / "result.json").is_file():
        return
    unit, length = _find_length(training)
    target = run_folder / FOLDER / f"{unit}-{length}"
    result_paths = [run_folder / name for name in _RESULT_FILES if (run_folder / name).is_file()]
    for name in _RESULT_FOLDERS:
        result_paths += [path for path in (run_folder / name).glob("*") if path.is_file()]
    other_paths = [run_folder / name for name in _OTHER_FILES if (run_folder / name).is_file()]
    with files.writing(target):
        target.parent.mkdir(exist_ok=True)
        if not target.exists():
            temporary = files.temporary_path(target)
            _copy_files([*other_paths, *result_paths], run_folder, temporary)
            files.commit(temporary, target)
        for path in result_paths:
            manifest.forget(path)
            files.remove(path)
        for name in _RESULT_FOLDERS:
            files.remove(run_folder / name)


def _copy_files(paths: list[Path], source: Path, target: Path) -> None:
    """Copy files to a new folder, with their places in the source folder, and write its manifest."""
    target.mkdir()
    copies = []
    for path in paths:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        files.write_bytes(copy, manifest.read_bytes(path))
        copies.append(copy)
    manifest.create(target, copies)


def _find_length(training: Mapping[str, Any]) -> tuple[str, int]:
    """Return the unit, `epochs` or `updates`, and the number."""
    for unit in ("epochs", "updates"):
        if training.get(unit) is not None:
            return unit, int(training[unit])
    raise SettingsError("the settings of the run have neither training.epochs nor training.updates")
