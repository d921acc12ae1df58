"""Strict settings: the base class of everything a recipe can say, the number types, and mistakes put into words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from reefknot.errors import SettingsError, shortened

LINES_SHOWN = 10
WRONG_KIND = "wrong_kind"
"""The type of pydantic's error where the `kind` of a part is missing or unknown."""


class Settings(BaseModel):
    """Unknown keys, wrong types, NaN and infinities are errors; values never change once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


# The upper bounds are far above anything that trains; they turn a slip of the keyboard into a sentence.
Count = Annotated[int, Field(ge=1, le=10**9)]
Dim = Annotated[int, Field(ge=1, le=65_536)]
Layers = Annotated[int, Field(ge=1, le=256)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, le=1e9)]
NonNegative = Annotated[float, Field(ge=0.0, le=1e9)]

T = TypeVar("T", bound=Settings)


def check_rates(who: str, **rates: float) -> None:
    """Refuse an impossible drop rate: a recipe is checked against the annotations, a call from Python is not."""
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise SettingsError(f"{who}: {name} = {rate}: must be at least 0 and less than 1")


@dataclass(frozen=True)
class Mistake:
    """One of pydantic's errors and where it was found."""

    where: str
    kind: type[Settings]
    raw: Any
    problem: dict[str, Any]

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for what would be told in the same words."""
        return _dotted(self.raw, self.problem["loc"]), self.problem["type"], self.problem["msg"], self.given

    @property
    def given(self) -> str:
        """The wrong value, where it is short enough to be shown."""
        value = self.problem["input"]
        return "" if isinstance(value, Mapping | list) else f" (it is {_written(value)})"

    def sentence(self) -> str:
        """The setting as a person would write it, what is wrong, what may help."""
        location, kind = self.problem["loc"], self.problem["type"]
        wrong_name = kind == "literal_error" and location[-1] == "[key]"
        key = _dotted(self.raw, location[:-1] if wrong_name else location)
        if kind == "extra_forbidden" or wrong_name:
            hint = _hint(key, self.kind)
            return shortened(f"{key}: no such setting") + (f"; {hint}" if hint else "")
        if kind == "missing":
            return shortened(f"{key}: must be set")
        message = self.problem["msg"].removeprefix("Value error, ")
        if kind == WRONG_KIND:
            return shortened(f"{key}.kind: {message}", 200)
        # "Input should be" is pydantic's word for the value; here an input is an end of the model.
        message = re.sub(r"^(?:Input|Value|List|String|Dictionary) should ", "must ", message)
        message = message.replace(" after validation", "")
        message = f"{message[:1].lower()}{message[1:]}"
        return shortened(f"{key}: {message}" if key else message, 160) + self.given


def check(kind: type[T], raw: Any, where: str) -> T:
    """The settings, or one error that lists everything wrong with them."""
    with not_too_deep(where):
        found = validate(kind, raw, where)
    if isinstance(found, list):
        raise complaint(found)
    return found


def validate(kind: type[T], raw: Any, where: str) -> T | list[Mistake]:
    """The settings, or what is wrong with them, for whoever has more to check before complaining."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        return [Mistake(where, kind, raw, dict(problem)) for problem in error.errors(include_url=False)]


@contextmanager
def not_too_deep(where: str) -> Iterator[None]:
    """A file can be nested deeper than Python can follow."""
    try:
        yield
    except RecursionError:
        raise SettingsError(f"{where}: nested too deeply") from None


def complaint(mistakes: list[Mistake]) -> SettingsError:
    """At most ten lines, each mistake once: what is wrong in a recipe's base is wrong in every row."""
    distinct: dict[tuple[Any, ...], Mistake] = {}
    for mistake in mistakes:
        distinct.setdefault(mistake.identity, mistake)
    lines: list[str] = []
    where = None
    for told, mistake in enumerate(distinct.values()):
        left = len(distinct) - told
        heading = [] if mistake.where == where else [f"{mistake.where}:"]
        # There may be thousands, so only those that are shown are put into words.
        if len(lines) + len(heading) + 1 > LINES_SHOWN - (left > 1):
            lines.append(f"  and {left} more")
            break
        lines += [*heading, f"  {mistake.sentence()}"]
        where = mistake.where
    return SettingsError("\n".join(lines))


def _written(value: Any) -> str:
    """A value as a recipe has it; Python does not write out the digits of a number with thousands of them."""
    huge = isinstance(value, int) and value.bit_length() > 64
    return shortened(hex(value) if huge else repr(value), 60)


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


def _hint(key: str, kind: type[Settings]) -> str | None:
    """What helps somebody who sets what is not there: the kinds of part that have it, or the setting that was meant:
    the same name elsewhere, or the closest spelling, in its place before elsewhere."""
    if len(key) > 200:
        return None
    parent, _, last = key.rpartition(".")
    found = list(_keys(_schema(kind), key.split(".")))
    if kinds := dict.fromkeys(part for path, part in found if path == key and part):
        return f"kinds that have it: {', '.join(kinds)}"
    known = [path for path, _ in found if path != key]
    beside = [path for path in known if path.rpartition(".")[0] == parent]
    for paths, likeness in ((known, 1.0), (beside, 0.6), (known, 0.7)):
        names = {path.rpartition(".")[2]: path for path in reversed(paths)}
        for near in get_close_matches(last, names, n=1, cutoff=likeness):
            return f"did you mean {names[near]}?"
    return None


@cache
def _schema(kind: type[Settings]) -> dict[str, Any]:
    return kind.model_json_schema()


def _keys(schema: dict[str, Any], key: list[str]) -> Iterable[tuple[str, str]]:
    """All dotted settings of a schema, each with the `kind` of part that has it, if that is one of several; where names
    or numbers are free, as in [tables], those of `key`."""

    def walk(node: dict[str, Any], prefix: str) -> Iterable[tuple[str, str]]:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
        for branch in node.get("oneOf", []) + node.get("anyOf", []) + node.get("allOf", []):
            yield from walk(branch, prefix)
        kind = node.get("properties", {}).get("kind", {}).get("const", "")
        for name, child in node.get("properties", {}).items():
            yield f"{prefix}{name}", kind
            yield from walk(child, f"{prefix}{name}.")
        for name in node.get("propertyNames", {}).get("enum", []):
            yield f"{prefix}{name}", kind
        depth = prefix.count(".")
        for free in (node.get("additionalProperties"), node.get("items")):
            if isinstance(free, dict) and depth < len(key) and prefix == "".join(f"{name}." for name in key[:depth]):
                yield from walk(free, f"{prefix}{key[depth]}.")

    return walk(schema, "")


def _one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be one line of printable characters")
    return text


OneLine = Annotated[str, AfterValidator(_one_line)]
