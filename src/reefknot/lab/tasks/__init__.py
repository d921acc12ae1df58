"""Tasks, the kinds of experiment: language models, translation and skip-gram.

Open a trained model, or build a new model from settings:

    trained_run = open_run("runs/demo/tied/seed0")
    model = build_model(check_experiment(settings, source="my settings"), vocabulary)

An experiment is a checked set of settings. A run is one training of an experiment, in a folder. A task is one class in
one file and one line in `TASKS`; `tasks/contract.py` documents its methods.

Code outside this package does not depend on the task of a run. Subcommands of `reefknot` call `evaluate_run` and
`compare_systems`, or name the only task that they support: `open_run(folder, task="translation")`.
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
    from reefknot.lab.tasks.contract import Data, Experiment, Task, TrainedRun
    from reefknot.lab.tasks.requests import Answer, ComparisonAnswer, ComparisonRequest, EvaluationRequest, System
    from reefknot.storage.progress import Notify, ProgressCallback

TASKS = {
    "language_model": "reefknot.lab.tasks.language_model:LanguageModelTask",
    "translation": "reefknot.lab.tasks.translation:TranslationTask",
    "skip_gram": "reefknot.lab.tasks.skip_gram:SkipGramTask",
}
"""The class of each task, as `module:Class`. A class is imported when it is first used."""
_TEXT_ADVICE = "leave --data out, or use --text for another text"


def load_task(name: str) -> type[Task[Any, Any, Any]]:
    """Import the class of a task by its name in `TASKS`."""
    if name not in TASKS:
        raise DataError(f"unknown task '{name[:60]}'; known tasks: {', '.join(TASKS)}")
    module_name, _, class_name = TASKS[name].partition(":")
    task_class: type[Task[Any, Any, Any]] = getattr(import_module(module_name), class_name)
    return task_class


def create_task(experiment: Experiment) -> Task[Any, Any, Any]:
    """Return a task object with the settings of an experiment."""
    task_class = load_task(experiment.task)
    return task_class(experiment)


def validate_experiment(settings: Mapping[str, Any], source: str) -> Experiment | list[Mistake]:
    """Return settings as an experiment, or a list of the mistakes in them.

    Args:
        settings: The sections of a recipe, such as {"corpus": {...}, "encoder": {...}, "training": {...}}.
        source: Where the settings come from, for messages.
    """
    task_class = load_task(detect_task(settings))
    return validate(task_class.Settings, settings, source)


def check_experiment(settings: Mapping[str, Any], source: str) -> Experiment:
    """Return settings as an experiment, or raise one error that lists all mistakes in them.

    Args:
        settings: The sections of a recipe, such as {"corpus": {...}, "encoder": {...}, "training": {...}}.
        source: Where the settings come from. The error message begins with it.
    """
    task_class = load_task(detect_task(settings))
    experiment: Experiment = check_settings(task_class.Settings, settings, source)
    return experiment


def build_model(experiment: Experiment, vocabulary: Any) -> Any:
    """Build the model that an experiment describes, with weights drawn from torch's current generator state.

    Args:
        experiment: The settings of the model.
        vocabulary: A vocabulary, the `VocabularyPair` of parallel text, or just the number of words.
    """
    return create_task(experiment).build_model(vocabulary)


def create_task_for_run(run: RunFolder, required_task: str | None = None) -> Task[Any, Any, Any]:
    """Return a task object with the settings of a run.

    Args:
        run: The run folder.
        required_task: Name of the only task that is accepted. By default, every task is accepted.
    """
    task_class = load_task(run.task)
    if required_task is not None and required_task != run.task:
        required_noun = load_task(required_task).noun
        raise SettingsError(f"{run.path} is {task_class.noun}, not {required_noun}; use {task_class.verbs} with it")
    settings = run.config.get("settings", {})
    experiment = check_settings(task_class.Settings, settings, f"{run.path}/config.json")
    return task_class(experiment)


def open_run(path: Path | str, device: str = "cpu", *, task: str | None = None) -> TrainedRun[Any, Any, Any]:
    """Open a run folder: its model with the best weights, on a device and in evaluation mode, and its vocabulary.

    A finished run without weights, such as a record in `results/`, can be opened, too. Its results can be read, for
    example with `to_pandas`, but using its model or its vocabulary raises an error.

    Args:
        path: The run folder.
        device: `auto`, `cpu` or `cuda`.
        task: Name of the only task that is accepted. The run must then have weights. By default, every task is
            accepted.
    """
    run = RunFolder.open(Path(path))
    run_task = create_task_for_run(run, task)
    if task is None and run.result is not None and not (run.path / "best").exists():
        from reefknot.lab.tasks.contract import RecordedRun

        return RecordedRun(run, run_task.experiment)
    return run_task.open_run(run, device)


def open_data(run: RunFolder, data_folder: Path | None, *, task: str | None = None) -> Data:
    """Open the text that a run was trained on and scored with; raise `DataError` if it has changed.

    Args:
        run: The run folder.
        data_folder: Folder of the corpora, or the new folder of the text if it has moved.
        task: Name of the only task that is accepted. By default, every task is accepted.
    """
    dataset: Data = create_task_for_run(run, task).open_run_data(run, data_folder)
    return dataset


def evaluate_run(run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: ProgressCallback) -> Answer:
    """Score texts with a trained run; raise an error if an option of the request has no effect.

    Args:
        run: The run folder.
        request: The mode of evaluation and its settings.
        notify: Called with notes for the user, such as where scores were saved.
        progress: Called with the fraction of the work that is done.
    """
    task = _create_scoring_task(run)
    request.reject_unused(task.evaluation_options, f"{run.path}, which is {task.noun}")
    check_data_option(request.data, [task], advice=_TEXT_ADVICE)
    return task.evaluate(run, request, notify=notify, progress=progress)


def compare_systems(systems: Sequence[System], request: ComparisonRequest, *, notify: Notify) -> ComparisonAnswer:
    """Compare systems with the first one, the baseline; raise an error if their tasks differ.

    Args:
        systems: The systems. A system is one model, trained with one or more seeds.
        request: The options of the comparison.
        notify: Called with notes for the user, such as a note on different settings that do not prevent the comparison.
    """
    tasks = [_create_scoring_task(system.runs[0]) for system in systems]
    baseline = systems[0]
    baseline_task = tasks[0]
    for system, task in zip(systems, tasks, strict=True):
        if type(task) is not type(baseline_task):
            raise SettingsError(
                f"{baseline.path} is {baseline_task.noun} and {system.path} is {task.noun}: no fair comparison; "
                "compare runs of one kind"
            )
    request.reject_unused(baseline_task.comparison_options, f"{baseline.path}, which is {baseline_task.noun}")
    check_data_option(request.data, tasks, advice=_TEXT_ADVICE)
    return baseline_task.compare(systems, request, notify=notify)


def check_data_option(
    data: Path | None, tasks: Iterable[Task[Any, Any, Any]], advice: str = "leave --data out"
) -> None:
    """Raise an error with advice if `--data` is given but none of the tasks reads its text from that folder."""
    tasks = list(tasks)
    if data is None or any(task.reads_data_folder for task in tasks):
        return
    unique_names = dict.fromkeys(task.experiment.corpus.name for task in tasks)
    corpus_names = ", ".join(unique_names)
    raise SettingsError(f"--data has no effect, because the text is {corpus_names}; {advice}")


def _create_scoring_task(run: RunFolder) -> Task[Any, Any, Any]:
    """Return the task of a run; raise an error if its models do not assign probabilities to texts."""
    task = create_task_for_run(run)
    if not task.scores_text:
        raise SettingsError(f"{run.path} is {task.noun}, which cannot score a text; use {task.verbs} with it")
    return task
