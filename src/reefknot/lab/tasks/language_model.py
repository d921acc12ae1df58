"""An experiment of a language model or a translator: everything that its run depends on, and the model it describes.

Settings come from a recipe (see `lab/recipes/recipe.py`) or from the config.json of a run; they are checked against
each other here, before anything is read or built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator
from torch import nn

from reefknot.errors import SettingsError, shortened
from reefknot.lab.config.parts import ENCODERS, INPUTS, OUTPUTS, PROJECTIONS, TABLES, WINDOWS
from reefknot.lab.config.registry import derive_settings
from reefknot.lab.config.settings import Count, OneLine, Settings, check
from reefknot.lab.evaluation.beam import SearchSettings
from reefknot.lab.evaluation.bleu import BleuSettings
from reefknot.lab.evaluation.protocols import ProtocolName
from reefknot.lab.evaluation.windows import NO_LINES, Lines, Sliding, Windows
from reefknot.lab.tasks.initialisation import InitialisationSettings, initialise
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.vocabulary import Sides, Vocabulary, VocabularySettings
from reefknot.lab.training.settings import TrainingSettings
from reefknot.nn.inputs.spelling import spell
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.models.regularisation import RegularisationSettings
from reefknot.nn.models.translator import Translator

if TYPE_CHECKING:
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


class EvaluationSettings(Settings):
    """How a finished model is scored."""

    streams: Annotated[
        Count,
        Field(description="parts of a text scored side by side, each from an empty state; 1 loses no context"),
    ] = 1
    windows: Annotated[
        WindowsSettings | None,
        Field(
            description="pieces of a text scored afresh; left out, whole texts, or blocks of `steps` tokens where "
            "the encoder carries no state"
        ),
    ] = None
    train: Annotated[bool, Field(description="score the training text too, without dropout, after training")] = False
    protocol: Annotated[
        ProtocolName,
        Field(description="count as a paper's program does too, for its figures; definition: ours alone"),
    ] = "definition"
    search: Annotated[
        SearchSettings | None, Field(description="how a translation is searched for; left out, a beam of 5")
    ] = None
    bleu: Annotated[
        BleuSettings | None, Field(description="how translations are counted; left out, as sacrebleu does by itself")
    ] = None
    average: Annotated[
        Count | None, Field(description="score the mean of the last so many checkpoints, not the best one")
    ] = None
    similarity: Annotated[
        bool,
        Field(description="hold the vectors of both ends against people's judgements of word pairs, if they are here"),
    ] = False
    subspace: Annotated[
        bool, Field(description="measure how far the space of the output vectors is from that of the input vectors")
    ] = False

    @model_validator(mode="after")
    def _check_streams(self) -> EvaluationSettings:
        if self.windows is not None and self.streams > 1:
            raise ValueError(f"streams = {self.streams}: windows are computed afresh, side by side; leave streams out")
        return self


class Experiment(Settings):
    """Everything a run depends on."""

    corpus: CorpusSettings
    vocabulary: VocabularySettings = VocabularySettings()
    tables: Annotated[
        dict[OneLine, TableSettings], Field(description="what is learned per word; ends refer to it by name")
    ]
    projections: Annotated[
        dict[OneLine, ProjectionSettings],
        Field(description="matrices between the bands of a table and the model; ends refer to them by name"),
    ] = Field(default={})
    input: InputSettings
    encoder: EncoderSettings
    output: OutputSettings
    source: Annotated[InputSettings | None, Field(description="how the words of a source go in, in translation")] = None
    init: InitialisationSettings = InitialisationSettings()
    regularisation: ActivationSettings = ActivationSettings()
    training: TrainingSettings
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def _check_names(self) -> Experiment:
        for group, there in (("tables", self.tables), ("projections", self.projections)):
            held = {*INPUTS.references(self.input, group), *OUTPUTS.references(self.output, group)}
            held |= set(self.source_references(group))
            # A table that only projections are made for is held by no end.
            named = held.union(*(PROJECTIONS.references(each, group) for each in self.projections.values()))
            missing, unused = sorted(named - set(there)), sorted(set(there) - held)
            if missing:
                one = group.removesuffix("s")
                known = ", ".join(there) or "none"
                raise ValueError(f"no {one} '{shortened(missing[0], 60)}' in [{group}] (there: {known})")
            if unused:
                raise ValueError(f"no end uses {group}.{shortened(unused[0], 60)}; remove it or name it in an end")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Experiment:
        asks = {
            "corpus.pairs": self.corpus.pairs is not None,
            "[source]": self.source is not None,
            "an encoder such as encoder_decoder": self._reads_source,
            'training.batching = "pairs"': self.training.batching == "pairs",
        }
        there, missing = ([name for name, found in asks.items() if found is wanted] for wanted in (True, False))
        if there and missing:
            raise ValueError(f"{there[0]} is for translation, which needs {', '.join(missing)} too")
        if not there:
            for name in ("search", "bleu"):
                if getattr(self.evaluation, name) is not None:
                    raise ValueError(f"evaluation.{name} is for translation; this is a language model, leave it out")
            if self.vocabulary.sides != "joint":
                raise ValueError("vocabulary.sides is for translation; a language model has one side, leave it out")
            return self
        shared = set(self.source_references("tables")) & {
            *INPUTS.references(self.input, "tables"),
            *OUTPUTS.references(self.output, "tables"),
        }
        if shared and self.vocabulary.sides != "joint":
            raise ValueError(
                f"tables.{min(shared)} is held by the source and by the target, whose words are not the same: use "
                'vocabulary.sides = "joint", or a table for each side'
            )
        if self.evaluation.windows is not None or self.evaluation.train or not self.vocabulary.end_of_line:
            raise ValueError(
                "translation scores pair by pair, each with its <eos>: leave out evaluation.windows and train, and "
                "vocabulary.end_of_line"
            )
        return self

    def source_references(self, group: str) -> list[str]:
        """The shared objects of a group that the source's end holds, by name."""
        return list(INPUTS.references(self.source, group)) if self.source is not None else []

    @model_validator(mode="after")
    def _check_average(self) -> Experiment:
        average = self.evaluation.average
        if average is not None and average > self.training.keep:
            raise ValueError(
                f"evaluation.average = {average} checkpoints, but training.keep = {self.training.keep}; keep as many"
            )
        return self

    @model_validator(mode="after")
    def _check_spellings(self) -> Experiment:
        spelled = INPUTS.asks_for(self.input, "spellings")
        kind = self.input.kind  # type: ignore[attr-defined]
        if self.vocabulary.keep_spellings and not spelled:
            raise ValueError(f"vocabulary.keep_spellings: an input of kind {kind} reads no spellings; use char_cnn")
        if self.vocabulary.bpe and spelled:
            raise ValueError(f"vocabulary.bpe: an input of kind {kind} reads the spelling of whole words; leave it out")
        return self

    @model_validator(mode="after")
    def _check_windows(self) -> Experiment:
        windows, evaluation = self.windows, self.evaluation
        if windows is not None and windows.by_lines and not self.vocabulary.end_of_line:
            raise ValueError(f"evaluation.windows: {NO_LINES}")
        if not self._carries:
            what = f"an encoder of kind {self.encoder.kind} carries no state"  # type: ignore[attr-defined]
            if evaluation.streams > 1:
                raise ValueError(f"evaluation.streams: {what}, so that streams have no meaning; leave it out")
            if evaluation.protocol != "definition":
                raise ValueError(f"evaluation.protocol: {what}, as {evaluation.protocol} needs it; leave it out")
        return self

    @property
    def start(self) -> str | None:
        """The row whose best weights this one begins with."""
        return self.training.start.row if self.training.start else None

    def build(self, vocabulary: Vocabulary | int | Sides) -> LanguageModel:
        """The model that is trained, drawn from torch's generator as it stands."""
        return build_model(self, vocabulary)

    @property
    def windows(self) -> Windows | None:
        """The windows that texts are scored in, each afresh; None: texts are read through, with a state carried."""
        if self.evaluation.windows is not None:
            windows: Windows = WINDOWS.build(self.evaluation.windows, {})
            return windows
        if self._carries or self.corpus.pairs is not None:
            return None
        # What it has learned to read: lines by themselves, or pieces of the text as long as these.
        by_lines = self.training.batching == "sentences" and self.vocabulary.end_of_line
        return Lines() if by_lines else Sliding(context=0, stride=self.training.steps)

    @property
    def _reads_source(self) -> bool:
        reads: bool = ENCODERS.load(self.encoder.kind).reads_source  # type: ignore[attr-defined]
        return reads

    @property
    def _carries(self) -> bool:
        carries: bool = ENCODERS.load(self.encoder.kind).carries  # type: ignore[attr-defined]
        return carries


def build_model(experiment: Experiment, vocabulary: Vocabulary | int | Sides) -> LanguageModel:
    """Return the model that an experiment describes, drawn from torch's generator as it stands.

    A number of words is enough where nothing is to be read: an input end that spells then spells nothing. One
    vocabulary of a translator is that of both sides.
    """
    return build_with_tables(experiment, vocabulary)[0]


def build_with_tables(
    experiment: Experiment, vocabulary: Vocabulary | int | Sides
) -> tuple[LanguageModel, dict[str, nn.Module]]:
    """Return the model that an experiment describes, and its tables by the names that the experiment gives them."""
    words = vocabulary if isinstance(vocabulary, Sides) else Sides(vocabulary, vocabulary)
    given: dict[str, Any] = {"tables": {}, "projections": {}}
    for registry, entries in ((TABLES, experiment.tables), (PROJECTIONS, experiment.projections)):
        theirs = experiment.source_references(registry.family)
        for name, each in entries.items():
            size = _size(words.source if name in theirs else words.target)
            with _naming(f"{registry.family}.{name}"):
                given[registry.family][name] = registry.build(each, given | {"vocab_size": size})
    source_end = None
    if experiment.source is not None:
        with _naming("source"):
            source_end = INPUTS.build(experiment.source, given | _spelled(experiment.source, words.source))
    with _naming("input"):
        input_end = INPUTS.build(experiment.input, given | _spelled(experiment.input, words.target))
    widths = {"input_dim": input_end.dim} | ({} if source_end is None else {"source_dim": source_end.dim})
    with _naming("encoder"):
        encoder = ENCODERS.build(experiment.encoder, given | widths)
    with _naming("output"):
        output = OUTPUTS.build(experiment.output, given | {"context_dim": encoder.dim})
    regularisation = RegularisationSettings(**experiment.regularisation.model_dump())
    if source_end is None:
        model = LanguageModel(input_end, encoder, output, regularisation)
    else:
        model = Translator(source_end, input_end, encoder, output, regularisation)
    initialise(model, experiment.init)
    return model, given["tables"]


def _size(words: Vocabulary | int) -> int:
    return words if isinstance(words, int) else len(words)


def _spelled(settings: Settings, words: Vocabulary | int) -> dict[str, Any]:
    """What an input end is given that spells its words."""
    if not INPUTS.asks_for(settings, "spellings"):
        return {}
    if isinstance(words, int):
        return {"spellings": spell([""]).expand(words, -1)}
    return {"spellings": spell([*words.words, *words.spelled])}


@contextmanager
def _naming(section: str) -> Iterator[None]:
    """A part knows what is wrong with it but not where it stands in a recipe."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(f"{section}: {error}") from error


def check_experiment(settings: Mapping[str, Any], where: str) -> Experiment:
    """Settings as an experiment, or one error that lists everything wrong with them."""
    return check(Experiment, settings, where)
