"""An experiment from its settings to its result: open the text, build, train, score the best weights, write it down.

Also the way back: a run folder opened as a model with its words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reefknot.errors import DataError, ReefknotError, SettingsError
from reefknot.evaluation.frequency import loss_by_frequency
from reefknot.evaluation.generation import generate
from reefknot.evaluation.neighbors import examples, nearest
from reefknot.evaluation.perplexity import Score, score
from reefknot.evaluation.search import tails_opened
from reefknot.inputs.char_cnn import CharCNN
from reefknot.models.language_model import LanguageModel, evaluating
from reefknot.recipe import Experiment, Recipe, Row, build_model, check_experiment
from reefknot.runs.environment import capture
from reefknot.runs.folder import RunFolder, config_hash
from reefknot.text.corpora import BUILT_IN, KNOWN
from reefknot.text.dataset import Dataset, open_dataset
from reefknot.text.streams import Streams
from reefknot.text.vocabulary import Vocabulary
from reefknot.training.display import Display, Logged
from reefknot.training.distributed import World
from reefknot.training.generators import seed_everything, set_determinism
from reefknot.training.loop import Trainer
from reefknot.training.signals import stopping_at_once
from reefknot.training.state import Progress, load_weights
from reefknot.training.trackers import tensorboard

RESULT_FORMAT = 1


def default_folder(recipe: Recipe, row: Row, seed: int) -> Path:
    """Where a row's run lies unless the user says otherwise."""
    return Path("runs") / recipe.name / row.slug / f"seed{seed}"


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
) -> dict[str, Any] | None:
    """Train a row in its folder, or go on where it stands. Returns result.json (None but in the first process)."""
    experiment = recipe.experiments[row.name]
    seed = experiment.training.seed
    out = out or default_folder(recipe, row, seed)
    name = f"{row.name}, seed {seed}" if seed else row.name
    dataset = open_dataset(experiment.corpus, experiment.vocabulary, data=data, say=display.say)
    settings = experiment.training
    text = dataset.splits["train"]
    streams = Streams(text.ids, settings.batch, settings.steps, text.inputs).slice(world.rank, world.size)
    set_determinism(settings.determinism)
    seed_everything(seed)
    model = recipe.build(row, dataset.vocabulary)
    _check_parameters(model, recipe, row)
    # Ranks build the same weights and drop other units.
    seed_everything(seed, world.rank)
    with _enter(out, run_config(recipe, row, experiment, dataset), world) as run, _logging_errors(run, world):
        if run.result is not None:
            display.say(f"{name}  done already: {out}")
            return run.result
        if world.first:
            display = Logged(display, run.log)
            run.log(dataset.describe())
            dataset.vocabulary.save(run.vocabulary_path)
            _note_environment(run, display)
        display.say(f"{name}  {out}  {dataset.summary}")

        def validate() -> float:
            return _score(model, dataset, experiment, "valid").mean

        trackers = [tensorboard(run.path / "tensorboard")] if track and world.first else []
        trainer = Trainer(
            model, streams, validate, settings, run, world=world, display=display, name=name, trackers=trackers
        )
        progress = trainer.train()
        if not world.first:
            return None
        display.update(f"{name}  scoring the best weights")
        result = _finish(model, dataset, experiment, run, progress, row, recipe.changed[row.name], world)
        per_word = f", {result['test']['word_perplexity']:,.2f} per word" if dataset.vocabulary.bpe else ""
        display.say(f"{name}  test perplexity {result['test']['perplexity']:,.2f}{per_word}")
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


def run_config(recipe: Recipe, row: Row, experiment: Experiment, dataset: Dataset) -> dict[str, Any]:
    """What config.json holds: equal configs give equal runs, so the text is part of it."""
    return {
        "recipe": recipe.name,
        "row": row.name,
        "corpus": dataset.fingerprint,
        "settings": experiment.model_dump(mode="json"),
    }


def is_done(out: Path, recipe: Recipe, row: Row, seed: int, dataset: Dataset) -> bool:
    """Whether `out` holds the result of this row and seed, with these very settings, on this very text."""
    if not (out / "result.json").exists():
        return False
    experiment = recipe.experiments[row.name]
    seeded = experiment.model_copy(update={"training": experiment.training.model_copy(update={"seed": seed})})
    return RunFolder.open(out).config == run_config(recipe, row, seeded, dataset)


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


def _score(model: LanguageModel, dataset: Dataset, experiment: Experiment, split: str) -> Score:
    return score(
        model,
        dataset.splits[split],
        dataset.vocabulary,
        streams=experiment.evaluation.streams,
        precision=experiment.training.precision,
    )


def _finish(
    model: LanguageModel,
    dataset: Dataset,
    experiment: Experiment,
    run: RunFolder,
    progress: Progress,
    row: Row,
    changed: list[str],
    world: World,
) -> dict[str, Any]:
    """Score the best weights and write everything a report or a comparison reads."""
    load_weights(model, best_weights(run))
    scores = {split: _score(model, dataset, experiment, split) for split in ("valid", "test")}
    run.write_scores({split: torch.from_numpy(each.nll) for split, each in scores.items()})
    environment = run.environment or {}
    gpus = environment.get("gpus") or ["GPU"]
    result = {
        "format": RESULT_FORMAT,
        **{key: run.config[key] for key in ("recipe", "row")},
        "seed": experiment.training.seed,
        **{key: environment.get(key) for key in ("command", "commit", "dirty", "source_sha256")},
        "config_hash": config_hash(run.config),
        "corpus": {"name": dataset.name, "fingerprint": dataset.fingerprint, "describe": dataset.describe()},
        "parameters": {
            "total": sum(model.parameter_counts().values()),
            "parts": model.parameter_counts(),
            "expected": row.parameters,
        },
        "paper": row.paper,
        "changed": changed,
        **{split: each.summary() for split, each in scores.items()},
        "best": {"step": progress.best_step, "epoch": progress.best_epoch},
        "training": {
            "steps": progress.step,
            "epochs": experiment.training.epochs,
            "tokens": progress.tokens,
            "seconds": progress.seconds,
            "tokens_per_second": progress.tokens / progress.seconds,
            "peak_memory_bytes": progress.peak_memory_bytes,
            "device": gpus[0] if world.device.type == "cuda" else environment.get("cpu", "cpu"),
            "processes": world.size,
        },
        "frequency": loss_by_frequency(scores["test"], dataset.splits["test"], dataset.vocabulary),
        **_look_inside(model, dataset.vocabulary),
    }
    opened = tails_opened(model, dataset.splits["test"])
    if opened is not None:
        result["tails_opened"] = asdict(opened)
    run.write_result(result)
    return result


def _look_inside(model: LanguageModel, vocabulary: Vocabulary) -> dict[str, Any]:
    """Neighbours and samples: what a person looks at first."""
    words = examples(vocabulary, 8)
    neighbors: dict[str, Any] = {
        end: nearest(vectors, vocabulary, words, 5) for end, vectors in word_vectors(model).items()
    }
    start = [vocabulary.eos if vocabulary.eos is not None else 0]
    never = () if vocabulary.unk is None else (vocabulary.unk,)
    samples = []
    for seed, temperature in enumerate((1.0, 0.8, 0.5)):
        ids = generate(model, start, 50, temperature=temperature, never=never, seed=seed)
        text = vocabulary.text(ids).strip()
        samples.append({"prompt": "", "text": text, "temperature": temperature, "seed": seed})
    return {"neighbors": neighbors | {"tied": model.tied}, "samples": samples}


def word_vectors(model: LanguageModel) -> dict[str, torch.Tensor]:
    """One vector per token at either end; an input end may have more, of words that are only spelled."""
    with evaluating(model):
        return {"input": model.input.vectors(), "labels": model.output.vectors()}


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
    if corpus.name not in (BUILT_IN, *KNOWN) and not Path(corpus.name).expanduser().is_dir():
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
