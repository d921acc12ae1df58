"""Rows that start from the weights of another row's run: where that run is, and what it is."""

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
    """The default folder of the run that a row starts from; None if it starts from random weights."""
    start = recipe.experiments[row.name].start
    return default_folder(recipe, Row(name=start), seed, root) if start else None


@dataclass(frozen=True)
class Start:
    """The finished run whose weights training starts from."""

    record: dict[str, str]
    """Its hashes, wherever it is."""
    run: RunFolder | None = None
    """None: it is gone, and the run that started from it has weights of its own by now."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def find_start(
    recipe: Recipe, row: Row, seed: int, folder: Path | None, out: Path, data: Path | None = None
) -> Path | None:
    """Find the finished run that a row starts from: `folder`, or next to `out`, or its default folder.

    Returns None if the row starts from random weights, or if the run in `out` has weights already. Raises
    `SettingsError` if the run is missing.
    """
    wanted = recipe.experiments[row.name].start
    if wanted is None:
        if folder is not None:
            raise SettingsError(f'row "{row.name}" begins with no other run; --start needs training.start.row=NAME')
        return None
    first = Row(name=wanted)
    alone = out.name != f"seed{seed}"
    beside = out.parent / first.slug if alone else out.parent.parent / first.slug / out.name
    usual = default_folder(recipe, first, seed)
    ours = {"recipe": recipe.name, "row": first.name}
    for place in (folder,) if folder else (beside, usual):
        if (place / "result.json").exists() and (folder or ours.items() <= RunFolder.open(place).config.items()):
            return place
    if _recorded_start(out):
        return None
    place = folder or (usual if out == default_folder(recipe, row, seed) else beside)
    words = ["reefknot", "train", recipe.asked, "--row", first.name]
    words += [text for text in recipe.overrides if not text.startswith(("training.seed=", "training.start"))]
    words += [f"training.seed={seed}"] if seed else []
    words += ["--data", str(data)] if data else []
    words += ["--out", str(place)] if place != usual else []
    command = shlex.join(words)
    if folder not in (None, usual):  # the usual one is what a sweep asks for where no --start was given
        wants = f'--start {place}: row "{row.name}" starts from row "{first.name}", and this folder'
        if seeds := sorted(each.parent for each in place.glob("*/result.json")):
            raise SettingsError(f"{wants} holds runs but is none; name one of them, such as {seeds[0]}")
        holds = "holds no finished run of that row (it has no result.json)" if place.is_dir() else "is not there"
        raise SettingsError(f"{wants} {holds}. Name the folder of one, or train it there: `{command}`")
    raise SettingsError(
        f'row "{row.name}" starts from row "{first.name}", which has no finished run in {place.absolute()}. '
        f"Train it: `{command}`, or name one elsewhere with --start"
    )


def load_start(
    recipe: Recipe, row: Row, seed: int, folder: Path | None, out: Path, data: Path | None = None
) -> Start | None:
    """Load the run that a row starts from; if it is gone, what the run in `out` recorded about it. None: the row starts
    from random weights."""
    place = find_start(recipe, row, seed, folder, out, data)
    if place is None:
        record = _recorded_start(out) if recipe.experiments[row.name].start else None
        return Start(record) if record else None
    run = RunFolder.open(place)
    weights = run.best_weights()
    digest = hashlib.sha256(encode_tensors(weights)).hexdigest()
    return Start({"config_hash": run.config_hash, "weights_sha256": digest}, run, weights)


def _recorded_start(out: Path) -> dict[str, str] | None:
    """What a run recorded about the weights it started from; None for a run without weights of its own yet."""
    if not (out / "config.json").exists():
        return None
    run = RunFolder.open(out)
    has_weights = run.result is not None or run.checkpoints.latest(silent) is not None
    return run.config.get("start") if has_weights else None
