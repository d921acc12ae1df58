"""Find and load the run whose weights a row starts from."""

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
    start = recipe.experiments[row.name].start
    return default_folder(recipe, Row(name=start), seed, root) if start else None


@dataclass(frozen=True)
class Start:
    """The finished run whose weights training starts from."""

    record: dict[str, str]
    """Hashes of the settings and of the weights of the run."""
    run: RunFolder | None = None
    """The run, or None if it was deleted after another run had started from it and saved a checkpoint."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def find_start(
    recipe: Recipe, row: Row, seed: int, folder: Path | None, out: Path, data: Path | None = None
) -> Path | None:
    """Return the finished run that a row starts from: `folder`, a folder next to `out`, or its default folder.

    Returns None if the row starts from random weights, or if the run in `out` has weights already. Raises
    `SettingsError` if the run is missing.
    """
    wanted = recipe.experiments[row.name].start
    if wanted is None:
        if folder is not None:
            raise SettingsError(f'row "{row.name}" does not start from a run; --start needs training.start.row=NAME')
        return None
    first = Row(name=wanted)
    # Runs of several seeds are in ROW/seedN, a single run may be in ROW: the sibling has the same layout as `out`.
    single = out.name != f"seed{seed}"
    sibling = out.parent / first.slug if single else out.parent.parent / first.slug / out.name
    default = default_folder(recipe, first, seed)
    identity = {"recipe": recipe.name, "row": first.name}
    for candidate in (folder,) if folder else (sibling, default):
        finished = (candidate / "result.json").exists()
        if finished and (folder or identity.items() <= RunFolder.open(candidate).config.items()):
            return candidate
    if _recorded_start(out):
        return None
    missing = folder or (default if out == default_folder(recipe, row, seed) else sibling)
    arguments = ["reefknot", "train", recipe.given_name, "--row", first.name]
    arguments += [text for text in recipe.overrides if not text.startswith(("training.seed=", "training.start"))]
    arguments += [f"training.seed={seed}"] if seed else []
    arguments += ["--data", str(data)] if data else []
    arguments += ["--out", str(missing)] if missing != default else []
    command = shlex.join(arguments)
    if folder not in (None, default):  # a sweep without --start passes the default folder
        subject = f'--start {missing}: row "{row.name}" starts from row "{first.name}", but this folder'
        if runs := sorted(path.parent for path in missing.glob("*/result.json")):
            raise SettingsError(f"{subject} contains several runs; pass one of them, such as {runs[0]}")
        problem = "is not a finished run of that row (no result.json)" if missing.is_dir() else "does not exist"
        raise SettingsError(f"{subject} {problem}. Pass the folder of a finished run, or train it there: `{command}`")
    raise SettingsError(
        f'row "{row.name}" starts from row "{first.name}", which has no finished run in {missing.absolute()}. '
        f"Train it: `{command}`, or pass the folder of a finished run with --start"
    )


def load_start(
    recipe: Recipe, row: Row, seed: int, folder: Path | None, out: Path, data: Path | None = None
) -> Start | None:
    """Load the run that a row starts from; None if the row starts from random weights.

    If that run was deleted, return what the run in `out` recorded about it.
    """
    path = find_start(recipe, row, seed, folder, out, data)
    if path is None:
        record = _recorded_start(out) if recipe.experiments[row.name].start else None
        return Start(record) if record else None
    run = RunFolder.open(path)
    weights = run.best_weights()
    digest = hashlib.sha256(encode_tensors(weights)).hexdigest()
    return Start({"config_hash": run.config_hash, "weights_sha256": digest}, run, weights)


def _recorded_start(out: Path) -> dict[str, str] | None:
    """Return what a run recorded about the weights that it started from; None if it has no weights of its own yet."""
    if not (out / "config.json").exists():
        return None
    run = RunFolder.open(out)
    has_weights = run.result is not None or run.checkpoints.load_latest(silent) is not None
    return run.config.get("start") if has_weights else None
