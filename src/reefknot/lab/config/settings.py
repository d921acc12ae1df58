"""Checked settings: the base class of all sections of a recipe, and the error messages for wrong settings.

`Settings` is a pydantic model that rejects unknown keys. `check_settings` turns a dictionary into a `Settings` object,
or raises one `SettingsError` that lists all mistakes, with hints for misspelled keys:

    demo, row "tied":
      encoder.layers: must be greater than or equal to 1 (it is 0)
      training.batch_size: no such setting; did you mean training.batch?

`Count`, `Dim`, `Positive`, `NonNegative` and `Probability` are number types with bounds, for the fields of `Settings`.

A recipe is a TOML file of experiments. Each experiment is a row of the recipe. A part is an object that a recipe names
by its `kind`, such as `encoder.kind = "lstm"`. Each kind has its own settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from reefknot.errors import SettingsError, shorten
from reefknot.nn import bounds

MAX_ERROR_LINES = 10
"""Maximum number of lines of an error message."""
WRONG_KIND = "wrong_kind"
"""Our type of pydantic error for a part whose `kind` is missing or unknown."""
KIND_WITHOUT_TABLE = "kind_without_table"
"""Our type of pydantic error for a part that is set to a kind, as in encoder = "lstm". Its message is the kind."""
MAX_KEY_LENGTH = 200
"""The error message for a longer key has no hint, because the search for similar keys would be slow."""
NAMES_IN_OTHER_PROGRAMS = {
    "batch": ("batch_size", "bs", "bsz"),
    "steps": ("bptt", "seq_len", "sequence_length"),
    "epochs": ("num_epochs", "max_epochs"),
    "accumulate": ("grad_accum", "gradient_accumulation_steps"),
    "clip": ("grad_clip", "clip_norm", "clip_grad", "max_grad_norm"),
    "optimiser": ("optim", "optimizer"),
    "schedule": ("scheduler", "lr_scheduler"),
    "learning_rate": ("lr",),
    "weight_decay": ("wd",),
    "layers": ("num_layers", "n_layers", "nlayers", "depth"),
    "hidden_dim": ("hidden", "hidden_size", "nhid", "dim"),
    "heads": ("num_heads", "n_heads", "nhead", "nheads"),
    "dim": ("emb", "emb_dim", "emb_size", "emsize", "embedding_dim", "embedding_size"),
}
"""For each of our settings, its names in other programs. They differ too much from ours to look like misspellings."""


class Settings(BaseModel):
    """Base class of settings. Unknown keys, wrong types, NaN and infinities are errors. Settings are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **arguments: Any) -> None:
        """Reject a number type of `reefknot.nn.bounds`, because pydantic would ignore its bounds."""
        for name, field in cls.model_fields.items():
            annotations = [*field.metadata, field.annotation]
            if any(_has_bounds(annotation) for annotation in annotations):
                raise TypeError(f"{cls.__name__}.{name}: use the number types of reefknot.lab.config.settings")


def _has_bounds(annotation: Any) -> bool:
    """Return whether an annotation contains a bound of `reefknot.nn.bounds`, at any depth."""
    if isinstance(annotation, bounds.BOUNDS):
        return True
    return any(_has_bounds(inner_annotation) for inner_annotation in get_args(annotation))


def translate_bounds(annotation: Any) -> Any:
    """Return an annotation with the bounds of `reefknot.nn.bounds` translated to pydantic's bounds.

    For example, `Annotated[int, bounds.Ge(1)]` becomes `Annotated[int, Field(ge=1)]`.
    """
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        inner_annotation, *inner_bounds = arguments
        constraints: dict[str, Any] = {}
        for bound in inner_bounds:
            constraints |= _pydantic_constraint(bound)
        return Annotated[translate_bounds(inner_annotation), Field(**constraints)]

    translated_arguments = tuple(translate_bounds(argument) for argument in arguments)
    if origin in (Union, UnionType):
        return reduce(or_, translated_arguments)
    if isinstance(origin, type):
        return origin[translated_arguments]  # type: ignore[index]
    return annotation


def _pydantic_constraint(bound: Any) -> dict[str, Any]:
    """Return a bound as keyword arguments of pydantic's `Field`."""
    match bound:
        case bounds.Gt(value):
            return {"gt": value}
        case bounds.Ge(value):
            return {"ge": value}
        case bounds.Lt(value):
            return {"lt": value}
        case bounds.Le(value):
            return {"le": value}
        case bounds.Length(min_length, max_length):
            return {"min_length": min_length, "max_length": max_length}
    raise TypeError(f"{bound!r}: annotate the arguments of a part only with the bounds of reefknot.nn.bounds")


if TYPE_CHECKING:
    from reefknot.nn.bounds import Count as Count
    from reefknot.nn.bounds import Dim as Dim
    from reefknot.nn.bounds import NonNegative as NonNegative
    from reefknot.nn.bounds import Positive as Positive
    from reefknot.nn.bounds import Probability as Probability
else:
    Count = translate_bounds(bounds.Count)
    Dim = translate_bounds(bounds.Dim)
    NonNegative = translate_bounds(bounds.NonNegative)
    Positive = translate_bounds(bounds.Positive)
    Probability = translate_bounds(bounds.Probability)

T = TypeVar("T", bound=Settings)


def check_settings(settings_class: type[T], raw: Any, source: str) -> T:
    """Return `raw` as settings, or raise one error that lists all mistakes in it.

    Args:
        settings_class: The class of the settings.
        raw: Settings as they were read from a file, usually a dictionary.
        source: Where `raw` comes from, such as a recipe and its row. Error messages begin with it.
    """
    with reject_deep_nesting(source):
        settings_or_mistakes = validate(settings_class, raw, source)
    if isinstance(settings_or_mistakes, list):
        raise build_settings_error(settings_or_mistakes)
    return settings_or_mistakes


def validate(settings_class: type[T], raw: Any, source: str) -> T | list[Mistake]:
    """Return `raw` as settings, or a list of the mistakes in it, for a caller that checks more before raising an error.

    The arguments are those of `check_settings`.
    """
    try:
        return settings_class.model_validate(raw)
    except ValidationError as error:
        return [Mistake(source, settings_class, raw, dict(details)) for details in error.errors(include_url=False)]


@contextmanager
def reject_deep_nesting(source: str) -> Iterator[None]:
    """Raise a `SettingsError` if settings are nested more deeply than Python's stack allows."""
    try:
        yield
    except RecursionError:
        raise SettingsError(f"{source}: nested too deeply") from None


@dataclass(frozen=True)
class Mistake:
    """An error that pydantic found in settings."""

    source: str
    """The recipe or file that has the settings."""
    settings_class: type[Settings]
    """The class that the settings were checked against."""
    raw: Any
    """The settings that were checked."""
    details: dict[str, Any]
    """The error as pydantic reports it: `loc` (the keys that lead to the setting), `type`, `msg` and `input`."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """A tuple that is equal for two mistakes with the same message."""
        dotted_location = _join_keys(self.details["loc"])
        return dotted_location, self.details["type"], self.details["msg"], self.formatted_value

    @property
    def formatted_value(self) -> str:
        """The wrong value in parentheses, such as " (it is 0)"; empty if it is a table or a list."""
        value = self.details["input"]
        if isinstance(value, Mapping | list):
            return ""
        return f" (it is {_format_value(value)})"

    @property
    def key(self) -> str:
        """The dotted key of the setting, such as `training.epochs`."""
        location = self.details["loc"]
        if self._is_wrong_name:
            location = location[:-1]
        return _join_keys(location)

    @property
    def _is_wrong_name(self) -> bool:
        """Whether a dictionary has a name that is not allowed. Pydantic reports it as a wrong value of "[key]"."""
        return bool(self.details["type"] == "literal_error" and self.details["loc"][-1] == "[key]")

    @property
    def _kind_of_table(self) -> str:
        """The `kind` of the table that has the setting; empty if the table is not a part."""
        table = self.raw
        for name in self.details["loc"][:-1]:
            table = table.get(name) if isinstance(table, Mapping) else None
        return str(table.get("kind", "")) if isinstance(table, Mapping) else ""

    def message(self, name: str | None = None) -> str:
        """Return the name of the setting, what is wrong with it, and a hint if there is one.

        Args:
            name: How the message calls the setting. The default is its key, as a recipe writes it.
        """
        name = name or self.key
        error_type = self.details["type"]
        if error_type == "extra_forbidden" or self._is_wrong_name:
            message = shorten(f"{name}: no such setting")
            hint = _hint_for_unknown_key(self.key, self._kind_of_table, self.settings_class)
            return f"{message}; {hint}" if hint else message
        if error_type == "missing":
            return shorten(f"{name}: must be set")

        problem = self.details["msg"].removeprefix("Value error, ")
        if error_type == WRONG_KIND:
            return shorten(f"{name}.kind: {problem}", 200)
        if error_type == KIND_WITHOUT_TABLE:
            return f"{name}: must be a table with a kind{self.formatted_value}; did you mean {name}.kind={problem}?"

        # Pydantic writes "Input should be". An input is an end of the model here, so the message says "must be".
        problem = re.sub(r"^(?:Input|Value|List|String|Dictionary) should ", "must ", problem)
        problem = problem.replace(" after validation", "")
        problem = f"{problem[:1].lower()}{problem[1:]}"
        if name:
            problem = f"{name}: {problem}"
        return shorten(problem, 160) + self.formatted_value


def build_settings_error(mistakes: list[Mistake]) -> SettingsError:
    """Return an error of at most `MAX_ERROR_LINES` lines that lists all mistakes.

    A mistake in the base of a recipe occurs in every row, but is listed once.
    """
    distinct_mistakes: dict[tuple[Any, ...], Mistake] = {}
    for mistake in mistakes:
        distinct_mistakes.setdefault(mistake.identity, mistake)

    lines: list[str] = []
    last_source = None
    for index, mistake in enumerate(distinct_mistakes.values()):
        num_remaining = len(distinct_mistakes) - index
        heading = []
        if mistake.source != last_source:
            heading = [f"{mistake.source}:"]
        # Unless this is the last mistake, keep one line free for "and N more".
        max_lines = MAX_ERROR_LINES - 1 if num_remaining > 1 else MAX_ERROR_LINES
        if len(lines) + len(heading) + 1 > max_lines:
            lines.append(f"  and {num_remaining} more")
            break
        # There may be thousands of mistakes. Messages take time, so only those that are shown are made.
        lines += [*heading, f"  {mistake.message()}"]
        last_source = mistake.source
    return SettingsError("\n".join(lines))


def _format_value(value: Any) -> str:
    """Return a value as a recipe writes it. Huge integers are hexadecimal, because Python limits decimal conversion."""
    if isinstance(value, int) and value.bit_length() > 64:
        return shorten(hex(value), 60)
    return shorten(repr(value), 60)


def _join_keys(location: tuple[str | int, ...]) -> str:
    """Return a location as a dotted key: ("training", "epochs") as `training.epochs`."""
    return ".".join(str(name) for name in location)


def _hint_for_unknown_key(key: str, kind: str, settings_class: type[Settings]) -> str | None:
    """Return a hint for a dotted key that does not exist, or None.

    The hint names the kinds of part that have this setting, or else the setting that was probably meant, or else all
    settings of the section:

        encoder.heads     kinds that have it: transformer, encoder_decoder
        training.lr       did you mean training.optimiser.learning_rate?    (name in other programs)
        encoder.epochs    did you mean training.epochs?                     (same name in another section)
        training.epoch    did you mean training.epochs?                     (similar name in the same section)
        output.epoch      did you mean training.epochs?                     (similar name in another section)
        encoder.zzz       the settings of encoder are: kind, hidden_dim, layers, dropout
        device            it is an option of the command: --device

    Args:
        key: The key that does not exist.
        kind: The kind of the part that the key is in; empty if it is in a section that is not a part.
        settings_class: The class of all settings.
    """
    if len(key) > MAX_KEY_LENGTH:
        return None
    keys_and_kinds = list(_list_keys(_json_schema(settings_class), key.split(".")))

    # Other kinds of the same part may have this setting.
    kinds_with_key = dict.fromkeys(kind for known_key, kind in keys_and_kinds if known_key == key and kind)
    if kinds_with_key:
        return f"kinds that have it: {', '.join(kinds_with_key)}"

    # Otherwise the name is wrong, or it is in the wrong section.
    section, _, name = key.rpartition(".")
    if name == "device":
        return "it is an option of the command: --device"
    section_prefix = key.removesuffix(name)
    known_keys = [known_key for known_key, _ in keys_and_kinds if known_key != key]
    siblings = [known_key for known_key in known_keys if known_key.rpartition(".")[0] == section]
    in_section = [known_key for known_key in known_keys if known_key.startswith(section_prefix)]
    suggestion = _translate_foreign_name(name, siblings, in_section)
    if suggestion is None:
        suggestion = _find_similar_key(name, known_keys, min_similarity=1.0)
    if suggestion is None:
        suggestion = _find_similar_key(name, siblings, min_similarity=0.6)
    if suggestion is None:
        suggestion = _find_similar_key(name, known_keys, min_similarity=0.7)
    if suggestion is not None:
        return f"did you mean {suggestion}?"

    names = dict.fromkeys(
        known_key.removeprefix(section_prefix)
        for known_key, known_kind in keys_and_kinds
        if known_key.rpartition(".")[0] == section and known_kind in ("", kind)
    )
    owner = f"the settings of {section}" if section else "the settings"
    return f"{owner} are: {', '.join(names)}" if names else None


def _find_similar_key(name: str, keys: list[str], min_similarity: float) -> str | None:
    """Return the dotted key whose last name is most similar to `name`, or None if no key is similar enough.

    Args:
        name: The unknown name.
        keys: The dotted keys to search.
        min_similarity: From 0 to 1; 1 means that the names are equal.
    """
    # If two keys end with the same name, the first one is suggested.
    key_by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    similar_names = get_close_matches(name, key_by_name, n=1, cutoff=min_similarity)
    if not similar_names:
        return None
    return key_by_name[similar_names[0]]


def _translate_foreign_name(name: str, siblings: list[str], in_section: list[str]) -> str | None:
    """Return the key of the setting that other programs call `name`, or None unless exactly one key matches.

    Keys in the same section come first, then keys of its subsections.
    """
    our_names = {
        our_name for our_name, foreign_names in NAMES_IN_OTHER_PROGRAMS.items() if name.lower() in foreign_names
    }
    for keys in (siblings, in_section):
        matching_keys = {key for key in keys if key.rpartition(".")[2] in our_names}
        if len(matching_keys) == 1:
            return matching_keys.pop()
    return None


@cache
def _json_schema(settings_class: type[Settings]) -> dict[str, Any]:
    return settings_class.model_json_schema()


def _list_keys(schema: dict[str, Any], wrong_key: list[str]) -> Iterable[tuple[str, str]]:
    """Yield all dotted keys of a JSON schema, each with the `kind` of part that has it, or "" if it has no kind.

    Where any name or number is allowed, as in [tables], the name or number in `wrong_key` is used. So the keys of
    `tables.words` are listed if `wrong_key` is `["tables", "words", "dimm"]`.
    """

    def walk(node: dict[str, Any], prefix: str) -> Iterable[tuple[str, str]]:
        """Yield the keys of one node of the schema. `prefix` is the dotted key of the node with a dot at its end."""
        if "$ref" in node:
            definition_name = node["$ref"].rpartition("/")[2]
            node = schema["$defs"][definition_name]
        alternatives = node.get("oneOf", []) + node.get("anyOf", []) + node.get("allOf", [])
        for alternative in alternatives:
            yield from walk(alternative, prefix)

        # Entries with fixed names.
        properties = node.get("properties", {})
        kind = properties.get("kind", {}).get("const", "")
        for name, child in properties.items():
            yield f"{prefix}{name}", kind
            yield from walk(child, f"{prefix}{name}.")
        for name in node.get("propertyNames", {}).get("enum", []):
            yield f"{prefix}{name}", kind

        # Entries with any name or number.
        depth = prefix.count(".")
        prefix_of_wrong_key = "".join(f"{name}." for name in wrong_key[:depth])
        leads_to_wrong_key = depth < len(wrong_key) and prefix == prefix_of_wrong_key
        for any_entry in (node.get("additionalProperties"), node.get("items")):
            if isinstance(any_entry, dict) and leads_to_wrong_key:
                yield from walk(any_entry, f"{prefix}{wrong_key[depth]}.")

    return walk(schema, "")


def _check_one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line of printable characters")
    return text


OneLine = Annotated[str, AfterValidator(_check_one_line)]
"""A string of one line, such as a title or a name."""
