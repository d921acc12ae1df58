"""An experiment from its settings to its result: open the text, build, train, score the best weights, write it down.

Also the way back: a run folder opened as a model with its words.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from reefknot.durable import encode_tensors
from reefknot.errors import DataError, ReefknotError, SettingsError
from reefknot.findings import check_scoring, headline, score_split, write_findings
from reefknot.inputs.char_cnn import CharCNN
from reefknot.models.language_model import LanguageModel
from reefknot.recipe import Experiment, Recipe, Row, build_model, check_experiment
from reefknot.runs.environment import capture
from reefknot.runs.folder import RunFolder, config_hash
from reefknot.text.batches import Batches, batches_of
from reefknot.text.corpora import BUILT_IN, KNOWN, PAIRED, PREPARED, CorpusSettings
from reefknot.text.dataset import Dataset, open_dataset
from reefknot.text.pair_batches import PairBatches
from reefknot.text.pair_dataset import PairDataset, open_pairs
from reefknot.text.prepared import Say, silent
from reefknot.text.vocabulary import Sides, Vocabulary
from reefknot.training.display import Display, Logged
from reefknot.training.distributed import World
from reefknot.training.generators import seed_everything, set_determinism
from reefknot.training.loop import Trainer
from reefknot.training.signals import stopping_at_once
from reefknot.training.state import load_weights
from reefknot.training.trackers import tensorboard

Opened = TypeVar("Opened", Dataset, PairDataset)
Texts = Dataset | PairDataset
"""What is trained on and scored with: texts, or pairs of them."""


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

    `start` is the finished run to begin with, where the row begins with one; left out, the other row's, beside `out` or
    in its default folder.
    """
    experiment = recipe.experiments[row.name]
    settings, seed = experiment.training, experiment.training.seed
    out = out or default_folder(recipe, row, seed)
    name = f"{row.name}, seed {seed}" if seed else row.name
    first = _begin(recipe, row, seed, start, out, data)
    dataset = open_experiment(experiment, data=data, say=display.say)
    batches = training_batches(experiment, dataset).slice(world.rank, world.size)
    check_scoring(experiment, dataset)
    set_determinism(settings.determinism)
    model = _first_model(recipe, row, seed, dataset.words, first)
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
            save_words(run, dataset.words)
            _note_environment(run, display)
        display.say(f"{name}  {out}  {dataset.summary}")
        if first and first.run:
            display.say(f"{name}  begins with the best weights of {first.run.path}")

        def validate() -> float:
            return score_split(model, dataset, experiment, "valid").mean

        trackers = [tensorboard(run.path / "tensorboard")] if track and world.first else []
        trainer = Trainer(
            model, batches, validate, settings, run, world=world, display=display, name=name, trackers=trackers
        )
        progress = trainer.train()
        if not world.first:
            return None
        if (number := experiment.evaluation.average) is not None:
            run.checkpoints.average(number)
        display.update(f"{name}  scoring the best weights")
        # Processes that each hold a part of the model: what the first one scores alone is a whole one.
        sharded = settings.shard and world.size > 1
        scored = build_model(experiment, dataset.words).to(world.device) if sharded else model
        load_weights(scored, best_weights(run))
        result = write_findings(scored, dataset, experiment, run, progress, row, recipe.changed[row.name], world)
        display.say(f"{name}  {headline(result) if tell_test else 'finished'}")
        return result


def open_experiment(experiment: Experiment, *, data: Path | None = None, say: Say = silent) -> Texts:
    """What an experiment is trained on and scored with."""
    corpus, vocabulary = experiment.corpus, experiment.vocabulary
    if corpus.pairs is not None:
        return open_pairs(corpus, vocabulary, data=data, say=say)
    return open_dataset(corpus, vocabulary, data=data, say=say)


def training_batches(experiment: Experiment, dataset: Texts) -> Batches:
    """The training text, or pairs, as the experiment says that they are read."""
    settings = experiment.training
    if isinstance(dataset, PairDataset):
        pairs, eos = dataset.splits["train"], dataset.vocabulary.eos
        assert eos is not None  # no line of pairs is without
        return PairBatches(pairs.source, pairs.target, settings.batch, settings.steps, eos=eos, seed=settings.seed)
    text = dataset.splits["train"]
    return batches_of(settings, text.ids, text.inputs, dataset.vocabulary.eos)


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


def _first_model(recipe: Recipe, row: Row, seed: int, words: Vocabulary | Sides, first: Start | None) -> LanguageModel:
    """The model that the first update finds: drawn from the seed, or with the weights it begins with."""
    seed_everything(seed)
    model = recipe.build(row, words)
    total = sum(model.parameter_counts().values())
    if row.parameters not in (None, total):
        raise SettingsError(f'{recipe.name}, row "{row.name}": {total:,} parameters, not {row.parameters:,}')
    if first:
        first.begin(model, words)
    return model


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
    wanted = recipe.experiments[row.name].training.start
    if wanted is None:
        if folder is not None:
            raise SettingsError(f'row "{row.name}" begins with no other run; --start needs training.start.row=NAME')
        return None
    first = Row(name=wanted.row)
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
    raise SettingsError(
        f'row "{row.name}" starts from row "{first.name}", which has no finished run in {place.absolute()}. '
        f"Train it: `{shlex.join(words)}`, or name it with --start"
    )


def _begin(
    recipe: Recipe, row: Row, seed: int, folder: Path | None, out: Path, data: Path | None = None
) -> Start | None:
    """What a row begins with, or, where that is gone, what the run in `out` says it began with."""
    place = find_start(recipe, row, seed, folder, out, data)
    if place is None:
        record = _begun_with(out) if recipe.experiments[row.name].training.start else None
        return Start(record) if record else None
    run = RunFolder.open(place)
    weights = best_weights(run)
    digest = hashlib.sha256(encode_tensors(weights)).hexdigest()
    return Start({"config_hash": config_hash(run.config), "weights_sha256": digest}, run, weights)


def _begun_with(out: Path) -> dict[str, str] | None:
    """What a run says it began with; None where there is none, or none yet that has weights of its own."""
    if not (out / "config.json").exists():
        return None
    run = RunFolder.open(out)
    begun = run.result is not None or run.checkpoints.latest(lambda _: None) is not None
    return run.config.get("start") if begun else None


def run_config(
    recipe: Recipe, row: Row, experiment: Experiment, dataset: Texts, start: Start | None = None
) -> dict[str, Any]:
    """What config.json holds: equal configs give equal runs, so the text is part of it, and what it begins with."""
    config = {
        "recipe": recipe.name,
        "row": row.name,
        "corpus": dataset.fingerprint,
        # How processes share a model out is not part of what a run is: others may go on with it.
        "settings": experiment.model_dump(mode="json", exclude={"training": {"shard"}}),
    }
    return config | ({"start": start.record} if start else {})


def is_done(out: Path, recipe: Recipe, row: Row, seed: int, dataset: Texts, start: Path | None = None) -> bool:
    """Whether `out` holds the result of this row and seed, with these very settings, on this very text, begun with the
    run that is at `start` now, if one is."""
    if not (out / "result.json").exists():
        return False
    experiment = recipe.experiments[row.name]
    seeded = experiment.model_copy(update={"training": experiment.training.model_copy(update={"seed": seed})})
    first = _begin(recipe, row, seed, start, out)
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
    source: Vocabulary | None = None
    """That of a translator's source, where it has one of its own."""

    @property
    def words(self) -> Sides:
        """The words that go in as a source, and those that are written."""
        return Sides(self.source or self.vocabulary, self.vocabulary)

    def dataset(self, data: Path | None) -> Dataset:
        """The texts a language model was trained on and scored with."""
        return open_texts(self.run, data)

    def pairs(self, data: Path | None) -> PairDataset:
        """The pairs a translator was trained on and scored with."""
        return open_run_pairs(self.run, data)

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
    """The texts a language model was trained on and scored with, or an error if they are others by now.

    Where the folder of a text has been moved, `data` is its new place.
    """
    experiment = _experiment(run)
    if run.imported and run.config.get("corpus") is None:
        raise DataError(f"{run.path} was imported without a text; import it again with --corpus NAME to score one")
    if experiment.corpus.pairs is not None:
        raise DataError(f"{run.path} is a translator, which has pairs of texts; use reefknot evaluate or translate")
    words = Vocabulary.load(run.vocabulary_path) if run.imported else None
    return _unchanged(run, open_dataset(_moved(run, experiment, data), experiment.vocabulary, data=data, words=words))


def open_run_pairs(run: RunFolder, data: Path | None) -> PairDataset:
    """The pairs a translator was trained on and scored with, likewise."""
    experiment = _experiment(run)
    if experiment.corpus.pairs is None:
        raise DataError(f"{run.path} is a language model, which has no pairs of texts; name the run of a translator")
    return _unchanged(run, open_pairs(_moved(run, experiment, data), experiment.vocabulary, data=data))


def _moved(run: RunFolder, experiment: Experiment, data: Path | None) -> CorpusSettings:
    """The corpus of a run; `data` in place of a folder that is not there."""
    corpus = experiment.corpus
    if corpus.name in (BUILT_IN, *KNOWN, *PREPARED, *PAIRED) or Path(corpus.name).expanduser().is_dir():
        return corpus
    if data is None:
        raise DataError(
            f"{run.path}: its text was in {corpus.name}, and there is no such folder here; "
            "say with --data which folder holds train, valid and test text now"
        )
    return corpus.model_copy(update={"name": str(data)})


def _unchanged(run: RunFolder, dataset: Opened) -> Opened:
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
    source = None
    if experiment.corpus.pairs is not None and experiment.vocabulary.sides != "joint":
        source = Vocabulary.load(run.source_vocabulary_path)
    model = build_model(experiment, Sides(source or vocabulary, vocabulary))
    load_weights(model, best_weights(run))
    return TrainedRun(run, experiment, vocabulary, model.to(choose_device(device)).eval(), source)
