"""Trains one row of a recipe (one experiment): opens the text, builds the model, trains, scores, writes the result.

    recipe = load_recipe("demo")
    result = train(recipe, recipe.row("tied"), world=world, display=display)

`train` is the entry point. A run is one training of a row with one seed, and has a folder. A task is a kind of
experiment: language models, translation or skip-gram. `train` is the same for every task; `lab/tasks` has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reefknot.errors import CorpusNotFound, DataError, ReefknotError, SettingsError
from reefknot.lab.recipes.recipe import Recipe, Row, default_folder
from reefknot.lab.runs.definition import describe_unknown_share, format_perplexity, warn_of_unknown_words
from reefknot.lab.runs.earlier import earlier_folders
from reefknot.lab.runs.environment import capture_environment
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import FORMAT, SPLITS, Corpus, Judgement, Parameters, RunResult, Training
from reefknot.lab.runs.scores import TextScore
from reefknot.lab.runs.threads import count_free_threads
from reefknot.lab.tasks import create_task
from reefknot.lab.tasks.contract import Data, Experiment, Session, Task
from reefknot.lab.training.display import Display, LoggedDisplay
from reefknot.lab.training.distributed import World
from reefknot.lab.training.generators import seed_everything
from reefknot.lab.training.signals import raise_on_signal
from reefknot.lab.training.state import Progress, load_weights
from reefknot.lab.training.trackers import Tracker, check_trackers, open_tracker
from reefknot.storage.progress import Notify, silent

if TYPE_CHECKING:
    from torch import Tensor

    from reefknot.lab.evaluation.similarity import Benchmark
    from reefknot.lab.recipes.starts import StartRun


@raise_on_signal("stopped; run the same command again to continue")
def train(
    recipe: Recipe,
    row: Row,
    out: Path | None = None,
    *,
    data: Path | None = None,
    world: World,
    display: Display,
    track: Sequence[str] = (),
    show_test: bool = True,
    start: Path | None = None,
    longer: bool = False,
) -> RunResult | None:
    """Train a row in its run folder, or resume it there.

    The folder is created only after all checks, so that invalid settings leave no folder behind.

    Args:
        recipe: The recipe that has the row.
        row: The row to train.
        out: The run folder. The default is runs/RECIPE/ROW/seedN.
        data: Folder of the corpora.
        world: The processes that train together.
        display: Where progress and results are printed.
        track: Names of the trackers that metrics are also written to (`lab/training/trackers.py`).
        show_test: Print the test scores when training ends.
        start: The finished run to start from, for a row with `training.start`. By default, this is the run of the row
            that `training.start` names, next to `out` or in its default folder.
        longer: If the run in the folder is shorter and otherwise equal, continue it to the new length. Its result moves
            to `earlier` in the folder. Call `check_longer` (`lab/recipes/longer.py`) first.

    Returns:
        The result, or None in all processes but the first.
    """
    experiment = recipe.experiments[row.name]
    if out is None:
        out = default_folder(recipe, row, experiment.seed)
    label = row.name  # at the start of every printed line
    if experiment.seed:
        label = f"{row.name}, seed {experiment.seed}"

    # Everything that may be rejected comes before the run folder is created.
    check_trackers(track)
    start_run = _load_start_run(recipe, row, experiment.seed, start, out, data)
    dataset = create_task(experiment).open_data(data, notify=display.print)
    existing_run = RunFolder.open(out) if (out / "config.json").is_file() else None
    config = build_run_config(recipe, row, experiment, dataset, start_run=start_run, existing_run=existing_run)
    if existing_run:
        _reject_changed_files(existing_run, config)
        _restore_threads(existing_run, world, display)
        # A resumed run has its tables in its checkpoint and does not read the vector files again.
        if "vectors" in config and _has_weights(existing_run):
            experiment = experiment.without_files()
    elif world.size == 1 and world.device.type == "cpu":
        _leave_busy_cpus(display)
    task = create_task(experiment)
    model, messages = _build_model(
        task, recipe=recipe, row=row, dataset=dataset, start_run=start_run, world=world, notify=display.print
    )
    is_finished = existing_run is not None and existing_run.result is not None
    if longer or not is_finished:
        task.check_model(model, world)

    # Train in the run folder.
    with _enter_folder(out, config, world, longer=longer) as run, _logging_errors(run, world):
        if run.result is not None:
            display.print(f"{label}  done already: {out}")
            return run.result
        if world.is_first:
            display = LoggedDisplay(display, run.log)
            run.log(dataset.describe())
            task.save_vocabularies(run, dataset)
            _record_environment(run, display, world)
        for message in (f"{out}  {dataset.summary}", *messages):
            display.print(f"{label}  {message}")

        benchmarks = _load_benchmarks(experiment, data, display)
        with ExitStack() as open_trackers:
            trackers: list[Tracker] = []
            for name in track if world.is_first else ():
                tracker = open_tracker(name, run, lambda message: display.print(f"{label}  {message}"))
                trackers.append(open_trackers.enter_context(closing(tracker)))
            session = Session(run, world, display, label, trackers)
            result = _fit_and_score(
                task, model, recipe=recipe, row=row, dataset=dataset, session=session, benchmarks=benchmarks
            )
            if result is not None:
                score_line = _summarise_scores(result, SPLITS if show_test else ("valid",))
                for track_line in trackers:
                    track_line(score_line)
        if result is not None:
            run.write_result(result)
            headline = format_headline(result) if show_test else "finished"
            display.print(f"{label}  {headline}")
            _warn_of_unknown_words(result, display, label)
        return result


def _fit_and_score(
    task: Task[Any, Any, Any],
    model: Any,
    *,
    recipe: Recipe,
    row: Row,
    dataset: Data,
    session: Session,
    benchmarks: dict[str, Benchmark],
) -> RunResult | None:
    """Train the model and score it. Return None in all processes but the first."""
    fitted = task.fit(model, dataset, session)
    if fitted is None:
        return None
    session.display.update(f"{session.name}  scoring the trained model")
    scores = task.score(fitted.model, dataset, session, fitted.progress, benchmarks)
    return RunResult(
        **_describe_origin(session.run, row, dataset, task.experiment),
        changed=tuple(recipe.changed[row.name]),
        parameters=_count_parameters(fitted.model, row),
        training=_summarise_training(task.experiment, session, fitted.progress),
        **scores,
    )


def _has_weights(run: RunFolder) -> bool:
    """Return whether a run is finished or has a checkpoint."""
    return run.result is not None or run.checkpoints.load_latest(silent) is not None


def _build_model(
    task: Task[Any, Any, Any],
    recipe: Recipe,
    row: Row,
    dataset: Data,
    start_run: StartRun | None,
    world: World,
    notify: Notify,
) -> tuple[Any, list[str]]:
    """Return the model with the weights that training starts from, and messages to print when training starts."""
    task.check_data(dataset, world)

    seed = task.experiment.seed
    seed_everything(seed)
    with recipe.add_row_to_errors(row):
        model = task.build_model(dataset.vocabulary_pair)
    num_parameters = sum(model.parameter_counts().values())
    if row.parameters not in (None, num_parameters):
        raise SettingsError(
            f'{recipe.name}, row "{row.name}": {num_parameters:,} parameters, expected {row.parameters:,}'
        )

    messages = task.prepare(model, dataset, from_files=start_run is None, notify=notify)
    if start_run and start_run.run:
        _load_start_weights(model, start_run.run, start_run.weights, task, dataset)
        messages = [f"starts from the best weights of {start_run.run.path}", *messages]

    # All ranks build the same weights, but each draws its own dropout masks.
    seed_everything(seed, world.rank)
    return model, messages


def _load_start_run(
    recipe: Recipe, row: Row, seed: int, folder: Path | None, out: Path, data: Path | None = None
) -> StartRun | None:
    """Return the run that a row starts from, or None if the row starts from random weights."""
    if folder is None and recipe.experiments[row.name].start is None:
        return None
    from reefknot.lab.recipes.starts import load_start

    return load_start(recipe, row, seed, folder, out, data)


def _load_start_weights(
    model: Any, run: RunFolder, weights: dict[str, Tensor], task: Task[Any, Any, Any], dataset: Data
) -> None:
    """Load the weights of another run into the model; raise an error if they do not fit."""
    run_vocabularies = task.load_vocabularies(run).vocabularies
    data_vocabularies = dataset.vocabulary_pair.vocabularies
    run_fingerprints = [vocabulary.fingerprint for vocabulary in run_vocabularies]
    data_fingerprints = [vocabulary.fingerprint for vocabulary in data_vocabularies]
    if run_fingerprints != data_fingerprints:
        raise DataError(
            f"cannot start from {run.path}: it has another vocabulary; start from a run with the same vocabulary"
        )
    try:
        load_weights(model, weights)
    except DataError as error:
        raise DataError(f"cannot start from {run.path}: {error}") from error


@contextmanager
def _logging_errors(run: RunFolder, world: World) -> Iterator[None]:
    """Write the error that ends training to the run's log."""
    try:
        yield
    except ReefknotError as error:
        if world.is_first:
            run.log(str(error))
        raise


def build_run_config(
    recipe: Recipe,
    row: Row,
    experiment: Experiment,
    dataset: Data,
    start_run: StartRun | None = None,
    existing_run: RunFolder | None = None,
) -> dict[str, Any]:
    """Return the content of config.json.

    Runs with equal configs are equal. So the config includes hashes of the text and of the weights or files that
    training starts from.

    Args:
        recipe: The recipe that has the row.
        row: The row.
        experiment: The settings of the row.
        dataset: The text.
        start_run: The run that training starts from.
        existing_run: The run to resume. It has recorded the hashes of files that may be gone.
    """
    config = {
        "recipe": recipe.name,
        "row": row.name,
        "task": experiment.task,
        "corpus": dataset.fingerprint,
        # Sharding does not change the result, so a run may be resumed with another value of training.shard.
        "settings": experiment.model_dump(mode="json", exclude={"training": {"shard"}}),
    }
    if start_run:
        return config | {"start": start_run.record}

    recorded_hashes = existing_run.config.get("vectors") if existing_run else None
    hash_by_table = experiment.hash_files(recorded_hashes)
    if hash_by_table:
        config["vectors"] = hash_by_table
    return config


def _reject_changed_files(existing_run: RunFolder, config: dict[str, Any]) -> None:
    """Raise an error that names the vector file that has changed. The general message would only show its hashes."""
    old_config = existing_run.config
    if old_config.get("settings") != config["settings"]:
        return
    old_hashes = old_config.get("vectors", {})
    for table_name, file_hash in config.get("vectors", {}).items():
        if old_hashes.get(table_name) != file_hash:
            vector_file = config["settings"]["tables"][table_name]["vectors"]
            raise SettingsError(
                f"{vector_file}, the file of tables.{table_name}.vectors, has changed since training began; restore "
                "it, or use another --out"
            )


def is_done(out: Path, recipe: Recipe, row: Row, seed: int, dataset: Data, start: Path | None = None) -> bool:
    """Return whether `out` has the result of this row and seed, with equal settings, text and starting weights."""
    if not (out / "result.json").exists():
        return False
    experiment = recipe.experiments[row.name].with_seed(seed)
    start_run = _load_start_run(recipe, row, seed, start, out)
    run = RunFolder.open(out)
    expected_config = build_run_config(recipe, row, experiment, dataset, start_run, existing_run=run)
    return run.config == expected_config


def _restore_threads(run: RunFolder, world: World, display: Display) -> None:
    """Use as many threads as the first session of a run, because sums in another order have other bits."""
    import torch

    environment = run.environment or {}
    threads = environment.get("threads")
    same_processes = environment.get("processes", 1) == world.size
    if isinstance(threads, int) and same_processes and threads != torch.get_num_threads():
        count = f"{threads} CPU thread{'s' * (threads != 1)}"
        display.print(f"uses {count}, as when the run was started, so that its results stay the same")
        torch.set_num_threads(threads)


def _leave_busy_cpus(display: Display) -> None:
    """Use no threads for the CPUs that other programs use. The run keeps its number of threads when it is resumed."""
    import torch

    all_threads = torch.get_num_threads()
    threads = count_free_threads(all_threads)
    if threads < all_threads:
        display.print(
            f"uses {threads} of {all_threads} CPU threads, because other programs use the other CPUs; "
            "OMP_NUM_THREADS sets another number"
        )
        torch.set_num_threads(threads)


def _record_environment(run: RunFolder, display: Display, world: World) -> None:
    """Record the environment of this session, and the different environments of earlier sessions."""
    environment = capture_environment() | {"processes": world.size}
    last_environment = run.environment or {}  # empty in the first session of a run
    earlier_environments = last_environment.pop("earlier", [])

    changed_keys = []
    for key in ("source_sha256", "python", "torch", "gpus"):
        if last_environment and last_environment.get(key) != environment[key]:
            changed_keys.append(key)
    if changed_keys:
        earlier_environments = [*earlier_environments, last_environment]
        display.print(f"this run was started in another environment ({', '.join(changed_keys)}); both are recorded")

    if earlier_environments:
        environment["earlier"] = earlier_environments
    run.write_environment(environment)


def _enter_folder(out: Path, config: dict[str, Any], world: World, *, longer: bool) -> RunFolder:
    """Open the run folder. The first process creates it; the other processes wait for it."""
    if world.is_first:
        run = RunFolder.open_for_training(out, config, longer=longer)
        world.barrier()
        return run
    world.barrier()
    return RunFolder.open(out)


def _load_benchmarks(experiment: Experiment, data: Path | None, display: Display) -> dict[str, Benchmark]:
    """Return the word-similarity benchmarks by name; empty if they were not requested or are not on this machine."""
    if not experiment.evaluates_similarity:
        return {}
    from reefknot.lab.evaluation.similarity import find_benchmarks

    try:
        return find_benchmarks(data)
    except CorpusNotFound as error:
        display.print(f"evaluation.similarity is skipped: {error}")
        return {}


# -- result.json -------------------------------------------------------------------------------------------------------


def _describe_origin(run: RunFolder, row: Row, dataset: Data, experiment: Experiment) -> dict[str, Any]:
    """Return the fields of a result that describe its origin, as arguments of `RunResult`."""
    environment = run.environment or {}
    recorded_environment = {key: environment.get(key) for key in ("command", "commit", "dirty", "source_sha256")}
    return {
        "format": FORMAT,
        "task": experiment.task,
        "recipe": run.config["recipe"],
        "row": run.config["row"],
        "seed": experiment.seed,
        **recorded_environment,
        "config_hash": run.config_hash,
        "corpus": Corpus(name=dataset.name, fingerprint=dataset.fingerprint, describe=dataset.describe()),
        "paper": row.paper,
        "paper_similarity": row.paper_similarity,
    }


def _count_parameters(model: Any, row: Row) -> Parameters:
    count_by_part: dict[str, int] = model.parameter_counts()
    return Parameters(total=sum(count_by_part.values()), parts=count_by_part, expected=row.parameters)


def _summarise_training(experiment: Experiment, session: Session, progress: Progress) -> Training:
    environment = session.run.environment or {}
    if session.world.device.type == "cuda":
        gpus = environment.get("gpus") or ["GPU"]
        device = gpus[0]
    else:
        device = environment.get("cpu", "cpu")
    # A result has these fields only if they have a meaning.
    optional_fields: dict[str, Any] = {}
    if experiment.workers is not None:
        optional_fields["workers"] = experiment.workers
    earlier_names = tuple(folder.name for folder in earlier_folders(session.run.path))
    if earlier_names:
        optional_fields["earlier"] = earlier_names
    return Training(
        steps=progress.step,
        averaged_from_epoch=progress.averaged_from or None,
        stopped=progress.stopped or None,
        epochs=experiment.epochs,
        tokens=progress.tokens,
        seconds=progress.seconds,
        tokens_per_second=progress.tokens / progress.seconds,
        peak_memory_bytes=progress.peak_memory_bytes,
        device=device,
        processes=session.world.size,
        **optional_fields,
    )


def _summarise_scores(result: RunResult, splits: Iterable[str]) -> dict[str, Any]:
    """Return the scores of a result as a line for trackers."""
    line: dict[str, Any] = {"kind": "result", "step": result.training.steps}
    for split in splits:
        scores: dict[str, float] = {}
        for score in result.scores(split):
            scores.setdefault(score.metric.name, score.value)  # the first perplexity is the perplexity per word
        line[split] = scores
    return line


def format_headline(result: RunResult) -> str:
    """Return the scores of a result in one line: perplexities, BLEU, correlations with human judgements."""
    phrases = []
    if result.test:
        phrases.append(", ".join(_format_scores(result, result.test)))
    for end, judgements in result.similarity.items():
        correlations = _format_correlations(judgements)
        if correlations:
            phrases.append(f"rho of {end} vectors: {correlations}")
    if not phrases:
        return "finished"
    return "; ".join(phrases)


def _warn_of_unknown_words(result: RunResult, display: Display, label: str) -> None:
    score = result.test
    if score is None:
        return
    warning = warn_of_unknown_words(score.unknown_share, "test", subwords=score.uses_subwords)
    if warning:
        display.print(f"{label}  {warning}")


def _format_correlations(judgements: Iterable[Judgement]) -> str:
    """Return the correlations on the benchmarks of Press & Wolf, with their numbers of pairs."""
    from reefknot.lab.evaluation.benchmarks import PRESS

    phrases = []
    for judgement in judgements:
        if judgement.name in PRESS and judgement.rho is not None:
            pair_counts = f"{judgement.pairs:,} of {judgement.of:,} pairs"
            phrases.append(f"{judgement.name} {judgement.rho:.2f} ({pair_counts})")
    return ", ".join(phrases)


def _format_scores(result: RunResult, test: TextScore) -> list[str]:
    """Return a phrase for each score of the texts: BLEU, perplexities, and perplexities by the rules of a paper."""
    phrases = []
    translated = result.translated("test")
    if translated:
        phrases.append(f"test BLEU {translated.bleu:.2f}")

    test_perplexity = f"test perplexity {format_perplexity(test.perplexity)}"
    if test.words != test.tokens:
        test_perplexity += " per token"
    if test.streams and test.streams > 1:
        test_perplexity += f" in {test.streams} streams"
    phrases.append(test_perplexity)
    if test.words != test.tokens:
        if test.has_words:
            phrases.append(f"{format_perplexity(test.per_word)} per word")
        elif test.fair_bits_per_byte is not None:
            phrases.append(f"{test.fair_bits_per_byte:.3f} bits per byte")
    phrases.append(describe_unknown_share(test.unknown_share))
    if result.train:
        phrases.append(f"train {format_perplexity(result.train.perplexity)}")

    protocol = result.protocol
    if protocol:
        score_by_split = {"valid": protocol.valid, "test": protocol.test}
        perplexities = [
            f"{split} {format_perplexity(score.perplexity)}" for split, score in score_by_split.items() if score
        ]
        phrases.append(f"counted as {protocol.name}: {', '.join(perplexities)}")
    return phrases
