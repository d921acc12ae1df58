"""An experiment from its settings to its result: open the text, build, train, judge what was learned, write it down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reefknot.errors import ReefknotError, SettingsError
from reefknot.lab.recipes.recipe import Experiment, Recipe, Row
from reefknot.lab.runs.environment import capture
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import RunResult
from reefknot.lab.sessions import Asked, LanguageModelSession, Session, SkipGramSession
from reefknot.lab.starts import Start, begin, default_folder
from reefknot.lab.tasks.initialisation import file_hashes, table_files
from reefknot.lab.tasks.skip_gram import SkipGramExperiment
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.pair_dataset import PairDataset, open_pairs
from reefknot.lab.text.vocabulary import Sides, Vocabulary
from reefknot.lab.training.display import Display, Logged
from reefknot.lab.training.distributed import World
from reefknot.lab.training.signals import stopping_at_once
from reefknot.storage.progress import Say, silent

Texts = Dataset | PairDataset
"""What is trained on and scored with: texts, or pairs of them."""


@stopping_at_once("stopped; the same command goes on where it stands")
def train(
    recipe: Recipe,
    row: Row,
    out: Path | None = None,
    *,
    data: Path | None = None,
    world: World,
    display: Display,
    track: bool = False,
    tell_test: bool = True,
    start: Path | None = None,
) -> RunResult | None:
    """Train a row in its folder, or go on where it stands. Returns result.json (None but in the first process).

    `start` is the finished run to begin with, where the row begins with one; left out, the other row's, beside `out` or
    in its default folder.
    """
    experiment = recipe.experiments[row.name]
    asked = Asked(recipe, row, world, data, track, tell_test)
    out = out or default_folder(recipe, row, asked.seed)
    first = begin(recipe, row, asked.seed, start, out, data)
    dataset = open_experiment(experiment, data=data, say=display.say)
    begun = RunFolder.open(out) if (out / "config.json").is_file() else None
    config = run_config(recipe, row, experiment, dataset, first, begun)
    if begun:
        _refuse_changed_files(begun, config)
        experiment = _without_files(experiment, begun)
    session = _session(asked, experiment, dataset, first, display.say)
    with _enter(out, config, world) as run, _logging_errors(run, world):
        if run.result is not None:
            display.say(f"{asked.name}  done already: {out}")
            return run.result
        if world.first:
            display = Logged(display, run.log)
            run.log(dataset.describe())
            save_words(run, dataset.words)
            _note_environment(run, display)
        display.say(f"{asked.name}  {out}  {dataset.summary}")
        if first and first.run:
            display.say(f"{asked.name}  begins with the best weights of {first.run.path}")
        return session.train(run, display)


def _session(
    asked: Asked, experiment: Experiment | SkipGramExperiment, dataset: Texts, first: Start | None, say: Say
) -> Session:
    if isinstance(experiment, Experiment):
        return LanguageModelSession(asked, experiment, dataset, first, say)
    assert isinstance(dataset, Dataset)  # skip-gram reads no pairs
    return SkipGramSession(asked, experiment, dataset)


def open_experiment(
    experiment: Experiment | SkipGramExperiment, *, data: Path | None = None, say: Say = silent
) -> Texts:
    """What an experiment is trained on and scored with."""
    corpus, vocabulary = experiment.corpus, experiment.vocabulary
    if corpus.pairs is not None:
        return open_pairs(corpus, vocabulary, data=data, say=say)
    return open_dataset(corpus, vocabulary, data=data, say=say)


def save_words(run: RunFolder, words: Vocabulary | Sides) -> None:
    """The vocabulary of a run; where the source of a translator has one of its own, that too."""
    if isinstance(words, Sides):
        if not words.joint:
            run.source_vocabulary_path.parent.mkdir(exist_ok=True)
            words.vocabularies[0].save(run.source_vocabulary_path)
        words = words.vocabularies[1]
    words.save(run.vocabulary_path)


@contextmanager
def _logging_errors(run: RunFolder, world: World) -> Iterator[None]:
    """What ends a sitting stands in its log."""
    try:
        yield
    except ReefknotError as error:
        if world.first:
            run.log(str(error))
        raise


def run_config(
    recipe: Recipe,
    row: Row,
    experiment: Experiment | SkipGramExperiment,
    dataset: Texts,
    start: Start | None = None,
    begun: RunFolder | None = None,
) -> dict[str, Any]:
    """What config.json holds: equal configs give equal runs, so the text is part of it, and what it begins with.

    Of files that tables start from and that are gone, a run that has `begun` says what they were.
    """
    config = {
        "recipe": recipe.name,
        "row": row.name,
        "corpus": dataset.fingerprint,
        # How processes share a model out is not part of what a run is: others may go on with it.
        "settings": experiment.model_dump(mode="json", exclude={"training": {"shard"}}),
    }
    if start:
        return config | {"start": start.record}
    recorded = begun.config.get("vectors") if begun else None
    files = file_hashes(experiment.tables, recorded) if isinstance(experiment, Experiment) else {}
    return config | ({"vectors": files} if files else {})


def _refuse_changed_files(begun: RunFolder, config: dict[str, Any]) -> None:
    """Vectors that changed under the name of their file, in words: two hashes tell nobody what happened."""
    old, new = begun.config, config
    for name, digest in new.get("vectors", {}).items():
        if old.get("settings") == new["settings"] and old.get("vectors", {}).get(name) != digest:
            file = new["settings"]["tables"][name]["vectors"]
            raise SettingsError(
                f"the vectors of tables.{name} are others by now: {file} has changed; restore it or use another --out"
            )


def _without_files(experiment: Experiment | SkipGramExperiment, begun: RunFolder) -> Experiment | SkipGramExperiment:
    """An experiment to go on with: a run with weights of its own has its tables there, and reads no file again."""
    if not isinstance(experiment, Experiment):
        return experiment
    files = table_files(experiment.tables)
    if not files or (begun.result is None and begun.checkpoints.latest(silent) is None):
        return experiment
    bare = {name: experiment.tables[name].model_copy(update={"vectors": None}) for name in files}
    return experiment.model_copy(update={"tables": {**experiment.tables, **bare}})


def is_done(out: Path, recipe: Recipe, row: Row, seed: int, dataset: Texts, start: Path | None = None) -> bool:
    """Whether `out` holds the result of this row and seed, with these very settings, on this very text, begun with the
    run that is at `start` now, if one is."""
    if not (out / "result.json").exists():
        return False
    experiment = recipe.experiments[row.name]
    seeded = experiment.model_copy(update={"training": experiment.training.model_copy(update={"seed": seed})})
    first = begin(recipe, row, seed, start, out)
    run = RunFolder.open(out)
    return run.config == run_config(recipe, row, seeded, dataset, first, run)


def _note_environment(run: RunFolder, display: Display) -> None:
    """Write down what this sitting runs on, and what earlier ones did where that was something else."""
    now, before = capture(), run.environment or {}
    earlier = before.pop("earlier", [])
    changed = [key for key in ("source_sha256", "python", "torch", "gpus") if before and before.get(key) != now[key]]
    if changed:
        earlier = [*earlier, before]
        display.say(f"this run was begun with another environment ({', '.join(changed)}); both are written down")
    run.write_environment(now | ({"earlier": earlier} if earlier else {}))


def _enter(out: Path, config: dict[str, Any], world: World) -> RunFolder:
    run = RunFolder.open_for_training(out, config) if world.first else None
    world.wait()
    return run or RunFolder.open(out)
