"""The interface of a task: one kind of experiment, such as language modelling, from its settings to its scores.

Start with `Task`, the base class of all tasks. `lab/experiment.py` trains a model with these methods, in this order:

    open_data      open the texts                           -> Data
    build_model    build the model with random weights      -> torch.nn.Module
    prepare        fill tables from files of word vectors
    fit            train                                    -> FittedModel
    score          compute scores for result.json

The classes before `Task` are what its methods read and return. A `Session` is one process that trains a run, and a
`TrainedRun` is a finished run that is opened for use. The ends of a model are the input end (turns ids into vectors)
and the output end (classifier and loss).
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
from reefknot.lab.text.corpora import CORPORA
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.lab.training.display import Display
from reefknot.lab.training.distributed import World, choose_device
from reefknot.lab.training.state import Progress, load_weights
from reefknot.storage.progress import Notify, silent
from reefknot.vectors.word_vectors import WordVectors

if TYPE_CHECKING:
    import pandas as pd

    from reefknot.lab.evaluation.similarity import Benchmark
    from reefknot.lab.tasks.requests import Answer, ComparisonAnswer, ComparisonRequest, EvaluationRequest, System
    from reefknot.storage.progress import ProgressCallback


class TrainingSection(Protocol):
    """Settings that the section `training` of a recipe has in every task."""

    @property
    def seed(self) -> int: ...
    @property
    def epochs(self) -> int | None: ...
    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


class EvaluationSection(Protocol):
    """Settings that the section `evaluation` of a recipe has in every task."""

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
        training = self.training.model_copy(update={"seed": seed})
        return self.model_copy(update={"training": training})

    @property
    def epochs(self) -> int | None:
        """Number of passes over the training text; None if training ends after a number of updates."""
        return self.training.epochs

    @property
    def start(self) -> str | None:
        """Name of the recipe's row (experiment) whose best weights training starts from; None for random weights."""
        return None

    @property
    def workers(self) -> int | None:
        """The number of threads that training uses; None if the task has no such setting."""
        return None

    @property
    def evaluates_similarity(self) -> bool:
        """Whether the word vectors are compared with human judgements after training."""
        return self.evaluation.similarity

    def hash_files(self, recorded_hashes: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the SHA-256 of every file of word vectors that a table starts from, by table name.

        If a file is gone, its recorded hash is returned.
        """
        return {}

    def without_files(self) -> Self:
        """Return the same experiment without files of word vectors. A run with weights does not need the files."""
        return self


class Data(Protocol):
    """The data of an experiment: texts, or pairs of texts."""

    @property
    def name(self) -> str:
        """Name of the corpus."""

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
ExperimentT = TypeVar("ExperimentT", bound=Experiment)
DataT = TypeVar("DataT", bound=Data)
ModelT = TypeVar("ModelT", bound=torch.nn.Module)


@dataclass(frozen=True)
class Session:
    """What one process that trains a run works with: the run folder, the other processes, the display."""

    run: RunFolder
    world: World
    """The processes that train together."""
    display: Display
    """Where progress and results are printed."""
    name: str
    """Prefix of the lines on the display, such as "tied, seed 1"."""
    trackers: Sequence[Callable[[dict[str, Any]], None]] = ()
    """Functions that are called with every line of metrics."""


@dataclass(frozen=True)
class FittedModel(Generic[ModelT]):
    """A trained model with the weights that are scored, and the progress of its training."""

    model: ModelT
    progress: Progress


@dataclass(frozen=True, repr=False)
class TrainedRun(Generic[ExperimentT, DataT, ModelT]):
    """A run folder, opened for use."""

    run: RunFolder
    experiment: ExperimentT
    words: VocabularyPair
    """The vocabularies of the source and of the target. Both are the same, except in translation."""
    model: ModelT
    """The model with its best weights."""

    def __repr__(self) -> str:
        # The fields would print the whole vocabulary.
        return f"{type(self).__name__}({str(self.run.path)!r})"

    @property
    def vocabulary(self) -> Vocabulary:
        """The words that are predicted."""
        _, target_vocabulary = self.words.vocabularies
        return target_vocabulary

    def dataset(self, data_folder: Path | None) -> DataT:
        """Open the text that the run was trained on and scored with; see `Task.open_run_data`."""
        from reefknot.lab.tasks import create_task

        dataset: DataT = create_task(self.experiment).open_run_data(self.run, data_folder)
        return dataset

    def vectors(self) -> dict[str, WordVectors]:
        """Return the word vectors by end: of `input` and `output`, or of `tied` if both ends have the same table."""
        from reefknot.lab.tasks import create_task

        return create_task(self.experiment).vectors(self.model, self.vocabulary)

    def to_pandas(self, table: str = "results") -> pd.DataFrame:
        """Return the results or metrics of the run as a pandas DataFrame. It needs the extra `data`.

        The columns are documented in docs/results.md. This also works for a record of a run, which has no weights.

        Args:
            table: `results` has a row for the run and one for each saved evaluation, `metrics` has a row for each
                line of metrics.jsonl, and `frequency` has a row for each frequency band of the test text.
        """
        from reefknot.lab.runs.tables import to_pandas

        return to_pandas(self.run, table)

    def with_spellings(self, words: Iterable[str]) -> Self:
        """Return this run with an input end that also reads the spellings of these words.

        A run that was not trained to read spellings is returned unchanged.
        """
        return self


class RecordedRun(TrainedRun[Any, Any, Any]):
    """A finished run without weights, such as a record in `results/`. Its results can be read, but not its model."""

    def __init__(self, run: RunFolder, experiment: Experiment) -> None:
        object.__setattr__(self, "run", run)
        object.__setattr__(self, "experiment", experiment)

    @property
    def words(self) -> VocabularyPair:
        """Raise an error that explains how to get the weights."""
        raise self._missing_weights()

    @property
    def model(self) -> Any:
        """Raise an error that explains how to get the weights."""
        raise self._missing_weights()

    def _missing_weights(self) -> DataError:
        try:
            self.run.best_checkpoint()
        except DataError as error:
            return error
        return DataError(f"{self.run.path} had no weights when it was opened; open it again")


class Task(ABC, Generic[ExperimentT, DataT, ModelT]):
    """One kind of experiment. A task object holds the settings of one experiment.

    A subclass defines `Settings`, `noun` and `verbs`, and the methods `build_model`, `fit`, `score` and `vectors`. If
    its models score texts, it also defines `evaluate` and `compare`. Everything else has a default. A task does not
    depend on recipes: it only gets the settings of one experiment.
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

    def __init__(self, experiment: ExperimentT) -> None:
        self.experiment = experiment

    # -- every task defines these methods ------------------------------------------------------------------------------

    @abstractmethod
    def build_model(self, vocabulary: Vocabulary | VocabularyPair | int) -> ModelT:
        """Build the model, with weights drawn from torch's current generator state.

        The vocabulary may also be just a number of words, which is enough to count parameters.
        """

    @abstractmethod
    def fit(self, model: ModelT, dataset: DataT, session: Session) -> FittedModel[ModelT] | None:
        """Train to the end, starting from the newest checkpoint of the run if there is one.

        Returns None in all processes but the first.
        """

    @abstractmethod
    def score(
        self,
        model: ModelT,
        dataset: DataT,
        session: Session,
        progress: Progress,
        benchmarks: Mapping[str, Benchmark],
    ) -> dict[str, Any]:
        """Score a trained model. Returns the fields of result.json that depend on the task.

        Args:
            model: The model with the weights to score.
            dataset: The texts to score.
            session: The run folder and the display.
            progress: The progress of training, such as its best step.
            benchmarks: Human judgements of word similarity, by name. The word vectors are compared with them.
        """

    @abstractmethod
    def vectors(self, model: ModelT, vocabulary: Vocabulary) -> dict[str, WordVectors]:
        """Return the word vectors by end: of `input` and `output`, or of `tied` if both ends have the same table."""

    # -- a task overrides these methods if it needs more than the default ----------------------------------------------

    def open_data(
        self,
        data_folder: Path | None = None,
        *,
        corpus: CorpusSettings | None = None,
        vocabulary: Vocabulary | None = None,
        notify: Notify = silent,
    ) -> DataT:
        """Open the texts to train on and score with.

        The default is to open a `Dataset`. A task with another type of data overrides this method.

        Args:
            data_folder: Folder of the corpora.
            corpus: Settings of the corpus, if it has moved. By default, the settings of the experiment are used.
            vocabulary: Vocabulary of an imported model. By default, the vocabulary is made from the training text.
            notify: Called with messages about progress.
        """
        corpus = corpus or self.experiment.corpus
        dataset = open_dataset(corpus, self.experiment.vocabulary, data=data_folder, words=vocabulary, notify=notify)
        return cast(DataT, dataset)

    def check_data(self, dataset: DataT, world: World) -> None:
        """Raise an error if a model cannot be trained on the data, or cannot score them. Called before training."""

    def check_model(self, model: ModelT, world: World) -> None:
        """Raise an error if this machine cannot train the model. Called before the run folder is created."""

    def prepare(self, model: ModelT, dataset: DataT, *, from_files: bool = True, notify: Notify = silent) -> list[str]:
        """Prepare a new model for training. Returns messages for the display.

        Args:
            model: The model, with random weights.
            dataset: The texts to train on.
            from_files: Fill tables from the files of word vectors that the settings name. A model that starts from the
                weights of another run does not need them.
            notify: Called with messages about progress.
        """
        return []

    # -- finished runs of tasks that score texts -----------------------------------------------------------------------
    # Subclasses import the code of evaluation and comparison inside these methods, so that training does not load it.

    def evaluate(
        self, run: RunFolder, request: EvaluationRequest, *, notify: Notify, progress: ProgressCallback
    ) -> Answer:
        """Score texts with the best weights of a run.

        `tasks.evaluate_run` calls this method after it has rejected options that have no effect.
        """
        raise NotImplementedError

    def compare(self, systems: Sequence[System], request: ComparisonRequest, *, notify: Notify) -> ComparisonAnswer:
        """Compare systems of this task with the first one.

        `tasks.compare_systems` calls this method after it has rejected options that have no effect.
        """
        raise NotImplementedError

    # -- run folders ---------------------------------------------------------------------------------------------------

    def save_vocabularies(self, run: RunFolder, dataset: DataT) -> None:
        """Write the vocabulary, or the vocabularies of both languages, to the run folder."""
        dataset.vocabulary.save(run.vocabulary_path)

    def load_vocabularies(self, run: RunFolder) -> VocabularyPair:
        """Read the vocabularies of the source and of the target from the run folder."""
        vocabulary = Vocabulary.load(run.vocabulary_path)
        return VocabularyPair(vocabulary, vocabulary)

    def open_run(self, run: RunFolder, device: str = "cpu") -> TrainedRun[ExperimentT, DataT, ModelT]:
        """Open a run folder with its best weights."""
        # Look for the checkpoint first: it has the best error message for a record of a run, which has no weights.
        run.best_checkpoint()
        vocabulary_pair = self.load_vocabularies(run)
        model = self.build_model(vocabulary_pair)
        load_weights(model, run.best_weights())
        model = model.to(choose_device(device)).eval()
        return self._wrap_trained(run, vocabulary_pair, model)

    def _wrap_trained(
        self, run: RunFolder, vocabulary_pair: VocabularyPair, model: ModelT
    ) -> TrainedRun[ExperimentT, DataT, ModelT]:
        """Return an opened run. A task with its own subclass of `TrainedRun` overrides this method."""
        return TrainedRun(run, self.experiment, vocabulary_pair, model)

    def open_run_data(self, run: RunFolder, data_folder: Path | None) -> DataT:
        """Open the texts of a run; raise `DataError` if they have changed since it was trained.

        Args:
            run: The run folder.
            data_folder: Folder of the corpora, or the new folder of the text if it has moved.
        """
        recorded_fingerprint = run.config.get("corpus")
        if run.imported and recorded_fingerprint is None:
            raise DataError(f"{run.path} was imported without a text; import it again with --corpus NAME to score one")

        vocabulary = Vocabulary.load(run.vocabulary_path) if run.imported else None
        corpus = self._locate_corpus(run, data_folder)
        dataset = self.open_data(data_folder, corpus=corpus, vocabulary=vocabulary)
        if dataset.fingerprint != recorded_fingerprint:
            raise DataError(f"the text that {run.path} was trained on has changed; restore it to score this run")
        return dataset

    def _locate_corpus(self, run: RunFolder, data_folder: Path | None) -> CorpusSettings:
        """Return the settings of the run's corpus, with the new folder of the text if its old folder is gone."""
        corpus = self.experiment.corpus
        if corpus.name in CORPORA or corpus.is_present:
            return corpus
        if data_folder is None:
            kind = "folder with the train, valid and test text" if corpus.text is None else "file or folder of the text"
            raise DataError(
                f"{run.path}: its text was in {corpus.name}, which does not exist here; pass the {kind} with --data"
            )
        return corpus.model_copy(update={"name": str(data_folder)})

    @property
    def reads_data_folder(self) -> bool:
        """Whether the text of a run is read from the folder that `--data` names."""
        return self.experiment.corpus.reads_data_folder
