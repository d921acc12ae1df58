"""Runs that begin with the weights of another one: where it lies, what it is, and how a model is given its weights."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import torch

from reefknot.errors import DataError, SettingsError
from reefknot.lab.recipes.recipe import Recipe, Row
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.text.vocabulary import Sides, Vocabulary
from reefknot.lab.trained_run import best_weights
from reefknot.lab.training.state import load_weights
from reefknot.nn.models.language_model import LanguageModel
from reefknot.storage.files import encode_tensors


def default_folder(recipe: Recipe, row: Row, seed: int, root: Path | None = None) -> Path:
    """Where a row's run lies unless the user says otherwise; `root` is the folder of all runs of the recipe."""
    return (root or Path("runs") / recipe.name) / row.slug / f"seed{seed}"


def start_folder(recipe: Recipe, row: Row, seed: int, root: Path | None = None) -> Path | None:
    """Where the run lies whose weights a row begins with, unless the user says otherwise; None: it begins with none."""
    start = recipe.experiments[row.name].start
    return default_folder(recipe, Row(name=start), seed, root) if start else None


@dataclass(frozen=True)
class Start:
    """The finished run that another one begins with."""

    record: dict[str, str]
    """What it is, wherever it lies."""
    run: RunFolder | None = None
    """None: it is gone, but the other one has weights of its own by now."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def begin(self, model: LanguageModel, words: Vocabulary | Sides) -> None:
        """Give a model the weights, if they are there."""
        if self.run is None:
            return
        known = [Vocabulary.load(self.run.vocabulary_path).fingerprint]
        if isinstance(words, Sides) and not words.joint:
            known.insert(0, Vocabulary.load(self.run.source_vocabulary_path).fingerprint)
        wanted = words.vocabularies if isinstance(words, Sides) else (words,)
        if known != [each.fingerprint for each in wanted][-len(known) :]:
            raise DataError(f"{self.run.path} knows other words, so its weights mean nothing here; begin with another")
        try:
            load_weights(model, self.weights)
        except DataError as error:
            raise DataError(f"cannot begin with {self.run.path}: {error}") from error


def find_start(
    recipe: Recipe, row: Row, seed: int, folder: Path | None, out: Path, data: Path | None = None
) -> Path | None:
    """The finished run that a row begins with: in `folder`, or else beside `out`, or else where it lies by default.

    None: it begins with none, or the run in `out` has begun and needs it no more. Refuses to begin without.
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
    if _begun_with(out):
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


def begin(
    recipe: Recipe, row: Row, seed: int, folder: Path | None, out: Path, data: Path | None = None
) -> Start | None:
    """What a row begins with, or, where that is gone, what the run in `out` says it began with."""
    place = find_start(recipe, row, seed, folder, out, data)
    if place is None:
        record = _begun_with(out) if recipe.experiments[row.name].start else None
        return Start(record) if record else None
    run = RunFolder.open(place)
    weights = best_weights(run)
    digest = hashlib.sha256(encode_tensors(weights)).hexdigest()
    return Start({"config_hash": run.config_hash, "weights_sha256": digest}, run, weights)


def _begun_with(out: Path) -> dict[str, str] | None:
    """What a run says it began with; None where there is none, or none yet that has weights of its own."""
    if not (out / "config.json").exists():
        return None
    run = RunFolder.open(out)
    begun = run.result is not None or run.checkpoints.latest(lambda _: None) is not None
    return run.config.get("start") if begun else None
