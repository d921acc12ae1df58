"""Strict settings: the base class of all sections of a recipe, the number types, and error messages."""

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

LINES_SHOWN = 10
"""Maximum number of lines of an error message."""
WRONG_KIND = "wrong_kind"
"""The type of pydantic's error if the `kind` of a part is missing or unknown."""
OTHER_NAMES = {
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
    "hidden_dim": ("hidden", "hidden_size", "nhid"),
    "heads": ("num_heads", "n_heads", "nhead", "nheads"),
    "dim": ("emb", "emb_dim", "emb_size", "emsize", "embedding_dim", "embedding_size"),
}
"""Names of our settings in other programs. They differ too much from ours to be recognised as misspellings."""


class Settings(BaseModel):
    """Base class of settings. Unknown keys, wrong types, NaN and infinities are errors. Settings are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **arguments: Any) -> None:
        """Reject a number type of `reefknot.nn.bounds`, because pydantic would ignore its bounds."""
        for name, field in cls.model_fields.items():
            if any(map(_has_bounds, [*field.metadata, field.annotation])):
                raise TypeError(f"{cls.__name__}.{name}: use the number types of reefknot.lab.config.settings")


def _has_bounds(annotation: Any) -> bool:
    return isinstance(annotation, bounds.BOUNDS) or any(map(_has_bounds, get_args(annotation)))


def with_bounds(annotation: Any) -> Any:
    """Return an annotation with the bounds of `reefknot.nn.bounds` translated to those of pydantic."""
    arguments = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        limits: dict[str, Any] = {}
        for limit in arguments[1:]:
            limits |= _pydantic_limits(limit)
        return Annotated[with_bounds(arguments[0]), Field(**limits)]
    if origin in (Union, UnionType):
        return reduce(or_, map(with_bounds, arguments))
    if isinstance(origin, type):
        return origin[tuple(map(with_bounds, arguments))]  # type: ignore[index]
    return annotation


def _pydantic_limits(limit: Any) -> dict[str, Any]:
    match limit:
        case bounds.Gt(value):
            return {"gt": value}
        case bounds.Ge(value):
            return {"ge": value}
        case bounds.Lt(value):
            return {"lt": value}
        case bounds.Le(value):
            return {"le": value}
        case bounds.Length(least, most):
            return {"min_length": least, "max_length": most}
    raise TypeError(f"{limit!r}: annotate the arguments of a part only with the bounds of reefknot.nn.bounds")


if TYPE_CHECKING:
    from reefknot.nn.bounds import Count as Count
    from reefknot.nn.bounds import Dim as Dim
    from reefknot.nn.bounds import NonNegative as NonNegative
    from reefknot.nn.bounds import Positive as Positive
    from reefknot.nn.bounds import Probability as Probability
else:
    Count = with_bounds(bounds.Count)
    Dim = with_bounds(bounds.Dim)
    NonNegative = with_bounds(bounds.NonNegative)
    Positive = with_bounds(bounds.Positive)
    Probability = with_bounds(bounds.Probability)

T = TypeVar("T", bound=Settings)


@dataclass(frozen=True)
class Mistake:
    """An error that pydantic found in settings."""

    where: str
    """The recipe or file that has the settings."""
    kind: type[Settings]
    """The class that the settings were checked against."""
    problem: dict[str, Any]
    """The error as pydantic reports it."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """A key that is equal for two mistakes with the same message."""
        return _dotted(self.problem["loc"]), self.problem["type"], self.problem["msg"], self.shown_value

    @property
    def shown_value(self) -> str:
        """The wrong value in parentheses; empty if it is a table or a list."""
        value = self.problem["input"]
        return "" if isinstance(value, Mapping | list) else f" (it is {_written(value)})"

    def message(self) -> str:
        """Return the setting as a recipe writes it, what is wrong with it, and a hint if there is one."""
        location, kind = self.problem["loc"], self.problem["type"]
        wrong_name = kind == "literal_error" and location[-1] == "[key]"
        key = _dotted(location[:-1] if wrong_name else location)
        if kind == "extra_forbidden" or wrong_name:
            hint = _hint(key, self.kind)
            return shorten(f"{key}: no such setting") + (f"; {hint}" if hint else "")
        if kind == "missing":
            return shorten(f"{key}: must be set")
        message = self.problem["msg"].removeprefix("Value error, ")
        if kind == WRONG_KIND:
            return shorten(f"{key}.kind: {message}", 200)
        # Pydantic writes "Input should be". An input is an end of the model here, so the message says "must be".
        message = re.sub(r"^(?:Input|Value|List|String|Dictionary) should ", "must ", message)
        message = message.replace(" after validation", "")
        message = f"{message[:1].lower()}{message[1:]}"
        return shorten(f"{key}: {message}" if key else message, 160) + self.shown_value


def check(kind: type[T], raw: Any, where: str) -> T:
    """Return the settings, or raise one error that lists all mistakes in them."""
    with not_too_deep(where):
        settings = validate(kind, raw, where)
    if isinstance(settings, list):
        raise complaint(settings)
    return settings


def validate(kind: type[T], raw: Any, where: str) -> T | list[Mistake]:
    """Return the settings, or the mistakes in them for a caller that checks more before it raises an error."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        return [Mistake(where, kind, dict(problem)) for problem in error.errors(include_url=False)]


@contextmanager
def not_too_deep(where: str) -> Iterator[None]:
    """Raise a `SettingsError` if a file is nested more deeply than Python's stack allows."""
    try:
        yield
    except RecursionError:
        raise SettingsError(f"{where}: nested too deeply") from None


def complaint(mistakes: list[Mistake]) -> SettingsError:
    """Return an error of at most `LINES_SHOWN` lines that lists all mistakes.

    A mistake in the base of a recipe occurs in every row, but is listed once.
    """
    distinct: dict[tuple[Any, ...], Mistake] = {}
    for mistake in mistakes:
        distinct.setdefault(mistake.identity, mistake)
    lines: list[str] = []
    where = None
    for listed, mistake in enumerate(distinct.values()):
        left = len(distinct) - listed
        heading = [] if mistake.where == where else [f"{mistake.where}:"]
        # There may be thousands of mistakes, so messages are made only for those that are shown.
        if len(lines) + len(heading) + 1 > LINES_SHOWN - (left > 1):
            lines.append(f"  and {left} more")
            break
        lines += [*heading, f"  {mistake.message()}"]
        where = mistake.where
    return SettingsError("\n".join(lines))


def _written(value: Any) -> str:
    """Return a value as a recipe writes it. Huge integers are hexadecimal, because Python limits decimal conversion."""
    huge = isinstance(value, int) and value.bit_length() > 64
    return shorten(hex(value) if huge else repr(value), 60)


def _dotted(location: tuple[str | int, ...]) -> str:
    return ".".join(map(str, location))


def _hint(key: str, kind: type[Settings]) -> str | None:
    """Return a hint for a key that does not exist.

    The hint names the kinds of part that have this setting, or else the setting that was probably meant. Candidates
    are, in this order: the setting that has this name in other programs, a setting with the same name in another
    section, a similar name in the same section, and a similar name in another section.
    """
    if len(key) > 200:
        return None
    parent, _, last = key.rpartition(".")
    keys = list(_keys(_schema(kind), key.split(".")))
    if kinds := dict.fromkeys(part for path, part in keys if path == key and part):
        return f"kinds that have it: {', '.join(kinds)}"
    known = [path for path, _ in keys if path != key]
    siblings = [path for path in known if path.rpartition(".")[0] == parent]
    if meant := _by_other_name(
        last, siblings, [path for path in known if path.startswith(key[: len(key) - len(last)])]
    ):
        return f"did you mean {meant}?"
    for paths, cutoff in ((known, 1.0), (siblings, 0.6), (known, 0.7)):
        names = {path.rpartition(".")[2]: path for path in reversed(paths)}
        for near in get_close_matches(last, names, n=1, cutoff=cutoff):
            return f"did you mean {names[near]}?"
    return None


def _by_other_name(name: str, siblings: list[str], section: list[str]) -> str | None:
    """Return the setting that other programs call `name`, if exactly one in the section or below it matches."""
    ours = {setting for setting, others in OTHER_NAMES.items() if name.lower() in others}
    for paths in (siblings, section):
        meant = list(dict.fromkeys(path for path in paths if path.rpartition(".")[2] in ours))
        if len(meant) == 1:
            return meant[0]
    return None


@cache
def _schema(kind: type[Settings]) -> dict[str, Any]:
    return kind.model_json_schema()


def _keys(schema: dict[str, Any], key: list[str]) -> Iterable[tuple[str, str]]:
    """Return all dotted settings of a schema, and for each the `kind` of part that has it, or "" if it has no kind.

    Where any name or number is allowed, as in [tables], the name or number in `key` is used.
    """

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
