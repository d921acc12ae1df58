"""Tasks, the kinds of experiment: language models, translation and skip-gram.

A task is one class in one file and one line in `TASKS`. `tasks/contract.py` documents what it provides. No code outside
this package asks which task it has. A verb that needs a certain task says so: `open_run(folder, task="translation")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.settings import Mistake, check, validate
from reefknot.lab.config.upgrade import task_of_settings
from reefknot.lab.runs.folder import RunFolder

if TYPE_CHECKING:
    from reefknot.lab.tasks.contract import Data, Experiment, Task, TrainedRun

TASKS = {
    "language_model": "reefknot.lab.tasks.language_model:LanguageModelTask",
    "translation": "reefknot.lab.tasks.translation:TranslationTask",
    "skip_gram": "reefknot.lab.tasks.skip_gram:SkipGramTask",
}


def load_task(name: str) -> type[Task[Any, Any, Any]]:
    """Import a task by its name in `TASKS`."""
    if name not in TASKS:
        raise DataError(f"unknown task '{name[:60]}'; known tasks: {', '.join(TASKS)}")
    module, _, attribute = TASKS[name].partition(":")
    task: type[Task[Any, Any, Any]] = getattr(import_module(module), attribute)
    return task


def task_of(experiment: Experiment) -> Task[Any, Any, Any]:
    """Return the task that an experiment's settings belong to."""
    return load_task(experiment.task)(experiment)


def validate_experiment(settings: Mapping[str, Any], where: str) -> Experiment | list[Mistake]:
    """Return settings as an experiment, or what is wrong with them."""
    return validate(load_task(task_of_settings(settings)).Settings, settings, where)


def check_experiment(settings: Mapping[str, Any], where: str) -> Experiment:
    """Return settings as an experiment, or raise one error that lists everything wrong with them."""
    experiment: Experiment = check(load_task(task_of_settings(settings)).Settings, settings, where)
    return experiment


def build_model(experiment: Experiment, words: Any) -> Any:
    """Build the model that an experiment describes, with weights drawn from torch's current generator state.

    Args:
        words: a vocabulary, the `Sides` of parallel text, or the number of words where no text is read.
    """
    return task_of(experiment).build_model(words)


def task_of_run(run: RunFolder, task: str | None = None) -> Task[Any, Any, Any]:
    """Return the task of a run folder with the run's settings.

    Args:
        task: reject runs of any other task.
    """
    kind = load_task(run.task)
    if task not in (None, run.task):
        raise SettingsError(f"{run.path} is {kind.noun}, not {load_task(str(task)).noun}; use {kind.verbs} with it")
    return kind(check(kind.Settings, run.config.get("settings", {}), f"{run.path}/config.json"))


def open_run(path: Path | str, device: str = "cpu", *, task: str | None = None) -> TrainedRun[Any, Any, Any]:
    """Open a run folder: its model with the best weights, on a device and in evaluation mode, and its vocabulary.

    Args:
        path: the run folder.
        device: `auto`, `cpu` or `cuda`.
        task: reject runs of any other task.
    """
    run = RunFolder.open(Path(path))
    return task_of_run(run, task).open_run(run, device)


def open_data(run: RunFolder, data: Path | None, *, task: str | None = None) -> Data:
    """Open the text that a run was trained on and scored with; raise `DataError` if it has changed.

    Args:
        data: the folder of the corpora, or the text's new folder if it has moved.
        task: reject runs of any other task.
    """
    opened: Data = task_of_run(run, task).open_run_data(run, data)
    return opened
