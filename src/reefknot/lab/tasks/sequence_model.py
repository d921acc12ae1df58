"""The common base of the tasks language modelling and translation: settings, building the model, and training.

`SequenceExperiment` holds the settings and checks that they are consistent before anything is read or built. They come
from a recipe (see `lab/recipes/recipe.py`) or from the config.json of a run. `SequenceTask` builds the model from its
parts, trains it with `Trainer`, and scores the best checkpoint. `language_model.py` and `translation.py` have the
subclasses.

A model has an input end (turns ids into vectors), an encoder (turns vectors into hidden states) and an output end
(classifier and loss). The ends refer by name to tables (the parameters of every word) and to projections (matrices
between the bands of a table and the model, where a band is a group of words of similar frequency).
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
from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.runs.result import Best, ProtocolName, Start
from reefknot.lab.tasks.contract import D, Experiment, FittedModel, Session, Task
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
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.regularisation import RegularisationSettings
from reefknot.storage.progress import Notify, silent
from reefknot.vectors.word_vectors import WordVectors

if TYPE_CHECKING:
    from reefknot.lab.evaluation.similarity import Benchmark

    TableSettings = Settings
    ProjectionSettings = Settings
    InputSettings = Settings
    EncoderSettings = Settings
    OutputSettings = Settings
    WindowsSettings = Settings
    ActivationSettings = Settings
else:
    TableSettings, ProjectionSettings, InputSettings = (
        TABLES.entry_type(),
        PROJECTIONS.entry_type(),
        INPUTS.entry_type(),
    )
    EncoderSettings, OutputSettings = ENCODERS.entry_type(), OUTPUTS.entry_type()
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
        for section, entries in (("tables", self.tables), ("projections", self.projections)):
            used = {*INPUTS.references(self.input, section), *OUTPUTS.references(self.output, section)}
            used |= set(self.source_references(section))
            # A table that only projections refer to is not used by any end.
            referenced = used.union(*(PROJECTIONS.references(entry, section) for entry in self.projections.values()))
            missing, unused = sorted(referenced - set(entries)), sorted(set(entries) - used)
            if missing:
                singular = section.removesuffix("s")
                entry_names = ", ".join(entries) or "none"
                raise ValueError(f"no {singular} '{shorten(missing[0], 60)}' in [{section}]; there are: {entry_names}")
            if unused:
                raise ValueError(f"no end uses {section}.{shorten(unused[0], 60)}; remove it, or use it in an end")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        is_present = {
            "corpus.pairs": self.corpus.pairs is not None,
            "[source]": self.source is not None,
            "an encoder such as encoder_decoder": self._reads_source,
            'training.batching = "pairs"': self.training.batching == "pairs",
        }
        present = [name for name, is_set in is_present.items() if is_set]
        missing = [name for name, is_set in is_present.items() if not is_set]
        if present and missing:
            raise ValueError(f"{present[0]} is for translation, which also needs {', '.join(missing)}")
        self._check_task()
        return self

    def _check_task(self) -> None:
        """Raise an error for settings that have no meaning in the task."""

    def source_references(self, section: str) -> list[str]:
        """Return the names of the tables or projections that the input end of the source uses."""
        return list(INPUTS.references(self.source, section)) if self.source is not None else []

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
        kind = self.input.kind  # type: ignore[attr-defined]
        if self.vocabulary.keep_spellings and not reads_spellings:
            raise ValueError(f"vocabulary.keep_spellings: an input of kind {kind} cannot read spellings; use char_cnn")
        if self.vocabulary.bpe and reads_spellings:
            raise ValueError(f"vocabulary.bpe: an input of kind {kind} reads the spelling of whole words; leave it out")
        return self

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        evaluation, windows = self.evaluation, self.evaluation.windows
        if windows is not None and not self.vocabulary.end_of_line and WINDOWS.build(windows, {}).by_lines:
            from reefknot.lab.evaluation.windows import NO_LINES

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

    def hash_files(self, recorded: Mapping[str, str] | None = None) -> dict[str, str]:
        return hash_table_files(self.tables, recorded)

    def without_files(self) -> Self:
        names = list_table_files(self.tables)
        if not names:
            return self
        tables_without_files = {name: self.tables[name].model_copy(update={"vectors": None}) for name in names}
        return self.model_copy(update={"tables": {**self.tables, **tables_without_files}})

    @property
    def carries_state(self) -> bool:
        """Whether the encoder carries its state from one window to the next."""
        carries_state: bool = ENCODERS.load(self.encoder.kind).carries_state  # type: ignore[attr-defined]
        return carries_state

    @property
    def _reads_source(self) -> bool:
        reads_source: bool = ENCODERS.load(self.encoder.kind).reads_source  # type: ignore[attr-defined]
        return reads_source


# The types of the settings and of the model. A translator is a `LanguageModel` too.
S = TypeVar("S", bound=SequenceExperiment)
L = TypeVar("L", bound=LanguageModel)


class SequenceTask(Task[S, D, L]):
    """Train a language model or a translator. The weights with the best validation loss are scored.

    A subclass joins the parts of its model in `_assemble`, cuts its text into batches in `batches`, and computes the
    losses of a text in `score_split`.
    """

    Settings: ClassVar[type[SequenceExperiment]]
    tables: Mapping[str, nn.Module]
    """Tables of the model that was built last, by name."""

    # -- language models and translators define these methods ----------------------------------------------------------

    @abstractmethod
    def _assemble(self, shared: dict[str, Any], sides: VocabularyPair) -> L:
        """Build the ends and the encoder, and join them into a model.

        Args:
            shared: The shared objects, by section (`tables`, `projections`) and name.
            sides: The vocabularies of both sides, or their sizes.
        """

    @abstractmethod
    def score_split(self, model: L, data: D, split: str) -> Score:
        """Return the losses of one split, computed in the precision of training."""

    @abstractmethod
    def batches(self, data: D) -> Batches:
        """Return the training text as batches of windows."""

    @abstractmethod
    def _task_fields(self, model: L, data: D, run: Any, scores: Mapping[str, Score]) -> dict[str, Any]:
        """Return the fields of result.json that are specific to the task."""

    # -- the model -----------------------------------------------------------------------------------------------------

    def build_model(self, vocabulary: Vocabulary | VocabularyPair | int) -> L:
        """Build the model from its parts, and draw its parameters.

        The vocabulary may also be just a number of words, which is enough to count parameters; an input end that reads
        spellings then gets empty spellings. If a translator gets a single vocabulary, it uses it for both sides.
        """
        experiment = self.experiment
        sides = vocabulary if isinstance(vocabulary, VocabularyPair) else VocabularyPair(vocabulary, vocabulary)
        shared: dict[str, Any] = {"tables": {}, "projections": {}}
        for registry, entries in ((TABLES, experiment.tables), (PROJECTIONS, experiment.projections)):
            source_names = experiment.source_references(registry.family)
            for name, settings in entries.items():
                vocab_size = _vocab_size(sides.source if name in source_names else sides.target)
                with add_section_to_errors(f"{registry.family}.{name}"):
                    shared[registry.family][name] = registry.build(settings, shared | {"vocab_size": vocab_size})
        model = self._assemble(shared, sides)
        initialise(model, experiment.init)
        self.tables = shared["tables"]
        return model

    def _build_input_end(self, shared: dict[str, Any], vocabulary: Vocabulary | int) -> Any:
        with add_section_to_errors("input"):
            return INPUTS.build(self.experiment.input, shared | spelling_arguments(self.experiment.input, vocabulary))

    def _build_encoder(self, shared: dict[str, Any], dimensions: dict[str, int]) -> Any:
        with add_section_to_errors("encoder"):
            return ENCODERS.build(self.experiment.encoder, shared | dimensions)

    def _build_output_end(self, shared: dict[str, Any], context_dim: int) -> Any:
        with add_section_to_errors("output"):
            return OUTPUTS.build(self.experiment.output, shared | {"context_dim": context_dim})

    # -- training and scores -------------------------------------------------------------------------------------------

    def check_data(self, data: D, world: World) -> None:
        self.batches(data).shard(world.rank, world.size)

    def prepare(self, model: L, data: D, *, from_files: bool = True, notify: Notify = silent) -> list[str]:
        set_determinism(self.experiment.training.determinism)
        if self.experiment.evaluation.subspace:
            measure_subspace(model, data.vocabulary)  # so that an error is raised now, not after training
        if not from_files:
            return []
        return fill_tables(
            self.tables,
            self.experiment.tables,
            self.experiment.source_references("tables"),
            data.vocabulary_pair,
            notify,
        )

    def fit(self, model: L, data: D, session: Session) -> FittedModel[L] | None:
        settings, run, world = self.experiment.training, session.run, session.world
        if settings.shard and world.size == 1:
            session.display.print(
                "training.shard has no effect with one process; use torchrun to start several processes"
            )
        trainer = Trainer(
            model,
            self.batches(data).shard(world.rank, world.size),
            lambda: self.score_split(model, data, "valid").mean,
            settings,
            run,
            world=world,
            display=session.display,
            name=session.name,
            subwords=data.vocabulary.bpe is not None,
            trackers=session.trackers,
        )
        progress = trainer.train()
        if not world.is_first:
            return None
        self._average_checkpoints(session)
        # With sharding, every process has a part of the model. So the first process builds a whole model to score.
        is_sharded = settings.shard and world.size > 1
        whole_model = self.build_model(data.vocabulary_pair).to(world.device) if is_sharded else model
        load_weights(whole_model, run.best_weights())
        return FittedModel(whole_model, progress)

    def _average_checkpoints(self, session: Session) -> None:
        requested_count = self.experiment.evaluation.average
        if requested_count is None:
            return
        checkpoints = session.run.checkpoints
        checkpoints.save_average(requested_count)
        count = len(checkpoints.averaged_steps())
        if count < requested_count:
            available = "1 checkpoint" if count == 1 else f"{count} checkpoints"
            session.display.print(
                f"{session.name}  evaluation.average = {requested_count}, but the run has only {available} to average; "
                "a smaller training.save_every or training.validate_every saves more checkpoints"
            )

    def score(
        self, model: L, data: D, session: Session, progress: Progress, benchmarks: Mapping[str, Benchmark]
    ) -> dict[str, Any]:
        import torch

        run, experiment = session.run, self.experiment
        scores = {split: self.score_split(model, data, split) for split in SCORED_SPLITS}
        run.write_scores({split: torch.from_numpy(score.nll) for split, score in scores.items()})
        averaged, start = run.checkpoints.averaged_steps(), run.config.get("start")
        return {
            **{split: score.summary() for split, score in scores.items()},
            "best": Best(step=progress.best_step, epoch=progress.best_epoch),
            **({"averaged": tuple(averaged)} if averaged else {}),
            "start": Start(**start) if start else None,
            **self._task_fields(model, data, run, scores),
            **evaluate_vectors(self.vectors(model, data.vocabulary), data.vocabulary, benchmarks, tied=model.tied),
            "subspace": measure_subspace(model, data.vocabulary) if experiment.evaluation.subspace else None,
        }

    def vectors(self, model: L, vocabulary: Vocabulary) -> dict[str, WordVectors]:
        return build_word_vectors(compute_end_vectors(model), vocabulary, tied=model.tied)

    @property
    def regularisation(self) -> RegularisationSettings:
        """The penalties on activations."""
        return RegularisationSettings(**self.experiment.regularisation.model_dump())


def _vocab_size(vocabulary: Vocabulary | int) -> int:
    return vocabulary if isinstance(vocabulary, int) else len(vocabulary)


def spelling_arguments(settings: Settings, vocabulary: Vocabulary | int) -> dict[str, Any]:
    """Return {"spellings": ...}, the argument of an input end that reads spellings; nothing for other input ends."""
    if not INPUTS.has_argument(settings, "spellings"):
        return {}
    from reefknot.nn.inputs.spelling import spell

    if isinstance(vocabulary, int):
        return {"spellings": spell([""]).expand(vocabulary, -1)}
    return {"spellings": spell([*vocabulary.words, *vocabulary.spelled])}


@contextmanager
def add_section_to_errors(section: str) -> Iterator[None]:
    """Put the name of a recipe's section before the message of a `SettingsError`. A part does not know its section."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"{section}: {error}") from error
