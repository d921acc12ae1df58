"""Tasks, the kinds of experiment: language models, translation and skip-gram.

A task is one class in one file and one line in `TASKS`. `tasks/contract.py` documents what it provides. No code outside
this package asks which task a run has. A verb that works with one task only names that task,
`open_run(folder, task="translation")`. Other verbs pass a request to the task of the run: `evaluate_run`,
`compare_systems`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.settings import Mistake, check, validate
from reefknot.lab.config.upgrade import task_of_settings
from reefknot.lab.runs.folder import RunFolder

if TYPE_CHECKING:
    from reefknot.lab.evaluation.grid import Progress
    from reefknot.lab.tasks.contract import Data, Experiment, Task, TrainedRun
    from reefknot.lab.tasks.requests import Answer, ComparisonRequest, EvaluationRequest, System
    from reefknot.storage.progress import Notify

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
    """Return settings as an experiment, or a list of the mistakes in them."""
    return validate(load_task(task_of_settings(settings)).Settings, settings, where)


def check_experiment(settings: Mapping[str, Any], where: str) -> Experiment:
    """Return settings as an experiment, or raise one error that lists all mistakes in them."""
    experiment: Experiment = check(load_task(task_of_settings(settings)).Settings, settings, where)
    return experiment


def build_model(experiment: Experiment, words: Any) -> Any:
    """Build the model that an experiment describes, with weights drawn from torch's current generator state.

    Args:
        experiment: The settings of the model.
        words: A vocabulary, the `VocabularyPair` of parallel text, or just the number of words.
    """
    return task_of(experiment).build_model(words)


def task_of_run(run: RunFolder, task: str | None = None) -> Task[Any, Any, Any]:
    """Return the task of a run folder with the run's settings.

    Args:
        run: The run folder.
        task: Name of the only task that is accepted. By default, every task is.
    """
    kind = load_task(run.task)
    if task not in (None, run.task):
        raise SettingsError(f"{run.path} is {kind.noun}, not {load_task(str(task)).noun}; use {kind.verbs} with it")
    return kind(check(kind.Settings, run.config.get("settings", {}), f"{run.path}/config.json"))


def open_run(path: Path | str, device: str = "cpu", *, task: str | None = None) -> TrainedRun[Any, Any, Any]:
    """Open a run folder: its model with the best weights, on a device and in evaluation mode, and its vocabulary.

    Args:
        path: The run folder.
        device: `auto`, `cpu` or `cuda`.
        task: Name of the only task that is accepted. By default, every task is.
    """
    run = RunFolder.open(Path(path))
    return task_of_run(run, task).open_run(run, device)


def open_data(run: RunFolder, data: Path | None, *, task: str | None = None) -> Data:
    """Open the text that a run was trained on and scored with; raise `DataError` if it has changed.

    Args:
        run: The run folder.
        data: Folder of the corpora, or the new folder of the text if it has moved.
        task: Name of the only task that is accepted. By default, every task is.
    """
    opened: Data = task_of_run(run, task).open_run_data(run, data)
    return opened


def evaluate_run(run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: Progress) -> Answer:
    """Evaluate a run as its task does; raise an error if the request has an option without effect.

    Args:
        run: The run folder.
        request: The mode of evaluation and its settings.
        notify: Called with notes for people, such as where scores were saved.
        progress: Called with the fraction of the work that is done.
    """
    task = _scoring_task(run)
    request.reject_unused(task.evaluation_options, f"{run.path}, which is {task.noun}")
    check_data_option(request.data, [task])
    return task.evaluate(run, request, notify=notify, progress=progress)


def compare_systems(systems: Sequence[System], request: ComparisonRequest, *, notify: Notify) -> Answer:
    """Compare systems with the first one as their task does; raise an error if they are of different tasks.

    Args:
        systems: The systems. All others are compared with the first one.
        request: The options of the comparison.
        notify: Called with notes for people, such as a note on different settings that do not prevent the comparison.
    """
    tasks = [_scoring_task(system.runs[0]) for system in systems]
    first, first_task = systems[0], tasks[0]
    for system, task in zip(systems, tasks, strict=True):
        if type(task) is not type(first_task):
            raise SettingsError(
                f"{first.path} is {first_task.noun} and {system.path} is {task.noun}: no fair comparison; compare runs "
                "of one kind"
            )
    request.reject_unused(first_task.comparison_options, f"{first.path}, which is {first_task.noun}")
    check_data_option(request.data, tasks)
    return first_task.compare(systems, request, notify=notify)


def check_data_option(data: Path | None, tasks: Iterable[Task[Any, Any, Any]]) -> None:
    """Raise an error if `--data` is given but none of the tasks reads its text from that folder."""
    tasks = list(tasks)
    if data is not None and not any(task.reads_data_folder for task in tasks):
        names = ", ".join(dict.fromkeys(task.experiment.corpus.name for task in tasks))
        raise SettingsError(f"--data has no effect, because the text is {names}; leave --data out")


def _scoring_task(run: RunFolder) -> Task[Any, Any, Any]:
    """Return the task of a run; raise an error if its models do not assign probabilities to texts."""
    task = task_of_run(run)
    if not task.scores_text:
        raise SettingsError(f"{run.path} is {task.noun}, which cannot score a text; use {task.verbs} with it")
    return task
