"""The interface of a task: one kind of experiment, such as language modelling, from its settings to its scores.

`Task` is the base class. `lab/experiment.py` calls its methods in this order, in a run folder, for every task:

    Settings -> open_data -> build_model -> prepare -> fit -> score

A task gets its settings, a seed and possibly weights to start from. It knows nothing about recipes and rows. The other
classes here are what a task reads and returns: `Experiment` (settings), `Data` (texts), `Session` (one training
process), `FittedModel` and `TrainedRun` (trained models).

The ends of a model are the input end (turns ids into vectors) and the output end (classifier and loss).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

import torch

from reefknot.errors import DataError
from reefknot.lab.config.settings import Settings
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.text.corpora import CORPORA, known_corpus
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair, VocabularySettings
from reefknot.lab.training.display import Display
from reefknot.lab.training.distributed import World, choose_device
from reefknot.lab.training.state import Progress, load_weights
from reefknot.storage.progress import Notify, silent
from reefknot.vectors.word_vectors import WordVectors

if TYPE_CHECKING:
    from reefknot.lab.evaluation.grid import Progress as ProgressCallback
    from reefknot.lab.evaluation.similarity import Benchmark
    from reefknot.lab.tasks.requests import Answer, ComparisonRequest, EvaluationRequest, System


class TrainingSection(Protocol):
    """Settings that the section `training` has in every task."""

    @property
    def seed(self) -> int: ...
    @property
    def epochs(self) -> int | None: ...
    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


class EvaluationSection(Protocol):
    """Settings that the section `evaluation` has in every task."""

    @property
    def similarity(self) -> bool: ...


class Experiment(Settings):
    """Everything a run depends on. Each task has a subclass with the sections of its recipes."""

    task: ClassVar[str]
    """The task's name in `tasks.TASKS`."""

    corpus: CorpusSettings
    vocabulary: VocabularySettings = VocabularySettings()

    if TYPE_CHECKING:
        # Every subclass declares these two sections as its last fields. They are not fields of this class, because
        # pydantic would then put them before the sections of the model, even in config.json.
        @property
        def training(self) -> TrainingSection: ...
        @property
        def evaluation(self) -> EvaluationSection: ...

    @property
    def seed(self) -> int:
        """The seed of all random numbers."""
        return self.training.seed

    def with_seed(self, seed: int) -> Self:
        """Return the same experiment with another seed."""
        return self.model_copy(update={"training": self.training.model_copy(update={"seed": seed})})

    @property
    def epochs(self) -> int | None:
        """Number of passes over the training text; None if training ends after a number of updates."""
        return self.training.epochs

    @property
    def start(self) -> str | None:
        """The row to start from: training starts with its best weights. None if training starts from random weights."""
        return None

    @property
    def workers(self) -> int | None:
        """The number of threads that training uses; None if the task has no such setting."""
        return None

    @property
    def evaluates_similarity(self) -> bool:
        """Whether the word vectors are compared with human judgements after training."""
        return self.evaluation.similarity

    def hash_files(self, recorded: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the SHA-256 of every file that a table starts from, by table name.

        If a file is gone, the recorded hash is returned.
        """
        return {}

    def without_files(self) -> Self:
        """Return the same experiment without vector files. A run that already has weights does not need the files."""
        return self


class Data(Protocol):
    """The data of an experiment: texts, or pairs of texts."""

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str:
        """SHA-256 over the texts, the vocabulary and their settings."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that are predicted."""

    @property
    def vocabulary_pair(self) -> VocabularyPair:
        """The vocabularies of the source and of the target. Both are the same if there is only one vocabulary."""

    @property
    def summary(self) -> str:
        """One line with the name and the size of the text."""

    def describe(self) -> str:
        """Return a description of the texts and of how they are read, in a few lines."""


# The types of a task: its settings, its data and its model.
E = TypeVar("E", bound=Experiment)
D = TypeVar("D", bound=Data)
M = TypeVar("M", bound=torch.nn.Module)


@dataclass(frozen=True)
class Session:
    """What one training process (or group of processes) works with: the run folder, the processes, the display."""

    run: RunFolder
    world: World
    display: Display
    name: str
    """Prefix of the lines on the display."""
    trackers: Sequence[Callable[[dict[str, Any]], None]] = ()
    """Functions that are called with every line of metrics."""


@dataclass(frozen=True)
class FittedModel(Generic[M]):
    """A trained model with the weights that are scored, and the progress of its training."""

    model: M
    progress: Progress


@dataclass(frozen=True)
class TrainedRun(Generic[E, D, M]):
    """A run folder, opened for use."""

    run: RunFolder
    experiment: E
    words: VocabularyPair
    model: M

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that are predicted."""
        return self.words.vocabularies[1]

    def dataset(self, data: Path | None) -> D:
        """Open the text that the run was trained on and scored with."""
        from reefknot.lab.tasks import create_task

        dataset: D = create_task(self.experiment).open_run_data(self.run, data)
        return dataset

    def vectors(self) -> dict[str, WordVectors]:
        """Return the word vectors of `input` and `output`, or of `tied` if both ends have the same table."""
        from reefknot.lab.tasks import create_task

        return create_task(self.experiment).vectors(self.model, self.vocabulary)

    def with_spellings(self, words: Iterable[str]) -> Self:
        """Return this run with an input end that also reads the spellings of these words.

        A run that was not trained to read spellings is returned unchanged.
        """
        return self


class Task(ABC, Generic[E, D, M]):
    """One kind of experiment. A task object holds the settings of one experiment.

    A subclass defines `Settings`, `noun` and `verbs`, and the methods `build_model`, `fit`, `score` and `vectors`. If
    its models score texts, it also defines `evaluate` and `compare`. Everything else has a default.
    """

    Settings: ClassVar[type[Experiment]]
    """The class of this task's settings."""
    noun: ClassVar[str]
    """What a trained run of this task is called in messages, such as "a language model"."""
    verbs: ClassVar[str]
    """The subcommands of `reefknot` that read runs of this task, for messages."""

    scores_text: ClassVar[bool] = True
    """Whether the model assigns a probability to a text. If not, its runs cannot be evaluated or compared."""
    evaluation_options: ClassVar[frozenset[str]] = frozenset()
    """Fields of `EvaluationRequest` that `evaluate` uses, in addition to the fields that every task uses."""
    comparison_options: ClassVar[frozenset[str]] = frozenset()
    """Fields of `ComparisonRequest` that `compare` uses, in addition to the fields that every task uses."""

    def __init__(self, experiment: E) -> None:
        self.experiment = experiment

    # -- every task defines these methods ------------------------------------------------------------------------------

    @abstractmethod
    def build_model(self, vocabulary: Vocabulary | VocabularyPair | int) -> M:
        """Build the model, with weights drawn from torch's current generator state.

        The vocabulary may also be just a number of words, which is enough to count parameters.
        """

    @abstractmethod
    def fit(self, model: M, data: D, session: Session) -> FittedModel[M] | None:
        """Train to the end, starting from the newest checkpoint of the run if there is one.

        Returns None in all processes but the first.
        """

    @abstractmethod
    def score(
        self, model: M, data: D, session: Session, progress: Progress, benchmarks: Mapping[str, Benchmark]
    ) -> dict[str, Any]:
        """Score a trained model. Returns the part of result.json that depends on the task."""

    @abstractmethod
    def vectors(self, model: M, vocabulary: Vocabulary) -> dict[str, WordVectors]:
        """Return the word vectors of `input` and `output`, or of `tied` if both ends have the same table."""

    # -- a task overrides these methods if it needs more than the default ----------------------------------------------

    def open_data(
        self,
        data: Path | None = None,
        *,
        corpus: CorpusSettings | None = None,
        words: Vocabulary | None = None,
        notify: Notify = silent,
    ) -> D:
        """Open the texts to train on and score with.

        The default is to open a `Dataset`. A task with another type of data overrides this method.

        Args:
            data: Folder of the corpora.
            corpus: Settings of the corpus, if it has moved. By default, the settings of the experiment are used.
            words: Vocabulary of an imported model. By default, the vocabulary is made from the training text.
            notify: Called with messages about progress.
        """
        experiment = self.experiment
        corpus = corpus or experiment.corpus
        dataset = open_dataset(corpus, experiment.vocabulary, data=data, words=words, notify=notify)
        return cast(D, dataset)

    def check_data(self, data: D, world: World) -> None:
        """Raise an error if a model cannot be trained on the data, or cannot score them. Called before training."""

    def prepare(self, model: M, data: D, *, from_files: bool = True, notify: Notify = silent) -> list[str]:
        """Prepare a new model for training. Returns messages for the display.

        Args:
            model: The model, with random weights.
            data: The data to train on.
            from_files: Fill tables from the vector files that the settings name. A model that starts from the weights
                of another run does not need them.
            notify: Called with messages about progress.
        """
        return []

    # -- finished runs of tasks that score texts -----------------------------------------------------------------------
    # Subclasses import the code of evaluation and comparison inside these methods, so that training does not load it.

    def evaluate(
        self, run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: ProgressCallback
    ) -> Answer:
        """Score texts with the best weights of a run. `tasks.evaluate_run` has checked the options."""
        raise NotImplementedError

    def compare(self, systems: Sequence[System], request: ComparisonRequest, *, notify: Notify) -> Answer:
        """Compare systems of this task with the first one. `tasks.compare_systems` has checked the options."""
        raise NotImplementedError

    # -- run folders ---------------------------------------------------------------------------------------------------

    def save_vocabularies(self, run: RunFolder, data: D) -> None:
        """Write the vocabulary, or the vocabularies of both languages, to the run folder."""
        data.vocabulary.save(run.vocabulary_path)

    def load_vocabularies(self, run: RunFolder) -> VocabularyPair:
        """Read the vocabularies of the source and of the target from the run folder."""
        vocabulary = Vocabulary.load(run.vocabulary_path)
        return VocabularyPair(vocabulary, vocabulary)

    def open_run(self, run: RunFolder, device: str = "cpu") -> TrainedRun[E, D, M]:
        """Open a run folder with its best weights."""
        # Look for the checkpoint first: it has the best error message for a record of a run, which has no weights.
        checkpoint = run.best_checkpoint()
        words = self.load_vocabularies(run)
        model = self.build_model(words)
        load_weights(model, run.checkpoints.load(checkpoint).weights)
        return self._wrap_trained(run, words, model.to(choose_device(device)).eval())

    def _wrap_trained(self, run: RunFolder, words: VocabularyPair, model: M) -> TrainedRun[E, D, M]:
        return TrainedRun(run, self.experiment, words, model)

    def open_run_data(self, run: RunFolder, data: Path | None) -> D:
        """Open the texts of a run; raise `DataError` if they have changed since it was trained.

        Args:
            run: The run folder.
            data: Folder of the corpora, or the new folder of the text if it has moved.
        """
        if run.imported and run.config.get("corpus") is None:
            raise DataError(f"{run.path} was imported without a text; import it again with --corpus NAME to score one")
        words = Vocabulary.load(run.vocabulary_path) if run.imported else None
        dataset = self.open_data(data, corpus=self._locate_corpus(run, data), words=words)
        if dataset.fingerprint != run.config.get("corpus"):
            raise DataError(f"the text that {run.path} was trained on has changed; restore it to score this run")
        return dataset

    @property
    def reads_data_folder(self) -> bool:
        """Whether the text of a run is read from the folder that `--data` names.

        This is false if the text is part of Python, or if it is a folder of text that still exists.
        """
        name = self.experiment.corpus.name
        corpus = known_corpus(name)
        if corpus is None:
            return not Path(name).expanduser().is_dir()
        return corpus.needs_data

    def _locate_corpus(self, run: RunFolder, data: Path | None) -> CorpusSettings:
        """Return the settings of the run's corpus, with `data` as its folder if it is no longer in its old folder."""
        corpus = self.experiment.corpus
        if corpus.name in CORPORA or Path(corpus.name).expanduser().is_dir():
            return corpus
        if data is None:
            raise DataError(
                f"{run.path}: its text was in {corpus.name}, which does not exist here; "
                "pass the folder with the train, valid and test text with --data"
            )
        return corpus.model_copy(update={"name": str(data)})
