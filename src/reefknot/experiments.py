"""An experiment from its settings to its result: open the text, build, train, score the best weights, write it down.

Also the way back: a run folder opened as a model with its words.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reefknot.durable import encode_tensors
from reefknot.errors import DataError, ReefknotError, SettingsError
from reefknot.findings import check_protocol, headline, score_split, write_findings
from reefknot.inputs.char_cnn import CharCNN
from reefknot.models.language_model import LanguageModel
from reefknot.recipe import Experiment, Recipe, Row, build_model, check_experiment
from reefknot.runs.environment import capture
from reefknot.runs.folder import RunFolder, config_hash
from reefknot.text.corpora import BUILT_IN, KNOWN, PREPARED
from reefknot.text.dataset import Dataset, open_dataset
from reefknot.text.streams import Streams
from reefknot.text.vocabulary import Vocabulary
from reefknot.training.display import Display, Logged
from reefknot.training.distributed import World
from reefknot.training.generators import seed_everything, set_determinism
from reefknot.training.loop import Trainer
from reefknot.training.signals import stopping_at_once
from reefknot.training.state import load_weights
from reefknot.training.trackers import tensorboard


def default_folder(recipe: Recipe, row: Row, seed: int, root: Path | None = None) -> Path:
    """Where a row's run lies unless the user says otherwise; `root` is the folder of all runs of the recipe."""
    return (root or Path("runs") / recipe.name) / row.slug / f"seed{seed}"


def start_folder(recipe: Recipe, row: Row, seed: int, root: Path | None = None) -> Path | None:
    """Where the run lies whose weights a row begins with, unless the user says otherwise; None: it begins with none."""
    start = recipe.experiments[row.name].training.start
    return default_folder(recipe, Row(name=start.row), seed, root) if start else None


def choose_device(name: str) -> str:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda: torch sees no GPU here; use --device cpu")
    if name not in ("cpu", "cuda"):
        raise SettingsError(f"--device {name}: must be auto, cpu or cuda")
    return name


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
) -> dict[str, Any] | None:
    """Train a row in its folder, or go on where it stands. Returns result.json (None but in the first process).

    `start` is the run to begin with, if the row begins with one and it does not lie beside this one.
    """
    experiment = recipe.experiments[row.name]
    seed = experiment.training.seed
    out = out or default_folder(recipe, row, seed)
    name = f"{row.name}, seed {seed}" if seed else row.name
    first = _find_start(recipe, row, seed, start)
    dataset = open_dataset(experiment.corpus, experiment.vocabulary, data=data, say=display.say)
    settings = experiment.training
    text = dataset.splits["train"]
    streams = Streams(
        text.ids, settings.batch, settings.steps, text.inputs, random_steps=settings.random_steps, seed=seed
    ).slice(world.rank, world.size)
    set_determinism(settings.determinism)
    seed_everything(seed)
    model = recipe.build(row, dataset.vocabulary)
    _check_parameters(model, recipe, row)
    check_protocol(experiment, dataset)
    if first:
        first.begin(model, dataset.vocabulary)
    # Ranks build the same weights and drop other units.
    seed_everything(seed, world.rank)
    config = run_config(recipe, row, experiment, dataset, first)
    with _enter(out, config, world) as run, _logging_errors(run, world):
        if run.result is not None:
            display.say(f"{name}  done already: {out}")
            return run.result
        if world.first:
            display = Logged(display, run.log)
            run.log(dataset.describe())
            dataset.vocabulary.save(run.vocabulary_path)
            _note_environment(run, display)
        display.say(f"{name}  {out}  {dataset.summary}")
        if first:
            display.say(f"{name}  begins with the best weights of {first.run.path}")

        def validate() -> float:
            return score_split(model, dataset, experiment, "valid").mean

        trackers = [tensorboard(run.path / "tensorboard")] if track and world.first else []
        trainer = Trainer(
            model, streams, validate, settings, run, world=world, display=display, name=name, trackers=trackers
        )
        progress = trainer.train()
        if not world.first:
            return None
        display.update(f"{name}  scoring the best weights")
        load_weights(model, best_weights(run))
        result = write_findings(model, dataset, experiment, run, progress, row, recipe.changed[row.name], world)
        display.say(f"{name}  {headline(result) if tell_test else 'finished'}")
        return result


@contextmanager
def _logging_errors(run: RunFolder, world: World) -> Iterator[None]:
    """What ends a sitting stands in its log."""
    try:
        yield
    except ReefknotError as error:
        if world.first:
            run.log(str(error))
        raise


def _check_parameters(model: LanguageModel, recipe: Recipe, row: Row) -> None:
    total = sum(model.parameter_counts().values())
    if row.parameters not in (None, total):
        raise SettingsError(f'{recipe.name}, row "{row.name}": {total:,} parameters, not {row.parameters:,}')


@dataclass(frozen=True)
class Start:
    """The finished run that another one begins with."""

    run: RunFolder
    weights: dict[str, torch.Tensor]

    def record(self) -> dict[str, str]:
        """What it is, wherever it lies."""
        digest = hashlib.sha256(encode_tensors(self.weights)).hexdigest()
        return {"config_hash": config_hash(self.run.config), "weights_sha256": digest}

    def begin(self, model: LanguageModel, vocabulary: Vocabulary) -> None:
        """Give a model the weights."""
        if Vocabulary.load(self.run.vocabulary_path).fingerprint != vocabulary.fingerprint:
            raise DataError(f"{self.run.path} knows other words, so its weights mean nothing here; begin with another")
        try:
            load_weights(model, self.weights)
        except DataError as error:
            raise DataError(f"cannot begin with {self.run.path}: {error}") from error


def _find_start(recipe: Recipe, row: Row, seed: int, folder: Path | None) -> Start | None:
    wanted = recipe.experiments[row.name].training.start
    if wanted is None:
        if folder is not None:
            raise SettingsError(f'row "{row.name}" begins with no other run; --start needs training.start.row=NAME')
        return None
    usual = default_folder(recipe, Row(name=wanted.row), seed)
    folder = folder or usual
    if not (folder / "result.json").exists():
        words = ["reefknot", "train", recipe.asked, "--row", wanted.row]
        words += [f"training.seed={seed}"] if seed else []
        words += ["--out", str(folder)] if folder != usual else []
        raise DataError(
            f'row "{row.name}" begins with the best weights of row "{wanted.row}", and {folder} is no finished run: '
            f"first run {shlex.join(words)}, or say with --start where it is"
        )
    run = RunFolder.open(folder)
    return Start(run, best_weights(run))


def run_config(
    recipe: Recipe, row: Row, experiment: Experiment, dataset: Dataset, start: Start | None = None
) -> dict[str, Any]:
    """What config.json holds: equal configs give equal runs, so the text is part of it, and what it begins with."""
    config = {
        "recipe": recipe.name,
        "row": row.name,
        "corpus": dataset.fingerprint,
        "settings": experiment.model_dump(mode="json"),
    }
    return config | ({"start": start.record()} if start else {})


def is_done(out: Path, recipe: Recipe, row: Row, seed: int, dataset: Dataset, start: Path | None = None) -> bool:
    """Whether `out` holds the result of this row and seed, with these very settings, on this very text, begun with the
    run that is at `start` now."""
    if not (out / "result.json").exists():
        return False
    experiment = recipe.experiments[row.name]
    seeded = experiment.model_copy(update={"training": experiment.training.model_copy(update={"seed": seed})})
    start = start or start_folder(recipe, row, seed)
    if start is not None and not (start / "result.json").exists():
        return False
    first = _find_start(recipe, row, seed, start)
    return RunFolder.open(out).config == run_config(recipe, row, seeded, dataset, first)


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


def best_weights(run: RunFolder) -> dict[str, torch.Tensor]:
    """The weights that did best on the validation text."""
    best = run.checkpoints.best()
    if best is None:
        raise DataError(f"{run.path} has no trained weights yet: finish its training first (reefknot train)")
    return run.checkpoints.load(best).model


@dataclass(frozen=True)
class TrainedRun:
    """A run folder as something to use."""

    run: RunFolder
    experiment: Experiment
    vocabulary: Vocabulary
    model: LanguageModel

    def dataset(self, data: Path | None) -> Dataset:
        """The texts the run was trained on and scored with."""
        return open_texts(self.run, data)

    def knowing(self, words: Iterable[str]) -> TrainedRun:
        """This run, with an input end that spells these words too; itself unless it was trained to keep spellings."""
        source = self.model.input
        if not (self.experiment.vocabulary.keep_spellings and isinstance(source, CharCNN)):
            return self
        vocabulary = self.vocabulary.spelling(words)
        source = source.spelling(vocabulary.spelled[len(self.vocabulary.spelled) :])
        model = LanguageModel(source, self.model.encoder, self.model.output, self.model.regularisation)
        return replace(self, vocabulary=vocabulary, model=model.eval())


def open_texts(run: RunFolder, data: Path | None) -> Dataset:
    """The texts a run was trained on and scored with, or an error if they are others by now.

    Where the folder of a text has been moved, `data` is its new place.
    """
    experiment = _experiment(run)
    corpus = experiment.corpus
    if corpus.name not in (BUILT_IN, *KNOWN, *PREPARED) and not Path(corpus.name).expanduser().is_dir():
        if data is None:
            raise DataError(
                f"{run.path}: its text was in {corpus.name}, and there is no such folder here; "
                "say with --data which folder holds train, valid and test text now"
            )
        corpus = corpus.model_copy(update={"name": str(data)})
    dataset = open_dataset(corpus, experiment.vocabulary, data=data)
    if dataset.fingerprint != run.config.get("corpus"):
        raise DataError(f"the corpus is not the one that {run.path} was trained on: its text has changed; restore it")
    return dataset


def _experiment(run: RunFolder) -> Experiment:
    return check_experiment(run.config.get("settings", {}), f"{run.path}/config.json")


def open_run(path: Path, device: str = "cpu") -> TrainedRun:
    """The model of a run with its best weights, ready to use."""
    run = RunFolder.open(path)
    experiment = _experiment(run)
    vocabulary = Vocabulary.load(run.vocabulary_path)
    model = build_model(experiment, vocabulary)
    load_weights(model, best_weights(run))
    return TrainedRun(run, experiment, vocabulary, model.to(choose_device(device)).eval())
