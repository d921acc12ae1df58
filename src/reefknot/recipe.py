"""Recipes: a base of settings and named rows that differ from it, read from TOML and checked strictly.

    reefknot validate RECIPE        check one without running it
    reefknot ls                     the recipes that are shipped

An experiment is one row with the base and any `key=value` overrides merged in: everything that a run depends on.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, Field, ValidationError

from reefknot.errors import SettingsError
from reefknot.models.initialisation import InitialisationSettings, initialise
from reefknot.models.language_model import LanguageModel
from reefknot.parts import ENCODERS, INPUTS, OUTPUTS, TABLES
from reefknot.recipes import find_recipe
from reefknot.runs.folder import differences, folder_name
from reefknot.settings import Count, Positive, Settings
from reefknot.text.corpora import CorpusSettings
from reefknot.text.vocabulary import VocabularySettings
from reefknot.training.settings import TrainingSettings

ERRORS_SHOWN = 8
T = TypeVar("T", bound=Settings)

if TYPE_CHECKING:
    TableSettings = Settings
    InputSettings = Settings
    EncoderSettings = Settings
    OutputSettings = Settings
else:
    TableSettings, InputSettings = TABLES.settings(), INPUTS.settings()
    EncoderSettings, OutputSettings = ENCODERS.settings(), OUTPUTS.settings()


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


class Experiment(Settings):
    """Everything a run depends on."""

    corpus: CorpusSettings
    vocabulary: VocabularySettings = VocabularySettings()
    tables: Annotated[
        dict[OneLine, TableSettings], Field(description="what is learned per word; ends refer to it by name")
    ]
    input: InputSettings
    encoder: EncoderSettings
    output: OutputSettings
    init: InitialisationSettings = InitialisationSettings()
    training: TrainingSettings
    evaluation: EvaluationSettings = EvaluationSettings()


class Row(Settings):
    """One row of a paper's table."""

    name: Annotated[OneLine, Field(min_length=1, max_length=100, description="as the paper writes it")]
    quoted: Annotated[bool, Field(description="a figure the paper quotes from others; never trained here")] = False
    parameters: Annotated[Count | None, Field(description="exact number of parameters, checked before training")] = None
    paper: dict[str, Positive] = Field({}, description="the paper's perplexities by split")
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
    title: str
    paper: str | None
    rows: tuple[Row, ...]
    experiments: Mapping[str, Experiment]
    """One per row that can be trained."""
    changed: Mapping[str, list[str]]
    """What the overrides changed in each row, its seed aside."""

    def row(self, name: str | None) -> Row:
        """The row called `name`, in any case; without a name, the only one there is."""
        return _choose(self.rows, name, self.name)


def load_recipe(name: str, overrides: Iterable[str] = (), row: str | None = None) -> Recipe:
    """Read a recipe by its shipped name or its path, with `key=value` overrides.

    Every row is checked, or the one that is asked for: an override may suit one row and not another.
    """
    path, known_as = find_recipe(name)
    parsed = _check(RecipeFile, _read_toml(path), name)
    _refuse_twins(parsed.rows, name)
    changes = [parse_override(text) for text in overrides]
    rows: list[Row] = []
    experiments: dict[str, Experiment] = {}
    changed: dict[str, list[str]] = {}
    for each in parsed.rows if row is None else [_choose(parsed.rows, row, name)]:
        rows.append(each)
        if each.quoted:
            continue
        where = f'{name}, row "{each.name}"'
        plain = _merge_all([parsed.base, each.set], where)
        wanted = _merge_all([plain, *changes], where)
        experiments[each.name] = check_experiment(wanted, where)
        changed[each.name] = [text for text in differences(plain, wanted) if not text.startswith("training.seed:")]
        if _is_resized(changed[each.name]):
            rows[-1] = each.model_copy(update={"parameters": None})
    return Recipe(known_as, parsed.title, parsed.paper, tuple(rows), experiments, changed)


def _is_resized(changed: list[str]) -> bool:
    """Whether the paper's number of parameters may not hold any more."""
    return any(not text.startswith(("training.", "evaluation.", "init.")) for text in changed)


def _choose(rows: Iterable[Row], name: str | None, recipe: str) -> Row:
    """The row called `name`, in any case; without a name, the only one there is."""
    trained = [row for row in rows if not row.quoted]
    if name is None and len(trained) == 1:
        return trained[0]
    for row in trained:
        if name is not None and name.lower() in (row.name.lower(), row.slug):
            return row
    names = ", ".join(f'"{row.name}"' for row in trained)
    asked = "say which row with --row" if name is None else f'no row "{_short(name)}"'
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
        raise SettingsError(f"'{_short(text)}' is not key=value, such as training.epochs=3")
    parsed: Any
    try:
        parsed = tomllib.loads(f"value = {value}")["value"] if "\n" not in value else value
    except (ValueError, RecursionError):  # not TOML, or a number of thousands of digits
        parsed = value
    for name in reversed(names):
        parsed = {name: parsed}
    return cast(dict[str, Any], parsed)


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`change` laid over `base`. A table with another `kind` replaces the old one: its settings are other settings."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            merged[key] = merge(old, value)
        else:
            merged[key] = value
    return merged


def _merge_all(layers: list[dict[str, Any]], where: str) -> dict[str, Any]:
    try:
        return reduce(merge, layers)
    except RecursionError:
        raise SettingsError(f"{where}: nested too deeply") from None


def build_model(experiment: Experiment, vocab_size: int) -> LanguageModel:
    """The model an experiment describes, drawn from torch's generator as it stands."""
    given: dict[str, Any] = {"vocab_size": vocab_size}
    given["tables"] = {name: TABLES.build(table, given) for name, table in experiment.tables.items()}
    source = INPUTS.build(experiment.input, given)
    encoder = ENCODERS.build(experiment.encoder, given | {"input_dim": source.dim})
    output = OUTPUTS.build(experiment.output, given | {"context_dim": encoder.dim})
    model = LanguageModel(source, encoder, output)
    initialise(model, experiment.init)
    return model


def check_experiment(settings: Mapping[str, Any], where: str) -> Experiment:
    """Settings as an experiment, or one error that lists everything wrong with them."""
    experiment = _check(Experiment, settings, where)
    named = {*INPUTS.references(experiment.input, "tables"), *OUTPUTS.references(experiment.output, "tables")}
    unused = sorted(set(experiment.tables) - named)
    missing = sorted(named - set(experiment.tables))
    if missing:
        known = ", ".join(experiment.tables) or "none"
        raise SettingsError(f"{where}: no table '{_short(missing[0])}' in [tables] (there: {known})")
    if unused:
        raise SettingsError(f"{where}: no end uses tables.{unused[0]}; remove it or name it in an end")
    return experiment


def _check(kind: type[T], raw: Any, where: str) -> T:
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    except RecursionError:
        raise SettingsError(f"{where}: nested too deeply") from None
    # There may be thousands, so only those that are shown are put into words.
    shown = dict.fromkeys(f"  {_sentence(kind, raw, dict(problem))}" for problem in problems[:ERRORS_SHOWN])
    more = len(problems) - ERRORS_SHOWN
    raise SettingsError("\n".join([f"{where}:", *shown, *([f"  and {more} more"] if more > 0 else [])]))


def _sentence(kind: type[Settings], raw: Any, problem: dict[str, Any]) -> str:
    """One problem: the setting as a person would write it, what is wrong, what may help."""
    key = _dotted(raw, problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = _nearest(key, kind)
        return _short(f"{key}: no such setting") + (f"; did you mean {near}?" if near else "")
    if problem["type"] == "missing":
        return _short(f"{key}: must be set")
    message = problem["msg"].removeprefix("Value error, ")
    value = problem["input"]
    given = "" if isinstance(value, Mapping | list) else f" (it is {_written(value)})"
    return _short(f"{key}: {message[:1].lower()}{message[1:]}", 160) + given


def _written(value: Any) -> str:
    """A value as a recipe has it; Python does not write out the digits of a number with thousands of them."""
    huge = isinstance(value, int) and value.bit_length() > 64
    return _short(hex(value) if huge else repr(value), 60)


def _dotted(raw: Any, location: tuple[str | int, ...]) -> str:
    """pydantic puts the `kind` of a part into the path; a recipe does not."""
    names: list[str] = []
    for step in location:
        if isinstance(raw, Mapping) and step not in raw and step == raw.get("kind"):
            continue
        names.append(str(step))
        if isinstance(raw, Mapping):
            raw = raw.get(step)
        elif isinstance(raw, list) and isinstance(step, int):
            raw = raw[step] if step < len(raw) else None
    return ".".join(names)


def _short(text: str, length: int = 100) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= length else f"{text[:length]}..."


def _nearest(key: str, kind: type[Settings]) -> str | None:
    """The setting somebody meant: the same name in its place elsewhere, or the closest spelling."""
    known = list(_keys(kind.model_json_schema(), key.split(".")))
    last = key.rpartition(".")[2]
    same = [path for path in known if path.rpartition(".")[2] == last and path != key]
    if same and len(key) < 200:
        return same[0]
    return next(iter(get_close_matches(key[:200], known, n=1)), None)


def _keys(schema: dict[str, Any], key: list[str]) -> Iterable[str]:
    """All dotted settings of a schema; where names or numbers are free, as in [tables], those of `key`."""

    def walk(node: dict[str, Any], prefix: str) -> Iterable[str]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        for branch in node.get("oneOf", []) + node.get("anyOf", []) + node.get("allOf", []):
            yield from walk(branch, prefix)
        for name, child in node.get("properties", {}).items():
            yield f"{prefix}{name}"
            yield from walk(child, f"{prefix}{name}.")
        depth = prefix.count(".")
        for free in (node.get("additionalProperties"), node.get("items")):
            if isinstance(free, dict) and depth < len(key):
                yield from walk(free, f"{prefix}{key[depth]}.")

    return walk(schema, "")
