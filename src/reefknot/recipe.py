"""Recipes: a base of settings and named rows that differ from it, read from TOML and checked strictly.

    reefknot validate RECIPE        check one without running it
    reefknot ls                     the recipes that are shipped

An experiment is one row with the base and any `key=value` overrides merged in: everything that a run depends on. What a
row or an override sets is laid over the base. A table that states its `kind` replaces the one of that name, because its
settings are other settings; the value "default" takes a setting of the base away.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from pydantic import AfterValidator, Field, model_validator

from reefknot.errors import SettingsError
from reefknot.evaluation.protocols import ProtocolName
from reefknot.models.initialisation import InitialisationSettings, initialise
from reefknot.models.language_model import LanguageModel
from reefknot.models.regularisation import RegularisationSettings
from reefknot.parts import ENCODERS, INPUTS, OUTPUTS, PROJECTIONS, TABLES
from reefknot.recipes import find_recipe
from reefknot.runs.folder import differences, folder_name
from reefknot.settings import (
    Count,
    Mistake,
    Positive,
    Settings,
    check,
    complaint,
    not_too_deep,
    shortened,
    validate,
)
from reefknot.text.corpora import SPLITS, CorpusSettings
from reefknot.text.spelling import spell
from reefknot.text.vocabulary import Vocabulary, VocabularySettings
from reefknot.training.settings import TrainingSettings

MODEL = ("corpus", "vocabulary", "tables", "projections", "input", "encoder", "output")
"""Sections of an experiment that decide how many parameters there are."""
DEFAULT = "default"
"""The value that takes a setting of the base away."""
WITHOUT_EFFECT = ("training.seed:", "training.log_every:", "training.save_every:", "training.keep:")
"""Settings that make no experiment another one."""

if TYPE_CHECKING:
    TableSettings = Settings
    ProjectionSettings = Settings
    InputSettings = Settings
    EncoderSettings = Settings
    OutputSettings = Settings
    SplitName = str
else:
    TableSettings, ProjectionSettings, InputSettings = TABLES.settings(), PROJECTIONS.settings(), INPUTS.settings()
    EncoderSettings, OutputSettings = ENCODERS.settings(), OUTPUTS.settings()
    SplitName = Literal[SPLITS]


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line of printable characters")
    return text


OneLine = Annotated[str, AfterValidator(_one_line)]


class EvaluationSettings(Settings):
    """How a finished model is scored."""

    streams: Annotated[
        Count,
        Field(description="parts of a text scored side by side, each from an empty state; 1 loses no context"),
    ] = 1
    train: Annotated[bool, Field(description="score the training text too, without dropout, after training")] = False
    protocol: Annotated[
        ProtocolName,
        Field(description="count as a paper's program does too, for its figures; definition: ours alone"),
    ] = "definition"


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
    init: InitialisationSettings = InitialisationSettings()
    regularisation: RegularisationSettings = RegularisationSettings()
    training: TrainingSettings
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def _check_names(self) -> Experiment:
        for group, there in (("tables", self.tables), ("projections", self.projections)):
            held = {*INPUTS.references(self.input, group), *OUTPUTS.references(self.output, group)}
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
    def _check_spellings(self) -> Experiment:
        spelled = INPUTS.asks_for(self.input, "spellings")
        kind = self.input.kind  # type: ignore[attr-defined]
        if self.vocabulary.keep_spellings and not spelled:
            raise ValueError(f"vocabulary.keep_spellings: an input of kind {kind} reads no spellings; use char_cnn")
        if self.vocabulary.bpe and spelled:
            raise ValueError(f"vocabulary.bpe: an input of kind {kind} reads the spelling of whole words; leave it out")
        return self


class Row(Settings):
    """One row of a paper's table."""

    name: Annotated[OneLine, Field(min_length=1, max_length=100, description="as the paper writes it")]
    quoted: Annotated[bool, Field(description="a figure the paper quotes from others; never trained here")] = False
    parameters: Annotated[Count | None, Field(description="exact number of parameters, checked before training")] = None
    paper: dict[SplitName, Positive] = Field({}, description="the paper's perplexities by split")
    set: dict[str, Any] = Field({}, description="what differs from the base")

    @property
    def slug(self) -> str:
        """The row's name as a folder."""
        return folder_name(self.name)


class RecipeFile(Settings):
    """What stands in the file."""

    title: OneLine
    paper: Annotated[OneLine | None, Field(description="the paper's short name, such as press2017")] = None
    base: dict[str, Any]
    rows: Annotated[list[Row], Field(min_length=1)]


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
    changed: Mapping[str, list[str]]
    """What the overrides changed in each row, but for settings without effect on its figures."""

    def build(self, row: Row, vocabulary: Vocabulary | int) -> LanguageModel:
        """The model of a row. A mistake that only building finds says which row it is in."""
        try:
            return build_model(self.experiments[row.name], vocabulary)
        except SettingsError as error:
            raise SettingsError(f'{self.asked}, row "{row.name}": {error}') from error

    def row(self, name: str | None) -> Row:
        """The row called `name`, in any case; without a name, the only one there is."""
        return _choose(self.rows, name, self.asked)


def load_recipe(name: str, overrides: Iterable[str] = (), row: str | None = None) -> Recipe:
    """Read a recipe by its shipped name or its path, with `key=value` overrides.

    Every row is checked, or the one that is asked for: an override may suit one row and not another.
    """
    path, known_as = find_recipe(name)
    parsed = check(RecipeFile, _read_toml(path), name)
    _refuse_twins(parsed.rows, name)
    # Overrides are one change, whatever their order: first laid over each other, then over the row.
    changes: dict[str, Any] = {}
    for text in overrides:
        changes = _lay_over(changes, parse_override(text))
    rows = list(parsed.rows) if row is None else [_choose(parsed.rows, row, name)]
    experiments: dict[str, Experiment] = {}
    changed: dict[str, list[str]] = {}
    mistakes: list[Mistake] = []
    for number, each in enumerate(rows):
        if each.quoted:
            continue
        where = f'{name}, row "{each.name}"'
        with not_too_deep(where):
            plain = merge(parsed.base, each.set)
            wanted = merge(plain, changes)
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
    return Recipe(known_as, name, parsed.title, parsed.paper, tuple(rows), experiments, changed)


def _check_starts(file: RecipeFile, experiments: Mapping[str, Experiment], where: str) -> None:
    """A row begins with the weights of another one that can be trained, by a way that has an end, with its shapes."""
    starts = {row.name: _start(merge(file.base, row.set)) for row in file.rows if not row.quoted}
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


def _start(raw: Any) -> Any:
    """The row that settings, which may be wrong, begin with."""
    for key in ("training", "start", "row"):
        raw = raw.get(key) if isinstance(raw, Mapping) else None
    return raw if isinstance(raw, str) else None


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
    """The row called `name`, in any case; without a name, the only one there is."""
    trained = [row for row in rows if not row.quoted]
    if name is None and len(trained) == 1:
        return trained[0]
    for row in trained:
        if name is not None and name.lower() in (row.name.lower(), row.slug):
            return row
    names = ", ".join(f'"{row.name}"' for row in trained)
    asked = "say which row with --row" if name is None else f'no row "{shortened(name)}"'
    raise SettingsError(f"{recipe}: {asked}; there are: {names}")


def _refuse_twins(rows: list[Row], where: str) -> None:
    seen: dict[str, str] = {}
    for row in rows:
        if row.slug in seen:
            raise SettingsError(f'{where}: rows "{seen[row.slug]}" and "{row.name}" would share a folder; rename one')
        seen[row.slug] = row.name


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except (OSError, RecursionError, ValueError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error


def parse_override(text: str) -> dict[str, Any]:
    """`training.epochs=3` -> {"training": {"epochs": 3}}. The value is TOML; a bare word is a string."""
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise SettingsError(f"'{shortened(text)}' is not key=value, such as training.epochs=3")
    parsed: Any
    try:
        parsed = tomllib.loads(f"value = {value}")["value"] if "\n" not in value else value
    except (ValueError, RecursionError):  # not TOML, or a number of thousands of digits
        parsed = value
    for name in reversed(names):
        parsed = {name: parsed}
    return cast(dict[str, Any], parsed)


def _lay_over(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two changes as one."""
    together = dict(below)
    for key, value in above.items():
        old = together.get(key)
        together[key] = _lay_over(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return together


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`change` laid over `base`: a table that states its `kind` replaces the old one, `DEFAULT` takes a value away.

    Where there is nothing to take away it stays, and is refused like any other wrong value.
    """
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if value == DEFAULT and key in merged:
            del merged[key]
        elif isinstance(value, Mapping):
            merged[key] = merge(old if isinstance(old, Mapping) and "kind" not in value else {}, value)
        else:
            merged[key] = value
    return merged


def build_model(experiment: Experiment, vocabulary: Vocabulary | int) -> LanguageModel:
    """The model an experiment describes, drawn from torch's generator as it stands.

    A number of words is enough where nothing is to be read: an input end that spells then spells nothing.
    """
    number = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    given: dict[str, Any] = {"vocab_size": number, "tables": {}, "projections": {}}
    for registry, entries in ((TABLES, experiment.tables), (PROJECTIONS, experiment.projections)):
        for name, each in entries.items():
            with _naming(f"{registry.family}.{name}"):
                given[registry.family][name] = registry.build(each, given)
    if INPUTS.asks_for(experiment.input, "spellings"):
        words = [""] * number if isinstance(vocabulary, int) else [*vocabulary.words, *vocabulary.spelled]
        given["spellings"] = spell(words)
    with _naming("input"):
        source = INPUTS.build(experiment.input, given)
    with _naming("encoder"):
        encoder = ENCODERS.build(experiment.encoder, given | {"input_dim": source.dim})
    with _naming("output"):
        output = OUTPUTS.build(experiment.output, given | {"context_dim": encoder.dim})
    model = LanguageModel(source, encoder, output, experiment.regularisation)
    initialise(model, experiment.init)
    return model


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
