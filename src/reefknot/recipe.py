"""Recipes: a base of settings and named rows that differ from it, read from TOML and checked strictly.

    reefknot validate RECIPE        check one without running it
    reefknot ls                     the recipes that are shipped

An experiment is one row with the base and any `key=value` overrides merged in: everything that a run depends on. What a
row or an override sets is laid over the base. A table that states its `kind` replaces the one of that name, because its
settings are other settings; the value "default" takes a setting of the base away. An override that names a kind alone,
encoder.kind=gru, keeps those settings of the old part that the new one has too (see `overrides.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field, model_validator

from reefknot.errors import SettingsError
from reefknot.evaluation.beam import SearchSettings
from reefknot.evaluation.bleu import BleuSettings
from reefknot.evaluation.protocols import ProtocolName
from reefknot.evaluation.windows import NO_LINES, Lines, Sliding, Windows
from reefknot.models.initialisation import InitialisationSettings, initialise
from reefknot.models.language_model import LanguageModel
from reefknot.models.regularisation import RegularisationSettings
from reefknot.models.translator import Translator
from reefknot.overrides import merge, override
from reefknot.parts import ENCODERS, INPUTS, OUTPUTS, PROJECTIONS, TABLES, WINDOWS
from reefknot.recipes import find_recipe
from reefknot.recipes.file import OneLine, RecipeFile, read_file, setting
from reefknot.recipes.file import Row as Row
from reefknot.runs.folder import differences
from reefknot.settings import (
    Count,
    Mistake,
    Settings,
    check,
    complaint,
    not_too_deep,
    shortened,
    validate,
)
from reefknot.text.corpora import CorpusSettings
from reefknot.text.spelling import spell
from reefknot.text.vocabulary import Sides, Vocabulary, VocabularySettings
from reefknot.training.settings import TrainingSettings

MODEL = ("corpus", "vocabulary", "tables", "projections", "source", "input", "encoder", "output")
"""Sections of an experiment that decide how many parameters there are."""
ROWS_LISTED = 6
"""Rows that a sentence names; of more, it says where they are listed."""
WITHOUT_EFFECT = ("training.seed:", "training.log_every:", "training.save_every:", "training.keep:")
"""Settings that make no experiment another one."""

if TYPE_CHECKING:
    TableSettings = Settings
    ProjectionSettings = Settings
    InputSettings = Settings
    EncoderSettings = Settings
    OutputSettings = Settings
    WindowsSettings = Settings
else:
    TableSettings, ProjectionSettings, InputSettings = TABLES.settings(), PROJECTIONS.settings(), INPUTS.settings()
    EncoderSettings, OutputSettings = ENCODERS.settings(), OUTPUTS.settings()
    WindowsSettings = WINDOWS.settings()


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
    regularisation: RegularisationSettings = RegularisationSettings()
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


@dataclass(frozen=True)
class Recipe:
    """A recipe that was read and checked: each of these rows can be built."""

    name: str
    asked: str
    """What the user called it: its name, or the path of its file."""
    title: str
    paper: str | None
    rows: tuple[Row, ...]
    experiments: Mapping[str, Experiment]
    """One per row that can be trained."""
    overrides: tuple[str, ...]
    changed: Mapping[str, list[str]]
    """What the overrides changed in each row, but for settings without effect on its figures."""

    def build(self, row: Row, vocabulary: Vocabulary | int | Sides) -> LanguageModel:
        """The model of a row. A mistake that only building finds says which row it is in."""
        try:
            return build_model(self.experiments[row.name], vocabulary)
        except SettingsError as error:
            raise SettingsError(f'{self.asked}, row "{row.name}": {error}') from error

    def row(self, name: str | None) -> Row:
        """The row called `name`, in any case; without a name, the only one there is."""
        return _choose(self.rows, name, self.asked)


def load_recipe(name: str, overrides: Iterable[str] = (), row: str | Collection[str] | None = None) -> Recipe:
    """Read a recipe by its shipped name or its path, with `key=value` overrides.

    Every row is checked, or those that are asked for: an override may suit one row and not another. One row is asked
    for by its name; several by names in which * stands for anything, and they bring along the rows they build on.
    """
    path, known_as = find_recipe(name)
    parsed, changes = read_file(path, name), tuple(overrides)
    if row is None:
        rows = list(parsed.rows)
    else:
        rows = [_choose(parsed.rows, row, name)] if isinstance(row, str) else _select(parsed, row, changes, name)
    experiments: dict[str, Experiment] = {}
    changed: dict[str, list[str]] = {}
    mistakes: list[Mistake] = []
    for number, each in enumerate(rows):
        if not each.trained:
            continue
        where = f'{name}, row "{each.name}"'
        with not_too_deep(where):
            plain = merge(parsed.base, each.set)
            wanted = override(plain, changes)
            found = validate(Experiment, wanted, where)
            if isinstance(found, list):
                mistakes += found
                continue
            experiments[each.name] = found
            changed[each.name] = _changes(plain, wanted, found) if changes else []
        if any(text.startswith(MODEL) for text in changed[each.name]):
            # The paper's number may not hold any more.
            rows[number] = each.model_copy(update={"parameters": None})
    if mistakes:
        raise complaint(mistakes)
    _check_starts(parsed, experiments, name)
    return Recipe(known_as, name, parsed.title, parsed.paper, tuple(rows), experiments, changes, changed)


def _check_starts(file: RecipeFile, experiments: Mapping[str, Experiment], where: str) -> None:
    """A row begins with the weights of another one that can be trained, by a way that has an end, with its shapes."""
    starts = {
        row.name: setting(merge(file.base, row.set), "training", "start", "row") for row in file.rows if row.trained
    }
    starts |= {name: each.training.start.row if each.training.start else None for name, each in experiments.items()}
    wrong = []
    for name, experiment in experiments.items():
        way = [name]
        while (start := starts.get(way[-1])) and start not in way:
            way.append(start)
        if len(way) > 1 and way[1] not in starts:
            fault = f'no row "{shortened(way[1])}" can be trained; there are: ' + ", ".join(
                f'"{row}"' for row in starts
            )
        elif start:
            fault = "no row can begin with its own weights: " + " <- ".join(f'"{row}"' for row in (*way, start))
        elif len(way) > 1 and way[1] in experiments and (odd := _misfits(experiment, experiments[way[1]])):
            fault = f'row "{way[1]}" has another model: {", ".join(odd[:5])} do not fit'
        else:
            continue
        wrong.append(f'{where}, row "{name}":\n  training.start.row: {fault}')
    if wrong:
        raise SettingsError("\n".join(wrong))


def _misfits(one: Experiment, other: Experiment) -> list[str]:
    """Parameters that two models do not share, with as many words as a large text; none where one cannot be built."""
    try:
        with torch.device("meta"):
            first, second = (dict(build_model(each, 300_000).named_parameters()) for each in (one, other))
    except SettingsError:
        return []  # told where the model is built for its own words
    odd = [name for name in first.keys() & second.keys() if first[name].shape != second[name].shape]
    return sorted([*odd, *(first.keys() ^ second.keys())])


def _changes(plain: Mapping[str, Any], wanted: Mapping[str, Any], after: Experiment) -> list[str]:
    """What overrides have changed: of the experiment, or, where there is none without them, of what the recipe says."""
    before = validate(Experiment, plain, "")
    if isinstance(before, Experiment):
        found = differences(before.model_dump(mode="json"), after.model_dump(mode="json"))
    else:
        found = differences(_as_json(plain), _as_json(wanted))
    return [text for text in found if not text.startswith(WITHOUT_EFFECT)]


def _as_json(raw: Any) -> Any:
    """Settings that may be wrong; TOML has values that JSON has not."""
    if isinstance(raw, Mapping):
        return {name: _as_json(value) for name, value in raw.items()}
    try:
        json.dumps(raw, allow_nan=False)
    except (TypeError, ValueError):
        return "no value of a setting"
    return raw


def _choose(rows: Iterable[Row], name: str | None, recipe: str) -> Row:
    """The trained row called `name`, in any case; without a name, the only one there is."""
    rows = list(rows)
    trained = [row for row in rows if row.trained]
    if name is None and len(trained) == 1:
        return trained[0]
    if name is None:
        raise SettingsError(f"{recipe}: say which row with --row; {_there_are(trained, recipe)}")
    found = next((row for row in rows if name.lower() in (row.name.lower(), row.slug)), None)
    if found is None:
        names = {row.name.lower(): row.name for row in trained}
        near = get_close_matches(name[:100].lower(), names, n=1)
        hint = f'did you mean "{names[near[0]]}"?' if near else _there_are(trained, recipe)
        raise SettingsError(f'{recipe}: no row "{shortened(name)}"; {hint}')
    if not found.trained:
        why = (
            f'scores the model of row "{found.of}"; train that' if found.of else "is quoted: there is nothing to train"
        )
        raise SettingsError(f'{recipe}: row "{found.name}" {why}')
    return found


def _there_are(rows: list[Row], recipe: str) -> str:
    if len(rows) > ROWS_LISTED:
        return f"`reefknot ls {recipe}` lists the {len(rows)} that there are"
    return "there are: " + ", ".join(f'"{row.name}"' for row in rows)


def _select(file: RecipeFile, patterns: Iterable[str], overrides: tuple[str, ...], recipe: str) -> list[Row]:
    """The rows that any pattern fits, and those whose weights they need, in the recipe's order."""
    chosen: list[str] = []
    for pattern in patterns:
        fits = re.compile(re.escape(pattern.lower()).replace(r"\*", ".*"))
        found = [row for row in file.rows if fits.fullmatch(row.name.lower())]
        if "*" not in pattern:
            found = [_choose(file.rows, pattern, recipe)]
        elif all(row.quoted for row in found):
            there = _there_are([row for row in file.rows if row.trained], recipe)
            raise SettingsError(f'{recipe}: no row to train fits "{shortened(pattern)}"; {there}')
        chosen += [row.name for row in found]
    rows = {row.name: row for row in file.rows}
    for name in chosen:  # which grows meanwhile
        settings = override(merge(file.base, rows[name].set), overrides) if rows[name].trained else {}
        needed = rows[name].of or setting(settings, "training", "start", "row")
        if needed in rows and needed not in chosen:
            chosen.append(needed)
    return [row for row in file.rows if row.name in chosen]


def build_model(experiment: Experiment, vocabulary: Vocabulary | int | Sides) -> LanguageModel:
    """The model an experiment describes, drawn from torch's generator as it stands.

    A number of words is enough where nothing is to be read: an input end that spells then spells nothing. One
    vocabulary of a translator is that of both sides.
    """
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
    if source_end is None:
        model = LanguageModel(input_end, encoder, output, experiment.regularisation)
    else:
        model = Translator(source_end, input_end, encoder, output, experiment.regularisation)
    initialise(model, experiment.init)
    return model


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
