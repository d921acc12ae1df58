"""The common base of language models and translators: their settings, the model, and its training.

Settings come from a recipe (see `lab/recipes/recipe.py`) or from the config.json of a run. This module checks that they
are consistent before anything is read or built.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar

from pydantic import Field, field_validator, model_validator
from torch import nn

from reefknot.errors import SettingsError, shortened
from reefknot.lab.config.parts import ENCODERS, INPUTS, OUTPUTS, PROJECTIONS, TABLES, WINDOWS, describe_values
from reefknot.lab.config.registry import derive_settings
from reefknot.lab.config.settings import Count, OneLine, Settings
from reefknot.lab.evaluation.perplexity import Score
from reefknot.lab.runs.result import Best, ProtocolName, Start
from reefknot.lab.tasks.contract import D, Experiment, Fitted, Session, Task
from reefknot.lab.tasks.initialisation import (
    InitialisationSettings,
    file_hashes,
    initialise,
    start_tables,
    table_files,
)
from reefknot.lab.tasks.word_vectors import end_vectors, evaluate_vectors, named_vectors, subspace
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
    TableSettings, ProjectionSettings, InputSettings = TABLES.settings(), PROJECTIONS.settings(), INPUTS.settings()
    EncoderSettings, OutputSettings = ENCODERS.settings(), OUTPUTS.settings()
    WindowsSettings = WINDOWS.settings()
    ActivationSettings = derive_settings(RegularisationSettings)

SCORED = ("valid", "test")
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
    protocol: Annotated[ProtocolName, Field(description=describe_values("evaluation.protocol"))] = "definition"
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
                f"streams = {self.streams} has no meaning with windows, which are independent; leave it out"
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
        for group, entries in (("tables", self.tables), ("projections", self.projections)):
            used = {*INPUTS.references(self.input, group), *OUTPUTS.references(self.output, group)}
            used |= set(self.source_references(group))
            # A table that only projections refer to is not used by any end.
            named = used.union(*(PROJECTIONS.references(entry, group) for entry in self.projections.values()))
            missing, unused = sorted(named - set(entries)), sorted(set(entries) - used)
            if missing:
                singular = group.removesuffix("s")
                known = ", ".join(entries) or "none"
                raise ValueError(f"no {singular} '{shortened(missing[0], 60)}' in [{group}]; there are: {known}")
            if unused:
                raise ValueError(f"no end uses {group}.{shortened(unused[0], 60)}; remove it or name it in an end")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        needed = {
            "corpus.pairs": self.corpus.pairs is not None,
            "[source]": self.source is not None,
            "an encoder such as encoder_decoder": self._reads_source,
            'training.batching = "pairs"': self.training.batching == "pairs",
        }
        present = [name for name, is_set in needed.items() if is_set]
        missing = [name for name, is_set in needed.items() if not is_set]
        if present and missing:
            raise ValueError(f"{present[0]} is for translation, which also needs {', '.join(missing)}")
        self._check_task()
        return self

    def _check_task(self) -> None:
        """Raise an error for settings that have no meaning in the task."""

    def source_references(self, group: str) -> list[str]:
        """Return the names of the tables or projections that the input end of the source uses."""
        return list(INPUTS.references(self.source, group)) if self.source is not None else []

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
        spelled = INPUTS.takes(self.input, "spellings")
        kind = self.input.kind  # type: ignore[attr-defined]
        if self.vocabulary.keep_spellings and not spelled:
            raise ValueError(f"vocabulary.keep_spellings: an input of kind {kind} cannot read spellings; use char_cnn")
        if self.vocabulary.bpe and spelled:
            raise ValueError(f"vocabulary.bpe: an input of kind {kind} reads the spelling of whole words; leave it out")
        return self

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        windows, evaluation = self.evaluation.windows, self.evaluation
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

    def file_hashes(self, recorded: Mapping[str, str] | None = None) -> dict[str, str]:
        return file_hashes(self.tables, recorded)

    def without_files(self) -> Self:
        bare = {name: self.tables[name].model_copy(update={"vectors": None}) for name in table_files(self.tables)}
        return self.model_copy(update={"tables": {**self.tables, **bare}}) if bare else self

    @property
    def carries_state(self) -> bool:
        """Whether the encoder carries its state from one window to the next."""
        carries_state: bool = ENCODERS.load(self.encoder.kind).carries_state  # type: ignore[attr-defined]
        return carries_state

    @property
    def _reads_source(self) -> bool:
        reads: bool = ENCODERS.load(self.encoder.kind).reads_source  # type: ignore[attr-defined]
        return reads


S = TypeVar("S", bound=SequenceExperiment)
L = TypeVar("L", bound=LanguageModel)


class SequenceTask(Task[S, D, L]):
    """Train a language model or a translator. The weights with the best validation loss are scored."""

    Settings: ClassVar[type[SequenceExperiment]]
    tables: Mapping[str, nn.Module]
    """Tables of the model that was built last, by name."""

    def build_model(self, words: Vocabulary | VocabularyPair | int) -> L:
        """Build the model from its parts, and draw its parameters.

        A number of words is enough to count parameters; an input end that reads spellings then gets empty spellings. If
        a translator gets a single vocabulary, it uses it for both sides.
        """
        experiment = self.experiment
        sides = words if isinstance(words, VocabularyPair) else VocabularyPair(words, words)
        shared: dict[str, Any] = {"tables": {}, "projections": {}}
        for registry, entries in ((TABLES, experiment.tables), (PROJECTIONS, experiment.projections)):
            source_names = experiment.source_references(registry.family)
            for name, settings in entries.items():
                size = _size(sides.source if name in source_names else sides.target)
                with naming_section(f"{registry.family}.{name}"):
                    shared[registry.family][name] = registry.build(settings, shared | {"vocab_size": size})
        model = self._join(shared, sides)
        initialise(model, experiment.init)
        self.tables = shared["tables"]
        return model

    @property
    def regularisation(self) -> RegularisationSettings:
        """The penalties on activations."""
        return RegularisationSettings(**self.experiment.regularisation.model_dump())

    @abstractmethod
    def _join(self, shared: dict[str, Any], sides: VocabularyPair) -> L:
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

    def check(self, data: D, world: World) -> None:
        self.batches(data).slice(world.rank, world.size)

    def prepare(self, model: L, data: D, *, from_files: bool = True, notify: Notify = silent) -> list[str]:
        set_determinism(self.experiment.training.determinism)
        if self.experiment.evaluation.subspace:
            subspace(model, data.vocabulary)  # so that an error is raised now, not after training
        if not from_files:
            return []
        return start_tables(
            self.tables, self.experiment.tables, self.experiment.source_references("tables"), data.words, notify
        )

    def fit(self, model: L, data: D, session: Session) -> Fitted[L] | None:
        settings, run, world = self.experiment.training, session.run, session.world
        if settings.shard and world.size == 1:
            session.display.print(
                "training.shard has no effect with one process; use torchrun to start several processes"
            )
        trainer = Trainer(
            model,
            self.batches(data).slice(world.rank, world.size),
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
        sharded = settings.shard and world.size > 1
        scored = self.build_model(data.words).to(world.device) if sharded else model
        load_weights(scored, run.best_weights())
        return Fitted(scored, progress)

    def _average_checkpoints(self, session: Session) -> None:
        number = self.experiment.evaluation.average
        if number is None:
            return
        checkpoints = session.run.checkpoints
        checkpoints.save_average(number)
        if (averaged := len(checkpoints.averaged_steps())) < number:
            available = "1 checkpoint" if averaged == 1 else f"{averaged} checkpoints"
            session.display.print(
                f"{session.name}  evaluation.average = {number}, but the run has only {available} to average; a "
                "smaller training.save_every or training.validate_every saves more checkpoints"
            )

    def score(
        self, model: L, data: D, session: Session, progress: Progress, benchmarks: Mapping[str, Benchmark]
    ) -> dict[str, Any]:
        import torch

        run, experiment = session.run, self.experiment
        scores = {split: self.score_split(model, data, split) for split in SCORED}
        run.write_scores({split: torch.from_numpy(score.nll) for split, score in scores.items()})
        averaged, start = run.checkpoints.averaged_steps(), run.config.get("start")
        return {
            **{split: score.summary() for split, score in scores.items()},
            "best": Best(step=progress.best_step, epoch=progress.best_epoch),
            **({"averaged": tuple(averaged)} if averaged else {}),
            "start": Start(**start) if start else None,
            **self._task_fields(model, data, run, scores),
            **evaluate_vectors(self.vectors(model, data.vocabulary), data.vocabulary, benchmarks, tied=model.tied),
            "subspace": subspace(model, data.vocabulary) if experiment.evaluation.subspace else None,
        }

    @abstractmethod
    def _task_fields(self, model: L, data: D, run: Any, scores: Mapping[str, Score]) -> dict[str, Any]:
        """Return the fields of result.json that are specific to the task."""

    def vectors(self, model: L, vocabulary: Vocabulary) -> dict[str, WordVectors]:
        return named_vectors(end_vectors(model), vocabulary, tied=model.tied)

    def _input_end(self, shared: dict[str, Any], words: Vocabulary | int) -> Any:
        with naming_section("input"):
            return INPUTS.build(self.experiment.input, shared | spelled(self.experiment.input, words))

    def _encoder(self, shared: dict[str, Any], dimensions: dict[str, int]) -> Any:
        with naming_section("encoder"):
            return ENCODERS.build(self.experiment.encoder, shared | dimensions)

    def _output_end(self, shared: dict[str, Any], context_dim: int) -> Any:
        with naming_section("output"):
            return OUTPUTS.build(self.experiment.output, shared | {"context_dim": context_dim})


def _size(words: Vocabulary | int) -> int:
    return words if isinstance(words, int) else len(words)


def spelled(settings: Settings, words: Vocabulary | int) -> dict[str, Any]:
    """Return the spellings as an argument for an input end, if it reads spellings."""
    if not INPUTS.takes(settings, "spellings"):
        return {}
    from reefknot.nn.inputs.spelling import spell

    if isinstance(words, int):
        return {"spellings": spell([""]).expand(words, -1)}
    return {"spellings": spell([*words.words, *words.spelled])}


@contextmanager
def naming_section(section: str) -> Iterator[None]:
    """Put the name of a recipe's section before the message of an error. A part does not know its section."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"{section}: {error}") from error
