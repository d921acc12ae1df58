"""Train a finished run longer: `reefknot train RUN training.epochs=20`.

    recipe, row = load_run_recipe(Path("runs/demo/tied/seed0"), ["training.epochs=20"])
    check_longer(RunFolder.open(path), recipe.experiments[row.name])

The settings come from config.json of the run, so the recipe that it was trained with is not needed. Training continues
from the last checkpoint. The outcome equals a run of the new length from the start, because no learning-rate schedule
depends on the length. There are two exceptions, which `check_longer` rejects: training has validated at its end, where
a longer run does not validate, and a rule that a longer run follows at this point was skipped at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.overrides import apply_overrides
from reefknot.lab.recipes.recipe import Recipe, Row
from reefknot.lab.runs.changes import Change, find_changes
from reefknot.lab.runs.earlier import LENGTH_KEYS, earlier_folders, format_length, is_longer_training
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import check_experiment
from reefknot.lab.tasks.contract import Experiment
from reefknot.lab.tasks.sequence_model import SequenceExperiment
from reefknot.storage.progress import silent


def load_run_recipe(path: Path, overrides: Iterable[str]) -> tuple[Recipe, Row]:
    """Return a recipe with one row, which has the settings of a run and another length of training.

    Args:
        path: The run folder.
        overrides: The new length, as `training.epochs=20` or `training.updates=5000`. Without it, training continues to
            the length in the settings of the run.
    """
    run = RunFolder.open(path)
    record = _find_record(run)
    result = record.result
    assert result is not None
    settings = run.config["settings"]
    experiment = check_experiment(apply_overrides(settings, overrides), str(path))
    new_settings = experiment.model_dump(mode="json", exclude={"training": {"shard"}})
    _check_changes(path, find_changes(settings, new_settings))
    changes = find_changes(record.config["settings"], new_settings)

    row = Row(
        name=run.config["row"],
        parameters=result.parameters.expected,
        paper=dict(result.paper),
        paper_similarity=result.paper_similarity,
    )
    recipe = Recipe(
        name=run.config["recipe"],
        given_name=str(path),
        title=str(path),
        paper=None,
        rows=(row,),
        experiments={row.name: experiment},
        overrides=tuple(overrides),
        changed={row.name: _merge_changes(result.changed, changes)},
    )
    return recipe, row


def check_longer(run: RunFolder, experiment: Experiment, *, accept_difference: bool = False) -> list[str]:
    """Return notes for the user, or raise an error if a run cannot be trained longer.

    It is also an error if the outcome would differ from a run of that length from the start. Nothing is checked if the
    run already has this length.

    Args:
        run: The run, with the settings that it was trained with.
        experiment: The settings of the run, with the new length.
        accept_difference: Accept that the outcome differs.
    """
    old_training = run.config["settings"]["training"]
    new_training = experiment.training.model_dump()  # type: ignore[attr-defined]
    old_length, new_length = format_length(old_training), format_length(new_training)
    if old_length == new_length:
        return []
    if not isinstance(experiment, SequenceExperiment):
        raise SettingsError(
            f"{run.path}: its learning rate decreases linearly until the end of training, so a longer run differs from "
            "its first update on; train the row again with the new length and another --out"
        )
    settings = experiment.training
    if not is_longer_training(old_training, new_training):
        raise SettingsError(f"{run.path}: {new_length} is not longer than {old_length}; use a larger number")
    run.best_checkpoint()  # raises an error if the weights are gone
    checkpoint = run.checkpoints.load_latest(silent)
    if checkpoint is None:
        raise DataError(f"{run.path} has no checkpoint to continue from; train the row again with another --out")
    if run.result is None:
        return []  # it is being trained longer already, and does not end before the new length

    progress = checkpoint.state_values["progress"]
    reason_to_stop = progress["stopped"] or _find_reason_to_stop(settings, progress)
    if reason_to_stop:
        raise SettingsError(f"{run.path}: a longer run ends at the same update, because training {reason_to_stop}")
    notes = []
    difference = _find_difference(settings, progress)
    if difference:
        message = f"{run.path}: the outcome differs from a run of {new_length} from the start, because {difference}"
        if not accept_difference:
            raise SettingsError(
                f"{message}; pass --accept-difference to continue anyway, or train the row again with another --out"
            )
        notes.append(message)
    if settings.schedule.kind == "cosine":  # type: ignore[attr-defined]
        notes.append(
            f"training.schedule keeps its period of {settings.schedule.period:,} updates: "  # type: ignore[attr-defined]
            "after each cycle of the cosine, the learning rate rises again"
        )
    return notes


def _find_record(run: RunFolder) -> RunFolder:
    """Return the run if it is finished, or the record of its latest result if it is being trained longer."""
    if run.imported:
        raise SettingsError(f"{run.path} was imported, so its training cannot be continued")
    if run.config.get("start"):
        raise SettingsError(
            f"{run.path} began with the weights of another row; train this row of the recipe again with the new length "
            "and another --out"
        )
    if run.result is not None:
        return run
    records = earlier_folders(run.path)
    if not records:
        command = (run.environment or {}).get("command")
        advice = f": {command}" if command else ""
        raise SettingsError(
            f"{run.path}: its training is not finished; continue it with the command that started it{advice}"
        )
    return RunFolder.open(records[-1])


def _check_changes(path: Path, changes: Iterable[Change]) -> None:
    """Raise an error if an override changes more than the length."""
    for change in changes:
        if change.key not in LENGTH_KEYS:
            raise SettingsError(
                f"{path} is a run, and only its length can change ({' or '.join(LENGTH_KEYS)}), not {change.key}; to "
                "train with other settings, give the recipe and another --out"
            )


def _merge_changes(old_changes: Iterable[Change], new_changes: Iterable[Change]) -> list[Change]:
    """Return the differences from the recipe: those of the run, with the new length."""
    changes = {change.key: change for change in old_changes}
    for change in new_changes:
        original = changes[change.key].old if change.key in changes else change.old
        changes[change.key] = Change(key=change.key, old=original, new=change.new)
    return [change for change in changes.values() if change.old != change.new]


def _awaits_averaging(settings: Any, progress: dict[str, Any]) -> bool:
    """Return whether averaging has not begun yet. The stopping rule applies only after that."""
    return settings.averaging is not None and not progress["averaged_from"]


def _find_reason_to_stop(settings: Any, progress: dict[str, Any]) -> str | None:
    """Return why a longer run would have stopped after the last validation. A run that ends does not apply the rule."""
    losses = progress["validated"]
    if settings.stop is None or _awaits_averaging(settings, progress) or not losses:
        return None
    reason = settings.stop.reason_to_stop(losses[:-1], losses[-1])
    return f"stops there by {reason}" if reason else None


def _find_difference(settings: Any, progress: dict[str, Any]) -> str | None:
    """Return why a longer run would have another state after the same number of updates, or None if it would not."""
    step, losses = progress["step"], progress["validated"]
    if settings.validate_every is None:
        is_regular = progress["window"] == 0
    else:
        is_regular = step % settings.validate_every == 0
    if not is_regular:
        return f"training has validated at its end, after update {step:,}, where a longer run does not validate"
    if _awaits_averaging(settings, progress) and losses and settings.averaging.should_start(losses[:-1], losses[-1]):
        return f"a longer run starts to average its weights after update {step:,}"
    return None
