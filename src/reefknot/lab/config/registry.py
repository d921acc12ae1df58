"""Registries of parts: the name of each part, the location of its class, and its settings.

A part is one class in one file and one line in the registry of its family (see `parts.py`):

    CLASSIFIERS = Registry("classifiers", {"plain": "reefknot.nn.classifiers.plain:Plain"})

The settings of a part in a recipe are the arguments of its constructor. Types, bounds and defaults come from the
signature, and descriptions from the `Args:` section of the Google-style docstring. So the Python call and the recipe
cannot disagree. The name and the annotation of an argument decide what it is:

* If its name is in `DERIVED`, its value follows from the rest of the model, such as a dimension. It is not a setting.
* If its class is in `nested`, such as `Classifier`, it is another part. The recipe has a table with its own `kind`.
* If its class is in `shared`, such as `WordTable`, it is an object that several parts can share. The recipe names it.
* Every other argument is a plain setting.

If an annotation contains both a nested and a shared class, the argument is a nested part.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_type_hints

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, create_model
from pydantic_core import PydanticCustomError, core_schema

from reefknot.errors import SettingsError
from reefknot.lab.config.settings import WRONG_KIND, Settings, with_bounds

PACKAGE = Path(__file__).resolve().parents[2]
DERIVED = frozenset({"vocab_size", "source_dim", "input_dim", "context_dim", "spellings", "parameters"})
"""Arguments whose values follow from the rest of the model."""


@dataclass(frozen=True)
class Argument:
    """One argument of a part's constructor."""

    name: str
    annotation: Any
    default: Any
    """The default value, or `...` if there is none."""
    description: str
    role: Literal["derived", "shared", "part", "setting"] = "setting"
    group: str = ""
    """For a shared object, the section of the recipe that has its name."""
    family: Registry | None = None
    """For a nested part, its registry."""


class Registry:
    """A family of parts.

    A part is imported when it is first used. So a missing optional dependency affects only the parts that need it.

    Args:
        family: Name of the family, in the plural.
        parts: For each kind of part, the location of its class as `module:Class`.
        nested: For the base class of a family, as `module:Class`, the registry of that family.
        shared: For the class of a shared object, as `module:Class`, the section of the recipe that has its name.
        scopes: Functions, as `module:function`, for kinds whose nested parts are built with other values than the part
            itself. A function gets the settings of the part and the available values (see `build`). It returns the
            available values of the nested part, or a list of them if there are several nested parts.
        added: `Settings` classes, as `module:Class`, for kinds that have settings in addition to the arguments of the
            constructor. The fields are added before the argument that the class attribute `before` names.
    """

    def __init__(
        self,
        family: str,
        parts: Mapping[str, str],
        *,
        nested: Mapping[str, Registry] | None = None,
        shared: Mapping[str, str] | None = None,
        scopes: Mapping[str, str] | None = None,
        added: Mapping[str, str] | None = None,
    ) -> None:
        self.family = family
        self._parts = dict(parts)
        self._nested = dict(nested or {})
        self._shared = dict(shared or {})
        self._scopes = dict(scopes or {})
        self._added = dict(added or {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def location(self, kind: str) -> str:
        """Return the location of a part's class, as `module:Class`."""
        if kind not in self._parts:
            raise SettingsError(self._unknown_kind(kind))
        return self._parts[kind]

    def _unknown_kind(self, kind: str) -> str:
        near = get_close_matches(kind[:60], self._parts, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(self._parts)}"
        return f"no {self.family.removesuffix('s')} is called {kind[:60]!r}; {hint}"

    def load(self, kind: str) -> Any:
        """Import a part and return its class."""
        return _load(self.location(kind))

    def summary(self, kind: str) -> str:
        """Return the first line of a part's docstring, read from its source so that the part is not imported."""
        module, _, name = self.location(kind).partition(":")
        path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return (ast.get_docstring(node) or "").partition("\n")[0]
        return ""

    def arguments(self, kind: str) -> tuple[Argument, ...]:
        """Return the arguments of a part's constructor."""
        return _arguments(self, kind)

    def settings(self) -> Any:
        """Return the type of a recipe's entry for this family: the settings of the part that its `kind` names."""
        return Annotated[Settings, _Entry(self)]

    def settings_of(self, kind: str) -> type[Settings]:
        """Return the settings class of one part."""
        return _settings(self, kind)

    def check_kind(self, raw: Any) -> Any:
        """Reject an entry of unknown kind. Its other settings cannot be checked, because they depend on the kind."""
        if isinstance(raw, Settings):
            return raw
        known = f"there are: {', '.join(self._parts)}"
        if not isinstance(raw, Mapping):
            raise ValueError(f"must be a table with a kind; {known}")
        kind = raw.get("kind")
        if kind is None:
            error = f"must be set; {known}"
        elif not isinstance(kind, str):
            error = f"must be a name; {known}"
        elif kind not in self._parts:
            error = self._unknown_kind(kind)
        else:
            return raw
        raise PydanticCustomError(WRONG_KIND, "{error}", {"error": error})

    def names(self, kind: str) -> frozenset[str]:
        """Return the names of a part's settings."""
        return frozenset(_settings(self, kind).model_fields)

    def build(self, settings: Settings, available: Mapping[str, Any]) -> Any:
        """Build the part that `settings` describe.

        Args:
            settings: The settings of the part, with its `kind`.
            available: The values of the arguments in `DERIVED`, by name, and the shared objects, by section and name.
        """
        kind = _kind(settings)
        scope = _load(self._scopes[kind])(settings, available) if kind in self._scopes else available
        values: dict[str, Any] = {}
        for argument in self.arguments(kind):
            if argument.role == "derived":
                values[argument.name] = available[argument.name]
                continue
            value = getattr(settings, argument.name)
            if argument.role == "shared" and value is not None:
                value = available[argument.group][value]
            elif argument.family is not None and value is not None:
                build = argument.family.build
                value = [build(value, inner) for inner in scope] if isinstance(scope, list) else build(value, scope)
            values[argument.name] = value
        return self.load(kind)(**values)

    def takes(self, settings: Settings, name: str) -> bool:
        """Return whether the constructor of a part has this argument."""
        return any(argument.name == name for argument in self.arguments(_kind(settings)))

    def references(self, settings: Settings, group: str) -> Iterator[str]:
        """Yield the names of the shared objects of a group that a part and its nested parts refer to."""
        for argument in self.arguments(_kind(settings)):
            value = getattr(settings, argument.name, None)
            if argument.role == "shared" and argument.group == group and value is not None:
                yield value
            elif argument.family is not None and value is not None:
                yield from argument.family.references(value, group)


def derive_settings(documented: type) -> type[Settings]:
    """Return a settings class with the arguments of a class, all of which must be plain settings."""
    fields: dict[str, Any] = {argument.name: _field(argument) for argument in _signature(documented, {}, {})}
    return create_model(documented.__name__, __base__=Settings, **fields)


def _load(location: str) -> Any:
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)


def _kind(settings: Settings) -> str:
    kind: str = settings.kind  # type: ignore[attr-defined]
    return kind


def _class_names(annotation: Any) -> Iterator[str]:
    """Yield the classes in an annotation and their base classes, as `module:Class`."""
    if isinstance(annotation, type):
        for base in annotation.__mro__:
            yield f"{base.__module__}:{base.__qualname__}"
    for inner in get_args(annotation):
        yield from _class_names(inner)


@cache
def _arguments(registry: Registry, kind: str) -> tuple[Argument, ...]:
    return _signature(registry.load(kind), registry._nested, registry._shared)


def _signature(part: Any, nested: Mapping[str, Registry], shared: Mapping[str, str]) -> tuple[Argument, ...]:
    hints = get_type_hints(part.__init__ if inspect.isclass(part) else part, include_extras=True)
    descriptions = argument_descriptions(part)
    arguments = []
    for name, parameter in inspect.signature(part).parameters.items():
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        argument = Argument(name, hints[name], default, descriptions.get(name, ""))
        arguments.append(_with_role(argument, nested, shared))
    return tuple(arguments)


def _with_role(argument: Argument, nested: Mapping[str, Registry], shared: Mapping[str, str]) -> Argument:
    """Return an argument with the role that its name and annotation give it."""
    if argument.name in DERIVED:
        return replace(argument, role="derived")
    classes = set(_class_names(argument.annotation))
    for location, family in nested.items():
        if location in classes:
            return replace(argument, role="part", family=family)
    for location, group in shared.items():
        if location in classes:
            return replace(argument, role="shared", group=group)
    return argument


def _field(argument: Argument) -> tuple[Any, Any]:
    """Return the type and the default of an argument's setting, as pydantic reads them."""
    description = argument.description
    annotation = with_bounds(argument.annotation)
    if argument.role == "shared":
        annotation = str if argument.default is ... else str | None
        description = f"{description} The name of an entry in [{argument.group}]."
    elif argument.family is not None:
        annotation = argument.family.settings()
    return Annotated[annotation, Field(description=description or None)], argument.default


@cache
def _settings(registry: Registry, kind: str) -> type[Settings]:
    fields: dict[str, Any] = {"kind": (Literal[kind], ...)}
    added = _load(registry._added[kind]) if kind in registry._added else None
    for argument in registry.arguments(kind):
        if added is not None and argument.name == added.before:
            fields |= {name: (field.annotation, field) for name, field in added.model_fields.items()}
        if argument.role != "derived":
            fields[argument.name] = _field(argument)
    return create_model(registry.load(kind).__name__ + "Settings", __base__=Settings, **fields)


class _Entry:
    """The pydantic type of a recipe's entry for a family. Only the part that an entry names is imported."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True)
        return core_schema.no_info_plain_validator_function(self._validate, serialization=dump)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema of all parts. Only hints for misspelled settings need it."""
        registry = self._registry
        members: Any = Union[tuple(_settings(registry, kind) for kind in registry)]  # noqa: UP007 - known at run time
        return handler(TypeAdapter(members).core_schema)

    def _validate(self, raw: Any) -> Settings:
        entry = self._registry.check_kind(raw)
        return entry if isinstance(entry, Settings) else _settings(self._registry, entry["kind"]).model_validate(entry)


def _dump(settings: Settings, info: core_schema.SerializationInfo) -> dict[str, Any]:
    return settings.model_dump(mode=info.mode)


_ARGUMENT = re.compile(r"(\w+): +(\S.*)")


def argument_descriptions(documented: Any) -> dict[str, str]:
    """Return the description of each argument that the docstring of a class or function lists.

    A docstring without an `Args:` section gives an empty dictionary. A line that is neither an argument nor its
    continuation raises a `ValueError`, so that a typo cannot lose a description.
    """
    descriptions: dict[str, str] = {}
    name = None
    for line in _args_section(inspect.cleandoc(documented.__doc__ or "")):
        text = line.strip()
        indent = len(line) - len(line.lstrip())
        if argument := _ARGUMENT.fullmatch(text) if indent == 4 else None:
            name, description = argument.groups()
            if name in descriptions:
                raise ValueError(f"{documented.__qualname__}: Args: lists {name} twice")
            descriptions[name] = description
        elif name is not None and indent > 4:
            descriptions[name] += f" {text}"
        elif text:
            raise ValueError(f"{documented.__qualname__}: Args: has the line {text!r}; expected `name: description`")
    return descriptions


def _args_section(docstring: str) -> list[str]:
    """Return the indented lines that follow `Args:`."""
    lines = docstring.splitlines()
    if "Args:" not in lines:
        return []
    section = []
    for line in lines[lines.index("Args:") + 1 :]:
        if line and not line.startswith(" "):
            break
        section.append(line)
    return section
