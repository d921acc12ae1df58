"""Registries of parts: a name, where its class lives, and settings read off its constructor.

A part is one class in one file and one line in its family's registry:

    CLASSIFIERS = Registry("classifiers", {"plain": "reefknot.nn.classifiers.plain:Plain"})    (see `parts.py`)

Its recipe settings are the arguments of its constructor, with their types, bounds, defaults and
descriptions, so that the Python call and the recipe can never disagree. Four kinds of argument:

* named in `GIVEN`: follows from the rest of the model (a width, the vocabulary) and is no setting;
* `Annotated[X, Shared("tables")]`: an object that ends share; the recipe gives its name;
* `Annotated[X, OTHER_REGISTRY]`: another part; the recipe gives a table with its own `kind`. A class whose `scope`
  says so gives its nested part another width, or holds one for each of several tables;
* anything else: a plain setting.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, Discriminator, Field, create_model
from pydantic_core import PydanticCustomError

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import WRONG_KIND, Settings

PACKAGE = Path(__file__).resolve().parents[2]
GIVEN = frozenset({"vocab_size", "source_dim", "input_dim", "context_dim", "spellings", "parameters"})


@dataclass(frozen=True)
class Shared:
    """Marks an argument that is an object several ends may hold, such as a table."""

    group: str


@dataclass(frozen=True)
class _Argument:
    name: str
    annotation: Any
    default: Any
    role: str  # given | shared | part | plain
    marker: Any = None


class Registry:
    """One family of parts, loaded only when asked for: a missing extra breaks its own part alone."""

    def __init__(self, family: str, parts: Mapping[str, str]) -> None:
        self.family = family
        self._parts = dict(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def home(self, kind: str) -> str:
        """Where the part lives, as `module:Class`."""
        if kind not in self._parts:
            raise SettingsError(self._unknown(kind))
        return self._parts[kind]

    def _unknown(self, kind: str) -> str:
        near = get_close_matches(kind[:60], self._parts, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(self._parts)}"
        return f"no {self.family.removesuffix('s')} is called {kind[:60]!r}; {hint}"

    def load(self, kind: str) -> Any:
        module, _, name = self.home(kind).partition(":")
        return getattr(importlib.import_module(module), name)

    def summary(self, kind: str) -> str:
        """The first line of the part's docstring, read from its source so that nothing heavy is imported."""
        module, _, name = self.home(kind).partition(":")
        path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return (ast.get_docstring(node) or "").partition("\n")[0]
        return ""

    def settings(self) -> Any:
        """The type of a recipe's entry for this family: one settings class per part, told apart by `kind`."""
        return _union(self)

    def check_kind(self, raw: Any) -> Any:
        """Refuse a recipe's entry of no known kind before any other setting is looked at: there is nothing to compare
        them with."""
        if isinstance(raw, Settings):
            return raw
        known = f"there are: {', '.join(self._parts)}"
        if not isinstance(raw, Mapping):
            raise ValueError(f"must be a table with a kind; {known}")
        kind = raw.get("kind")
        if kind is None:
            fault = f"must be set; {known}"
        elif not isinstance(kind, str):
            fault = f"must be a name; {known}"
        elif kind not in self._parts:
            fault = self._unknown(kind)
        else:
            return raw
        raise PydanticCustomError(WRONG_KIND, "{fault}", {"fault": fault})

    def names(self, kind: str) -> frozenset[str]:
        """The settings that a part of this kind has."""
        return frozenset(_settings(self, kind).model_fields)

    def build(self, settings: Settings, given: Mapping[str, Any]) -> Any:
        """Make the part that `settings` describes; `given` has the values of `GIVEN` and the shared objects."""
        kind: str = settings.kind  # type: ignore[attr-defined]
        part = self.load(kind)
        scope = part.scope(settings, given) if hasattr(part, "scope") else given
        values: dict[str, Any] = {}
        for argument in _arguments(self, kind):
            if argument.role == "given":
                values[argument.name] = given[argument.name]
                continue
            value = getattr(settings, argument.name)
            if argument.role == "shared" and value is not None:
                value = given[argument.marker.group][value]
            elif argument.role == "part" and value is not None:
                build = argument.marker.build
                value = [build(value, each) for each in scope] if isinstance(scope, list) else build(value, scope)
            values[argument.name] = value
        return part(**values)

    def asks_for(self, settings: Settings, name: str) -> bool:
        """Whether the part takes this one of the values of `GIVEN`."""
        return any(argument.name == name for argument in _arguments(self, settings.kind))  # type: ignore[attr-defined]

    def references(self, settings: Settings, group: str) -> Iterator[str]:
        """Names of the shared objects of a group that a part and the parts inside it refer to."""
        for argument in _arguments(self, settings.kind):  # type: ignore[attr-defined]
            value = getattr(settings, argument.name, None)
            if argument.role == "shared" and argument.marker.group == group and value is not None:
                yield value
            elif argument.role == "part" and value is not None:
                yield from argument.marker.references(value, group)


@cache
def _arguments(registry: Registry, kind: str) -> tuple[_Argument, ...]:
    part = registry.load(kind)
    function = part.__init__ if inspect.isclass(part) else part
    hints = get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in inspect.signature(part).parameters.items():
        annotation = hints[name]
        markers = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
        marker = next((m for m in markers if isinstance(m, Shared | Registry)), None)
        role = "plain"
        if name in GIVEN:
            role = "given"
        elif isinstance(marker, Shared):
            role = "shared"
        elif isinstance(marker, Registry):
            role = "part"
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        found.append(_Argument(name, annotation, default, role, marker))
    return tuple(found)


@cache
def _settings(registry: Registry, kind: str) -> type[Settings]:
    fields: dict[str, Any] = {"kind": (Literal[kind], ...)}
    for argument in _arguments(registry, kind):
        if argument.role == "given":
            continue
        annotation = argument.annotation
        if argument.role == "shared":
            text = f"name of an entry in [{argument.marker.group}]"
            annotation = Annotated[str if argument.default is ... else str | None, Field(description=text)]
        elif argument.role == "part":
            annotation = argument.marker.settings()
        fields[argument.name] = (annotation, argument.default)
    return create_model(registry.load(kind).__name__ + "Settings", __base__=Settings, **fields)


@cache
def _union(registry: Registry) -> Any:
    members = tuple(_settings(registry, kind) for kind in registry)
    known = BeforeValidator(registry.check_kind)
    if len(members) == 1:
        return Annotated[members[0], known]
    return Annotated[Union[members], Discriminator("kind"), known]  # noqa: UP007 - members are not known statically
