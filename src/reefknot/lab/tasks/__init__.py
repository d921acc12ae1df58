"""Tasks, the kinds of experiment: language models, translation and skip-gram.

`create_task(experiment)` returns the task of an experiment, and `open_run(folder)` opens a trained model. A task is one
class in one file and one line in `TASKS`; `tasks/contract.py` documents its methods.

No code outside this package asks which task a run has. A verb (a subcommand of `reefknot`) that works with one task
only names that task, `open_run(folder, task="translation")`. Other verbs pass a request to the task of the run:
`evaluate_run`, `compare_systems`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.settings import Mistake, check_settings, validate
from reefknot.lab.config.upgrade import detect_task
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
"""The class of each task, as `module:Class`."""


def load_task(name: str) -> type[Task[Any, Any, Any]]:
    """Import a task by its name in `TASKS`."""
    if name not in TASKS:
        raise DataError(f"unknown task '{name[:60]}'; known tasks: {', '.join(TASKS)}")
    module, _, attribute = TASKS[name].partition(":")
    task: type[Task[Any, Any, Any]] = getattr(import_module(module), attribute)
    return task


def create_task(experiment: Experiment) -> Task[Any, Any, Any]:
    """Return a task object with the settings of an experiment."""
    return load_task(experiment.task)(experiment)


def validate_experiment(settings: Mapping[str, Any], source: str) -> Experiment | list[Mistake]:
    """Return settings as an experiment, or a list of the mistakes in them. `source` is their origin in messages."""
    return validate(load_task(detect_task(settings)).Settings, settings, source)


def check_experiment(settings: Mapping[str, Any], source: str) -> Experiment:
    """Return settings as an experiment, or raise one error that lists all mistakes in them.

    Args:
        settings: The sections of a recipe, such as {"corpus": {...}, "encoder": {...}, "training": {...}}.
        source: Where the settings come from. The error message begins with it.
    """
    experiment: Experiment = check_settings(load_task(detect_task(settings)).Settings, settings, source)
    return experiment


def build_model(experiment: Experiment, words: Any) -> Any:
    """Build the model that an experiment describes, with weights drawn from torch's current generator state.

    Args:
        experiment: The settings of the model.
        words: A vocabulary, the `VocabularyPair` of parallel text, or just the number of words.
    """
    return create_task(experiment).build_model(words)


def create_task_for_run(run: RunFolder, task: str | None = None) -> Task[Any, Any, Any]:
    """Return a task object with the settings of a run.

    Args:
        run: The run folder.
        task: Name of the only task that is accepted. By default, every task is.
    """
    task_class = load_task(run.task)
    if task not in (None, run.task):
        expected_noun = load_task(str(task)).noun
        raise SettingsError(f"{run.path} is {task_class.noun}, not {expected_noun}; use {task_class.verbs} with it")
    settings = run.config.get("settings", {})
    return task_class(check_settings(task_class.Settings, settings, f"{run.path}/config.json"))


def open_run(path: Path | str, device: str = "cpu", *, task: str | None = None) -> TrainedRun[Any, Any, Any]:
    """Open a run folder: its model with the best weights, on a device and in evaluation mode, and its vocabulary.

    Args:
        path: The run folder.
        device: `auto`, `cpu` or `cuda`.
        task: Name of the only task that is accepted. By default, every task is.
    """
    run = RunFolder.open(Path(path))
    return create_task_for_run(run, task).open_run(run, device)


def open_data(run: RunFolder, data: Path | None, *, task: str | None = None) -> Data:
    """Open the text that a run was trained on and scored with; raise `DataError` if it has changed.

    Args:
        run: The run folder.
        data: Folder of the corpora, or the new folder of the text if it has moved.
        task: Name of the only task that is accepted. By default, every task is.
    """
    dataset: Data = create_task_for_run(run, task).open_run_data(run, data)
    return dataset


def evaluate_run(run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: Progress) -> Answer:
    """Evaluate a run as its task does; raise an error if the request has an option without effect.

    Args:
        run: The run folder.
        request: The mode of evaluation and its settings.
        notify: Called with notes for the user, such as where scores were saved.
        progress: Called with the fraction of the work that is done.
    """
    task = _create_scoring_task(run)
    request.reject_unused(task.evaluation_options, f"{run.path}, which is {task.noun}")
    check_data_option(request.data, [task])
    return task.evaluate(run, request, notify=notify, progress=progress)


def compare_systems(systems: Sequence[System], request: ComparisonRequest, *, notify: Notify) -> Answer:
    """Compare systems (runs that differ only in their seeds) with the first one; raise an error if their tasks differ.

    Args:
        systems: The systems. All others are compared with the first one.
        request: The options of the comparison.
        notify: Called with notes for the user, such as a note on different settings that do not prevent the comparison.
    """
    tasks = [_create_scoring_task(system.runs[0]) for system in systems]
    baseline, baseline_task = systems[0], tasks[0]
    for system, task in zip(systems, tasks, strict=True):
        if type(task) is not type(baseline_task):
            raise SettingsError(
                f"{baseline.path} is {baseline_task.noun} and {system.path} is {task.noun}: no fair comparison; "
                "compare runs of one kind"
            )
    request.reject_unused(baseline_task.comparison_options, f"{baseline.path}, which is {baseline_task.noun}")
    check_data_option(request.data, tasks)
    return baseline_task.compare(systems, request, notify=notify)


def check_data_option(data: Path | None, tasks: Iterable[Task[Any, Any, Any]]) -> None:
    """Raise an error if `--data` is given but none of the tasks reads its text from that folder."""
    tasks = list(tasks)
    if data is not None and not any(task.reads_data_folder for task in tasks):
        names = ", ".join(dict.fromkeys(task.experiment.corpus.name for task in tasks))
        raise SettingsError(f"--data has no effect, because the text is {names}; leave --data out")


def _create_scoring_task(run: RunFolder) -> Task[Any, Any, Any]:
    """Return the task of a run; raise an error if its models do not assign probabilities to texts."""
    task = create_task_for_run(run)
    if not task.scores_text:
        raise SettingsError(f"{run.path} is {task.noun}, which cannot score a text; use {task.verbs} with it")
    return task
