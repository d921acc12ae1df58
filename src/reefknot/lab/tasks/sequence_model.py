"""The common base of language modelling and translation: settings, building the model, and training.

`SequenceTask` is the class to start from: it builds a model, trains it with `Trainer`, and scores its best checkpoint.
Its settings are a `SequenceExperiment`. The subclasses are in `language_model.py` and `translation.py`.

A model consists of these parts, each of which is a section of a recipe:

    input         the input end: turns ids into vectors
    encoder       turns vectors into hidden states
    output        the output end: classifier and loss
    tables        the parameters of every word; the ends refer to tables by name, and may share them
    projections   matrices between a band (words of similar frequency) of a table and the model; named like tables
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import Field, field_validator, model_validator
from torch import nn

from reefknot.errors import SettingsError, shorten
from reefknot.lab.config.parts import ENCODERS, INPUTS, OUTPUTS, PROJECTIONS, TABLES, WINDOWS, describe_choices
from reefknot.lab.config.registry import derive_settings
from reefknot.lab.config.settings import Count, OneLine, Settings
from reefknot.lab.evaluation.perplexity import Score, compute_unknown_share
from reefknot.lab.runs.result import Best, ProtocolName, Start
from reefknot.lab.tasks.contract import DataT, Experiment, FittedModel, Session, Task
from reefknot.lab.tasks.initialisation import (
    InitialisationSettings,
    fill_tables,
    hash_table_files,
    initialise,
    list_table_files,
)
from reefknot.lab.tasks.word_vectors import build_word_vectors, compute_end_vectors, evaluate_vectors, measure_subspace
from reefknot.lab.text.batches import Batches
from reefknot.lab.text.vocabulary import Vocabulary, VocabularyPair
from reefknot.lab.training.distributed import World
from reefknot.lab.training.generators import set_determinism
from reefknot.lab.training.loop import Trainer
from reefknot.lab.training.settings import TrainingSettings
from reefknot.lab.training.state import Progress, load_weights
from reefknot.lab.training.update import check_precision
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.regularisation import RegularisationSettings
from reefknot.storage.progress import Notify, silent
from reefknot.vectors.word_vectors import WordVectors

if TYPE_CHECKING:
    from reefknot.lab.evaluation.similarity import Benchmark

    # Type checkers cannot follow the types that the registries create below, so they see the base class.
    TableSettings = Settings
    ProjectionSettings = Settings
    InputSettings = Settings
    EncoderSettings = Settings
    OutputSettings = Settings
    WindowsSettings = Settings
    ActivationSettings = Settings
else:
    TableSettings = TABLES.entry_type()
    ProjectionSettings = PROJECTIONS.entry_type()
    InputSettings = INPUTS.entry_type()
    EncoderSettings = ENCODERS.entry_type()
    OutputSettings = OUTPUTS.entry_type()
    WindowsSettings = WINDOWS.entry_type()
    ActivationSettings = derive_settings(RegularisationSettings)

SCORED_SPLITS = ("valid", "test")
"""Splits that every finished model is scored on."""


class EvaluationSettings(Settings):
    """How a finished model is scored."""

    streams: Annotated[
        Count,
        Field(
            description="Number of parts of a text that are scored in parallel, each from an empty state. With 1, no "
            "context is lost."
        ),
    ] = 1
    windows: Annotated[
        WindowsSettings | None,
        Field(
            description="Windows of a text that are scored independently. By default, a text is scored as a whole, or "
            "in blocks of `steps` tokens if the encoder carries no state."
        ),
    ] = None
    train: Annotated[bool, Field(description="After training, score the training text too, without dropout.")] = False
    protocol: Annotated[ProtocolName, Field(description=describe_choices("evaluation.protocol"))] = "definition"
    search: Annotated[Any, Field(description="Not available for language models; see translation.")] = None
    bleu: Annotated[Any, Field(description="Not available for language models; see translation.")] = None
    average: Annotated[
        Count | None,
        Field(description="Number of last checkpoints whose mean is scored instead of the best checkpoint."),
    ] = None
    similarity: Annotated[
        bool,
        Field(
            description="Compare the vectors of both ends with human judgements of word pairs, if benchmarks are "
            "available."
        ),
    ] = False
    subspace: Annotated[
        bool,
        Field(description="Measure the distance between the subspaces of the output vectors and the input vectors."),
    ] = False

    @field_validator("search", "bleu", mode="before")
    @classmethod
    def _check_translation(cls, settings: Any) -> Any:
        if settings is not None:
            raise ValueError("is only for translation, and this is a language model; leave it out")
        return settings

    @model_validator(mode="after")
    def _check_streams(self) -> Self:
        if self.windows is not None and self.streams > 1:
            raise ValueError(
                f"streams = {self.streams} has no meaning with windows, which are independent; leave streams out"
            )
        return self


class SequenceExperiment(Experiment):
    """Everything a run of a language model or a translator depends on."""

    tables: Annotated[
        dict[OneLine, TableSettings],
        Field(description="Tables, which hold what is learned per word. Ends refer to them by name."),
    ]
    projections: Annotated[
        dict[OneLine, ProjectionSettings],
        Field(description="Matrices between the bands of a table and the model. Ends refer to them by name."),
    ] = Field(default={})
    input: InputSettings
    encoder: EncoderSettings
    output: OutputSettings
    source: Annotated[InputSettings | None, Field(description="Input end of the source text, for translation.")] = None
    init: InitialisationSettings = InitialisationSettings()
    regularisation: ActivationSettings = ActivationSettings()
    training: TrainingSettings
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        """Check that every table and projection that is referred to exists, and that each of them is used."""
        for section, entries in (("tables", self.tables), ("projections", self.projections)):
            names_in_ends = {
                *INPUTS.references(self.input, section),
                *OUTPUTS.references(self.output, section),
                *self.source_references(section),
            }
            # A table that only projections refer to is not used by any end.
            names_in_projections = {
                name
                for projection_settings in self.projections.values()
                for name in PROJECTIONS.references(projection_settings, section)
            }

            missing_names = sorted((names_in_ends | names_in_projections) - set(entries))
            if missing_names:
                missing_name = shorten(missing_names[0], 60)
                singular = section.removesuffix("s")
                defined_names = ", ".join(entries) or "none"
                raise ValueError(f"no {singular} '{missing_name}' in [{section}]; there are: {defined_names}")

            unused_names = sorted(set(entries) - names_in_ends)
            if unused_names:
                unused_name = shorten(unused_names[0], 60)
                raise ValueError(f"no end uses {section}.{unused_name}; remove it, or use it in an end")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        """Check that the settings of translation are all present or all absent."""
        is_present = {
            "corpus.pairs": self.corpus.pairs is not None,
            "[source]": self.source is not None,
            "an encoder such as encoder_decoder": self._reads_source,
            'training.batching = "pairs"': self.training.batching == "pairs",
        }
        present_names = [name for name, is_set in is_present.items() if is_set]
        missing_names = [name for name, is_set in is_present.items() if not is_set]
        if present_names and missing_names:
            raise ValueError(f"{present_names[0]} is for translation, which also needs {', '.join(missing_names)}")
        self._check_task()
        return self

    def _check_task(self) -> None:
        """Raise an error for settings that have no meaning in the task."""

    def source_references(self, section: str) -> list[str]:
        """Return the names of the tables or projections that the input end of the source text uses.

        Args:
            section: `tables` or `projections`.
        """
        if self.source is None:
            return []
        return list(INPUTS.references(self.source, section))

    @model_validator(mode="after")
    def _check_average(self) -> Self:
        average = self.evaluation.average
        if average is not None and average > self.training.keep:
            raise ValueError(
                f"evaluation.average = {average}, but training.keep = {self.training.keep}; keep at least {average}"
            )
        return self

    @model_validator(mode="after")
    def _check_spellings(self) -> Self:
        reads_spellings = INPUTS.has_argument(self.input, "spellings")
        input_kind = self.input.kind  # type: ignore[attr-defined]
        if self.vocabulary.keep_spellings and not reads_spellings:
            raise ValueError(
                f"vocabulary.keep_spellings: an input of kind {input_kind} cannot read spellings; use char_cnn"
            )
        if self.vocabulary.bpe and reads_spellings:
            raise ValueError(
                f"vocabulary.bpe: an input of kind {input_kind} reads the spelling of whole words; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        evaluation = self.evaluation
        if evaluation.windows is not None and not self.vocabulary.end_of_line:
            from reefknot.lab.evaluation.windows import NO_LINES

            windows = WINDOWS.build(evaluation.windows, {})
            if windows.by_lines:
                raise ValueError(f"evaluation.windows: {NO_LINES}")

        if not self.carries_state:
            reason = f"an encoder of kind {self.encoder.kind} carries no state"  # type: ignore[attr-defined]
            if evaluation.streams > 1:
                raise ValueError(f"evaluation.streams: {reason}, so streams have no meaning; leave it out")
            if evaluation.protocol != "definition":
                raise ValueError(f"evaluation.protocol: {reason}, which {evaluation.protocol} needs; leave it out")
        return self

    @property
    def start(self) -> str | None:
        return self.training.start.row if self.training.start else None

    def hash_files(self, recorded_hashes: Mapping[str, str] | None = None) -> dict[str, str]:
        return hash_table_files(self.tables, recorded_hashes)

    def without_files(self) -> Self:
        names_with_files = list_table_files(self.tables)
        if not names_with_files:
            return self
        tables = dict(self.tables)
        for name in names_with_files:
            tables[name] = tables[name].model_copy(update={"vectors": None})
        return self.model_copy(update={"tables": tables})

    @property
    def carries_state(self) -> bool:
        """Whether the encoder carries its state from one window to the next."""
        carries_state: bool = ENCODERS.load(self.encoder.kind).carries_state  # type: ignore[attr-defined]
        return carries_state

    @property
    def _reads_source(self) -> bool:
        """Whether the encoder reads a source text, as in translation."""
        reads_source: bool = ENCODERS.load(self.encoder.kind).reads_source  # type: ignore[attr-defined]
        return reads_source


# The types of the settings and of the model. A translator is a `LanguageModel` too.
SequenceExperimentT = TypeVar("SequenceExperimentT", bound=SequenceExperiment)
LanguageModelT = TypeVar("LanguageModelT", bound=LanguageModel)


class SequenceTask(Task[SequenceExperimentT, DataT, LanguageModelT]):
    """Train a language model or a translator. The weights with the best validation loss are scored.

    A subclass joins the parts of its model in `_assemble`, cuts its text into batches in `batches`, and computes the
    losses of a text in `score_split`.
    """

    Settings: ClassVar[type[SequenceExperiment]]
    tables: Mapping[str, nn.Module]
    """Tables of the model that was built last, by name."""

    # -- language models and translators define these methods ----------------------------------------------------------

    @abstractmethod
    def _assemble(self, shared: dict[str, Any], vocabulary_pair: VocabularyPair) -> LanguageModelT:
        """Build the ends and the encoder, and join them into a model.

        Args:
            shared: The objects that several parts can share, by section (`tables`, `projections`) and name.
            vocabulary_pair: The vocabularies of the source and of the target, or only their sizes.
        """

    @abstractmethod
    def batches(self, dataset: DataT) -> Batches:
        """Return the training text as batches of windows (the tokens that one update reads)."""

    @abstractmethod
    def score_split(self, model: LanguageModelT, dataset: DataT, split: str) -> Score:
        """Return the losses of one split, computed in the precision of training."""

    @abstractmethod
    def _task_fields(
        self, model: LanguageModelT, dataset: DataT, run: Any, scores: Mapping[str, Score]
    ) -> dict[str, Any]:
        """Return the fields of result.json that are specific to the task.

        Args:
            model: The model with its best weights.
            dataset: The texts.
            run: The run folder, for other files that the task writes.
            scores: The losses of the validation and test text, by split.
        """

    # -- the model -----------------------------------------------------------------------------------------------------

    def build_model(self, vocabulary: Vocabulary | VocabularyPair | int) -> LanguageModelT:
        """Build the model from its parts, and initialise its parameters.

        The vocabulary may also be just a number of words, which is enough to count parameters; an input end that reads
        spellings then gets empty spellings. If a translator gets a single vocabulary, it uses it for both sides.
        """
        if isinstance(vocabulary, VocabularyPair):
            vocabulary_pair = vocabulary
        else:
            vocabulary_pair = VocabularyPair(vocabulary, vocabulary)

        shared = self._build_shared(vocabulary_pair)
        model = self._assemble(shared, vocabulary_pair)
        initialise(model, self.experiment.init)
        self.tables = shared["tables"]
        return model

    def _build_shared(self, vocabulary_pair: VocabularyPair) -> dict[str, Any]:
        """Build the tables, and then the projections, which refer to tables. Returns them by section and name."""
        experiment = self.experiment
        shared: dict[str, Any] = {"tables": {}, "projections": {}}
        for registry, entries in ((TABLES, experiment.tables), (PROJECTIONS, experiment.projections)):
            section = registry.family
            source_names = experiment.source_references(section)
            for name, settings in entries.items():
                vocabulary = vocabulary_pair.source if name in source_names else vocabulary_pair.target
                available = shared | {"vocab_size": _vocab_size(vocabulary)}
                with add_section_to_errors(f"{section}.{name}"):
                    shared[section][name] = registry.build(settings, available)
        return shared

    def _build_input_end(self, shared: dict[str, Any], vocabulary: Vocabulary | int) -> Any:
        settings = self.experiment.input
        with add_section_to_errors("input"):
            return INPUTS.build(settings, shared | spelling_arguments(settings, vocabulary))

    def _build_encoder(self, shared: dict[str, Any], dimensions: dict[str, int]) -> Any:
        with add_section_to_errors("encoder"):
            return ENCODERS.build(self.experiment.encoder, shared | dimensions)

    def _build_output_end(self, shared: dict[str, Any], context_dim: int) -> Any:
        with add_section_to_errors("output"):
            return OUTPUTS.build(self.experiment.output, shared | {"context_dim": context_dim})

    # -- training and scores -------------------------------------------------------------------------------------------

    def check_data(self, dataset: DataT, world: World) -> None:
        self.batches(dataset).shard(world.rank, world.size)  # raises an error if batches cannot be made

    def check_model(self, model: LanguageModelT, world: World) -> None:
        settings = self.experiment.training
        if world.device.type == "cpu":
            check_precision(model, settings)
        if settings.shard == "vocabulary" and world.size > 1:
            from reefknot.lab.training.vocabulary import check_vocabulary_can_be_divided

            check_vocabulary_can_be_divided(model)

    def prepare(
        self, model: LanguageModelT, dataset: DataT, *, from_files: bool = True, notify: Notify = silent
    ) -> list[str]:
        set_determinism(self.experiment.training.determinism)
        if self.experiment.evaluation.subspace:
            measure_subspace(model, dataset.vocabulary)  # so that an error is raised now, not after training
        if not from_files:
            return []
        return fill_tables(
            self.tables,
            self.experiment.tables,
            self.experiment.source_references("tables"),
            dataset.vocabulary_pair,
            notify,
        )

    def fit(self, model: LanguageModelT, dataset: DataT, session: Session) -> FittedModel[LanguageModelT] | None:
        settings = self.experiment.training
        world = session.world
        if settings.shard and world.size == 1:
            session.display.print(
                "training.shard has no effect with one process; use torchrun to start several processes"
            )

        valid_split = dataset.splits["valid"]  # type: ignore[attr-defined]

        def validate() -> float:
            return self.score_split(model, dataset, "valid").mean

        trainer = Trainer(
            model,
            self.batches(dataset).shard(world.rank, world.size),
            validate,
            settings,
            session.run,
            world=world,
            display=session.display,
            name=session.name,
            subwords=dataset.vocabulary.bpe is not None,
            unknown_share=compute_unknown_share(valid_split, dataset.vocabulary),
            trackers=session.trackers,
        )
        progress = trainer.train()
        if not world.is_first:
            return None

        self._average_checkpoints(session)
        best_model = model
        if settings.shard and world.size > 1:
            # Every process has only its shard of the model. So the first process builds a whole model to score.
            best_model = self.build_model(dataset.vocabulary_pair).to(world.device)
        load_weights(best_model, session.run.best_weights())
        return FittedModel(best_model, progress)

    def _average_checkpoints(self, session: Session) -> None:
        """Save the mean of the last checkpoints, if the settings ask for it. It becomes the checkpoint to score."""
        requested_count = self.experiment.evaluation.average
        if requested_count is None:
            return
        checkpoints = session.run.checkpoints
        checkpoints.save_average(requested_count)
        averaged_count = len(checkpoints.averaged_steps())
        if averaged_count < requested_count:
            available = "1 checkpoint" if averaged_count == 1 else f"{averaged_count} checkpoints"
            session.display.print(
                f"{session.name}  evaluation.average = {requested_count}, but the run has only {available} to average; "
                "a smaller training.save_every or training.validate_every saves more checkpoints"
            )

    def score(
        self,
        model: LanguageModelT,
        dataset: DataT,
        session: Session,
        progress: Progress,
        benchmarks: Mapping[str, Benchmark],
    ) -> dict[str, Any]:
        import torch

        run = session.run
        vocabulary = dataset.vocabulary
        scores = {split: self.score_split(model, dataset, split) for split in SCORED_SPLITS}
        run.write_scores({split: torch.from_numpy(score.nll) for split, score in scores.items()})

        fields: dict[str, Any] = {split: score.summary() for split, score in scores.items()}
        fields["best"] = Best(step=progress.best_step, epoch=progress.best_epoch)
        averaged_steps = run.checkpoints.averaged_steps()
        if averaged_steps:
            fields["averaged"] = tuple(averaged_steps)
        start_record = run.config.get("start")
        fields["start"] = Start(**start_record) if start_record else None

        fields |= self._task_fields(model, dataset, run, scores)
        vectors_by_end = self.vectors(model, vocabulary)
        fields |= evaluate_vectors(vectors_by_end, vocabulary, benchmarks, tied=model.tied)
        fields["subspace"] = measure_subspace(model, vocabulary) if self.experiment.evaluation.subspace else None
        return fields

    def vectors(self, model: LanguageModelT, vocabulary: Vocabulary) -> dict[str, WordVectors]:
        return build_word_vectors(compute_end_vectors(model), vocabulary, tied=model.tied)

    @property
    def regularisation(self) -> RegularisationSettings:
        """The penalties on activations."""
        return RegularisationSettings(**self.experiment.regularisation.model_dump())


def _vocab_size(vocabulary: Vocabulary | int) -> int:
    return vocabulary if isinstance(vocabulary, int) else len(vocabulary)


def spelling_arguments(input_settings: Settings, vocabulary: Vocabulary | int) -> dict[str, Any]:
    """Return {"spellings": ...}, the argument of an input end that reads spellings; {} for other input ends."""
    if not INPUTS.has_argument(input_settings, "spellings"):
        return {}
    from reefknot.nn.inputs.spelling import spell

    if isinstance(vocabulary, int):
        return {"spellings": spell([""]).expand(vocabulary, -1)}
    return {"spellings": spell([*vocabulary.words, *vocabulary.spelled_words])}


@contextmanager
def add_section_to_errors(section: str) -> Iterator[None]:
    """Add the section of the recipe to every `SettingsError` in the block, because a part does not know its section."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"{section}: {error}") from error
