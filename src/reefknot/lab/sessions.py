"""One sitting of training, of either kind of experiment: made ready, trained in its run folder, and written down.

Making ready refuses whatever can be refused, so that no folder is left behind by what could never be trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reefknot.errors import CorpusNotHere, SettingsError
from reefknot.lab.evaluation.similarity import Benchmark, find_benchmarks
from reefknot.lab.findings import (
    Course,
    check_scoring,
    headline,
    score_split,
    subspace,
    write_findings,
    write_vector_findings,
)
from reefknot.lab.recipes.recipe import Experiment, Recipe, Row, build_model
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.runs.result import RunResult
from reefknot.lab.starts import Start
from reefknot.lab.tasks.initialisation import start_tables
from reefknot.lab.tasks.skip_gram import SkipGramExperiment
from reefknot.lab.text.batches import Batches, batches_of
from reefknot.lab.text.dataset import Dataset
from reefknot.lab.text.pair_batches import PairBatches
from reefknot.lab.text.pair_dataset import PairDataset
from reefknot.lab.trained_run import best_weights
from reefknot.lab.training.display import Display
from reefknot.lab.training.distributed import World
from reefknot.lab.training.generators import seed_everything, set_determinism
from reefknot.lab.training.loop import Trainer
from reefknot.lab.training.skip_gram import SkipGramTrainer
from reefknot.lab.training.state import load_weights
from reefknot.lab.training.trackers import tensorboard
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.skip_gram import SkipGram
from reefknot.storage.progress import Say


@dataclass(frozen=True)
class Asked:
    """What is to be trained, and what the user wants beside it."""

    recipe: Recipe
    row: Row
    world: World
    data: Path | None = None
    track: bool = False
    tell_test: bool = True

    @property
    def seed(self) -> int:
        return self.recipe.experiments[self.row.name].training.seed

    @property
    def name(self) -> str:
        """What its lines begin with."""
        return f"{self.row.name}, seed {self.seed}" if self.seed else self.row.name

    @property
    def changed(self) -> list[Change]:
        """Settings that are not the recipe's."""
        return self.recipe.changed[self.row.name]


class Session(ABC):
    """A row made ready to be trained."""

    @abstractmethod
    def train(self, run: RunFolder, display: Display) -> RunResult | None:
        """Train to the end from where the folder stands; result.json (None but in the first process)."""


class LanguageModelSession(Session):
    """A language model or a translator: the best weights by the validation text are scored."""

    def __init__(
        self, asked: Asked, experiment: Experiment, dataset: Dataset | PairDataset, first: Start | None, say: Say
    ) -> None:
        self.asked, self.experiment, self.dataset = asked, experiment, dataset
        world, seed = asked.world, asked.seed
        self.batches = training_batches(experiment, dataset).slice(world.rank, world.size)
        check_scoring(experiment, dataset)
        set_determinism(experiment.training.determinism)
        seed_everything(seed)
        with asked.recipe.naming(asked.row):
            self.model = experiment.build(dataset.words)
        _check_size(asked, self.model)
        if experiment.evaluation.subspace:
            # Where tables span no space to speak of, that is said now and not when training has ended.
            subspace(self.model, dataset.vocabulary)
        self.starts: list[str] = []
        """What is to be told of files that tables start from; none is read where another run's weights are there."""
        if first:
            first.begin(self.model, dataset.words)
        else:
            self.starts = start_tables(self.model, dataset.words, say)
        # Ranks build the same weights and drop other units.
        seed_everything(seed, world.rank)

    def train(self, run: RunFolder, display: Display) -> RunResult | None:
        asked, experiment, world = self.asked, self.experiment, self.asked.world
        settings, name = experiment.training, asked.name
        benchmarks = found_benchmarks(experiment, asked.data, display)
        for text in self.starts:
            display.say(f"{name}  {text}")
        if settings.shard and world.size == 1:
            display.say("training.shard: a process alone holds the whole model; torchrun starts several")

        def validate() -> float:
            return score_split(self.model, self.dataset, experiment, "valid").mean

        trainer = Trainer(
            self.model,
            self.batches,
            validate,
            settings,
            run,
            world=world,
            display=display,
            name=name,
            pieces=self.dataset.vocabulary.bpe is not None,
            trackers=trackers(asked, run),
        )
        progress = trainer.train()
        if not world.first:
            return None
        if (number := experiment.evaluation.average) is not None:
            run.checkpoints.average(number)
            if (found := len(run.checkpoints.averaged())) < number:
                display.say(
                    f"{name}  evaluation.average = {number}, but training has left {found} "
                    f"checkpoint{'s' * (found > 1)}: the mean is of {found}; a smaller training.save_every or "
                    "training.validate_every leaves more"
                )
        display.update(f"{name}  scoring the best weights")
        # Processes that each hold a part of the model: what the first one scores alone is a whole one.
        sharded = settings.shard and world.size > 1
        scored = build_model(experiment, self.dataset.words).to(world.device) if sharded else self.model
        load_weights(scored, best_weights(run))
        course = Course(run, asked.row, asked.changed, progress, world)
        result = write_findings(scored, self.dataset, experiment, course, benchmarks)
        display.say(f"{name}  {headline(result) if asked.tell_test else 'finished'}")
        return result


class SkipGramSession(Session):
    """Skip-gram: there is no text to choose an epoch by, so that the last weights are judged."""

    def __init__(self, asked: Asked, experiment: SkipGramExperiment, dataset: Dataset) -> None:
        if asked.world.size > 1:
            raise SettingsError("skip-gram is trained by one process; leave torchrun out, and use training.workers")
        self.asked, self.experiment, self.dataset = asked, experiment, dataset
        seed_everything(asked.seed)
        with asked.recipe.naming(asked.row):
            self.model = experiment.build(dataset.vocabulary)
        _check_size(asked, self.model)
        words = dataset.vocabulary
        self.draws = experiment.skip_gram.draws(words.counts, eos=words.eos, unknown=words.unk, seed=asked.seed)

    def train(self, run: RunFolder, display: Display) -> RunResult:
        asked, experiment = self.asked, self.experiment
        benchmarks = found_benchmarks(experiment, asked.data, display)
        trainer = SkipGramTrainer(
            self.model,
            self.dataset.splits["train"].ids,
            self.draws,
            experiment.training,
            run,
            display=display,
            device=asked.world.device,
            name=asked.name,
            trackers=trackers(asked, run),
        )
        progress = trainer.train()
        display.update(f"{asked.name}  judging the vectors")
        course = Course(run, asked.row, asked.changed, progress, asked.world)
        result = write_vector_findings(self.model, self.dataset, experiment, course, benchmarks)
        display.say(f"{asked.name}  {headline(result)}")
        return result


def trackers(asked: Asked, run: RunFolder) -> list[Callable[[dict[str, Any]], None]]:
    """Who else hears of metrics."""
    return [tensorboard(run.path / "tensorboard")] if asked.track and asked.world.first else []


def training_batches(experiment: Experiment, dataset: Dataset | PairDataset) -> Batches:
    """The training text, or pairs, as the experiment says that they are read."""
    settings = experiment.training
    if isinstance(dataset, PairDataset):
        pairs, eos = dataset.splits["train"], dataset.vocabulary.eos
        assert eos is not None  # no line of pairs is without
        return PairBatches(pairs.source, pairs.target, settings.batch, settings.steps, eos=eos, seed=settings.seed)
    text = dataset.splits["train"]
    return batches_of(settings, text.ids, text.inputs, dataset.vocabulary.eos)


def found_benchmarks(
    experiment: Experiment | SkipGramExperiment, data: Path | None, display: Display
) -> dict[str, Benchmark]:
    """The judgements that the vectors will be held against; none where they are not asked for, or not here."""
    if not experiment.evaluation.similarity:
        return {}
    try:
        return find_benchmarks(data)
    except CorpusNotHere as error:
        display.say(f"evaluation.similarity is left out: {error}")
        return {}


def _check_size(asked: Asked, model: LanguageModel | SkipGram) -> None:
    total = sum(model.parameter_counts().values())
    if asked.row.parameters not in (None, total):
        raise SettingsError(
            f'{asked.recipe.name}, row "{asked.row.name}": {total:,} parameters, not {asked.row.parameters:,}'
        )
