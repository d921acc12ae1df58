"""Finds and loads the finished run whose weights another run starts from, for example to finetune a model.

A row (one experiment of a recipe) with `training.start.row = "NAME"` does not start from random weights, but from the
best weights of a finished run of row NAME. `load_start` returns this run with its weights, as a `StartRun`.
`find_start` only looks for its folder. `start_folder` returns the default folder without looking.
"""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import torch

from reefknot.errors import SettingsError
from reefknot.lab.recipes.recipe import Recipe, Row, default_folder
from reefknot.lab.runs.folder import RunFolder
from reefknot.storage.files import encode_tensors
from reefknot.storage.progress import silent


def start_folder(recipe: Recipe, row: Row, seed: int, root: Path | None = None) -> Path | None:
    """Return the default folder of the run that a row starts from; None if it starts from random weights."""
    start_name = recipe.experiments[row.name].start
    if not start_name:
        return None
    return default_folder(recipe, Row(name=start_name), seed, root)


@dataclass(frozen=True)
class StartRun:
    """The finished run whose weights another run starts from."""

    record: dict[str, str]
    """Hashes of the settings and of the weights of the run."""
    run: RunFolder | None = None
    """The run, or None if it was deleted after another run had started from it and saved a checkpoint."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """The best weights of the run; empty if the run was deleted."""


def load_start(
    recipe: Recipe, row: Row, seed: int, folder: Path | None, out: Path, data: Path | None = None
) -> StartRun | None:
    """Load the run that a row starts from; None if the row starts from random weights.

    If that run was deleted, return what the run in `out` recorded about it. The arguments are those of `find_start`.
    """
    path = find_start(recipe, row, seed, folder=folder, out=out, data=data)
    if path is not None:
        run = RunFolder.open(path)
        weights = run.best_weights()
        weights_hash = hashlib.sha256(encode_tensors(weights)).hexdigest()
        record = {"config_hash": run.config_hash, "weights_sha256": weights_hash}
        return StartRun(record, run, weights)

    if not recipe.experiments[row.name].start:
        return None
    recorded_start = _recorded_start(out)
    return StartRun(recorded_start) if recorded_start else None


def find_start(
    recipe: Recipe, row: Row, seed: int, folder: Path | None, out: Path, data: Path | None = None
) -> Path | None:
    """Return the folder of the finished run that a row starts from.

    Args:
        recipe: The recipe that has the row.
        row: The row to train.
        seed: The seed of both runs.
        folder: The folder that the user gave with `--start`. By default, a folder next to `out` and then the default
            folder are tried.
        out: The run folder of `row`.
        data: Folder of the corpora, for the command in an error message.

    Returns:
        The folder, or None if the row starts from random weights, or if the run to start from was deleted and the run
        in `out` has weights already. Raises `SettingsError` if the run is missing.
    """
    start_name = recipe.experiments[row.name].start
    if start_name is None:
        if folder is not None:
            raise SettingsError(f'row "{row.name}" does not start from a run; --start needs training.start.row=NAME')
        return None

    start_row = Row(name=start_name)
    default = default_folder(recipe, start_row, seed)
    sibling = _sibling_folder(out, start_row, seed)
    if folder and _is_finished(folder):
        return folder
    if not folder and _is_finished_run_of(sibling, recipe, start_row):
        return sibling
    if not folder and _is_finished_run_of(default, recipe, start_row):
        return default
    if _recorded_start(out):
        return None

    # The run is missing. The error message has the command that trains it where it is expected.
    if folder:
        expected = folder
    elif out == default_folder(recipe, row, seed):
        expected = default
    else:
        expected = sibling
    out_option = None if expected == default else expected
    command = _training_command(recipe, start_row, seed, data, out_option)
    if folder not in (None, default):  # a sweep without --start passes the default folder
        raise _start_option_error(expected, row, start_row, command)
    raise SettingsError(
        f'row "{row.name}" starts from row "{start_row.name}", which has no finished run in {expected.absolute()}. '
        f"Train it: `{command}`, or pass the folder of a finished run with --start"
    )


def _sibling_folder(out: Path, start_row: Row, seed: int) -> Path:
    """Return the folder next to `out` in which a run of `start_row` is expected.

    Runs of several seeds are in ROW/seedN, and a single run may be in ROW. The sibling has the same layout as `out`: if
    the start row is `base`, it is runs/base/seed1 for runs/large/seed1, and runs/base for runs/large.
    """
    if out.name == f"seed{seed}":
        return out.parent.parent / start_row.slug / out.name
    return out.parent / start_row.slug


def _is_finished(folder: Path) -> bool:
    return (folder / "result.json").exists()


def _is_finished_run_of(folder: Path, recipe: Recipe, row: Row) -> bool:
    """Return whether a folder has a finished run of this row of this recipe."""
    if not _is_finished(folder):
        return False
    config = RunFolder.open(folder).config
    return config.get("recipe") == recipe.name and config.get("row") == row.name


def _start_option_error(folder: Path, row: Row, start_row: Row, command: str) -> SettingsError:
    """Return the error for a folder that the user passed with `--start` and that is not a finished run."""
    subject = f'--start {folder}: row "{row.name}" starts from row "{start_row.name}", but this folder'
    inner_runs = sorted(path.parent for path in folder.glob("*/result.json"))
    if inner_runs:
        return SettingsError(f"{subject} contains several runs; pass one of them, such as {inner_runs[0]}")
    if folder.is_dir():
        problem = "is not a finished run of that row (no result.json)"
    else:
        problem = "does not exist"
    return SettingsError(f"{subject} {problem}. Pass the folder of a finished run, or train it there: `{command}`")


def _training_command(recipe: Recipe, row: Row, seed: int, data: Path | None, out: Path | None) -> str:
    """Return the command that trains a row with this seed, for an error message."""
    arguments = ["reefknot", "train", recipe.given_name, "--row", row.name]
    for override in recipe.overrides:
        if not override.startswith(("training.seed=", "training.start")):
            arguments.append(override)
    if seed:
        arguments.append(f"training.seed={seed}")
    if data:
        arguments += ["--data", str(data)]
    if out:
        arguments += ["--out", str(out)]
    return shlex.join(arguments)


def _recorded_start(out: Path) -> dict[str, str] | None:
    """Return what a run recorded about the weights that it started from; None if it has no weights of its own yet."""
    if not (out / "config.json").exists():
        return None
    run = RunFolder.open(out)
    has_weights = run.result is not None or run.checkpoints.load_latest(silent) is not None
    return run.config.get("start") if has_weights else None
