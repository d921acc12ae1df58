"""A registry finds the class of a part by its `kind` in a recipe, derives its settings, and builds it.

A part is anything that a recipe names by a `kind`: an encoder, a classifier, an optimiser. Parts that can replace each
other, such as all encoders, are a family. A family has one `Registry`, which maps each kind to the location of a class
(`parts.py` lists all registries):

    ENCODERS = Registry("encoders", {"gru": "reefknot.nn.encoders.stacked:GRU"})
    settings = ENCODERS.settings_class("gru")(kind="gru", hidden_dim=200)
    encoder = ENCODERS.build(settings, available={"input_dim": 100})

The settings of a part are the arguments of its constructor. Types, bounds and defaults come from the signature, and
descriptions from the `Args:` section of the docstring. So the Python call and the recipe cannot disagree. Start reading
at `Registry.build`, which calls the constructor of a part; `Argument` explains where the values come from.

A recipe is a TOML file. A section is one of its top-level tables, such as [encoder] or [tables]. An entry is a table
with a `kind`, such as { kind = "gru", hidden_dim = 200 }. It has the settings of one part.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_type_hints

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, create_model
from pydantic_core import PydanticCustomError, core_schema

from reefknot.errors import SettingsError, find_similar_name
from reefknot.lab.config.settings import KIND_WITHOUT_TABLE, WRONG_KIND, Settings, translate_bounds

PACKAGE = Path(__file__).resolve().parents[2]
"""The folder of the package `reefknot`."""
Available = Mapping[str, Any]
"""Values that a constructor can use in addition to the settings of its part; see `Registry.build`."""
DERIVED_ARGUMENTS = frozenset({"vocab_size", "source_dim", "input_dim", "context_dim", "spellings", "parameters"})
"""Arguments whose values follow from the rest of the model."""


@dataclass(frozen=True)
class Argument:
    """One argument of a part's constructor.

    The name and the annotation of an argument decide its role, that is, where its value comes from:

        derived    The name is in `DERIVED_ARGUMENTS`. The value, such as a dimension, follows from the rest of the
                   model.
        nested     The class is in `nested` of the registry, such as `Classifier`. The argument is a nested part, for
                   which the recipe has a table with its own `kind`.
        shared     The class is in `shared` of the registry, such as `WordTable`. Several parts can share the object,
                   and the recipe has its name.
        setting    Every other argument. The recipe has its value.

    If an annotation contains both a nested and a shared class, the argument is a nested part.
    """

    name: str
    annotation: Any
    default: Any
    """The default value, or `...` if there is none."""
    description: str
    role: Literal["derived", "nested", "shared", "setting"] = "setting"
    section: str = ""
    """For a shared object, the section of the recipe that has its name."""
    registry: Registry | None = None
    """For a nested part, the registry of its family."""


class Registry:
    """A family of parts.

    The three main methods are `entry_type` (the type of a recipe's entry), `arguments` (what a part needs) and `build`.
    A part is imported when it is first used. So a missing optional dependency affects only the parts that need it.

    Args:
        family: Name of the family, in the plural, such as `encoders`.
        parts: For each kind of part, the location of its class as `module:Class`.
        nested: For the base class of a family, as `module:Class`, the registry of that family.
        shared: For the class of a shared object, as `module:Class`, the section of the recipe that has its name.
        scopes: For a kind whose nested parts are built with other values than the part itself, a function, as
            `module:function`, that computes these values (`scopes.py`). It gets the settings of the part and the
            available values (see `build`). It returns the available values of the nested part, or a list of them if
            there are several nested parts.
        extra_settings: For a kind that has settings in addition to the arguments of the constructor, a `Settings`
            class, as `module:Class`, with these settings. Its class attribute `before` is the name of the argument
            before which they are listed.
    """

    def __init__(
        self,
        family: str,
        parts: Mapping[str, str],
        *,
        nested: Mapping[str, Registry] | None = None,
        shared: Mapping[str, str] | None = None,
        scopes: Mapping[str, str] | None = None,
        extra_settings: Mapping[str, str] | None = None,
    ) -> None:
        self.family = family
        self._parts = dict(parts)
        self._nested = dict(nested or {})
        self._shared = dict(shared or {})
        self._scopes = dict(scopes or {})
        self._extra_settings = dict(extra_settings or {})

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def location(self, kind: str) -> str:
        """Return the location of a part's class, as `module:Class`."""
        if kind not in self._parts:
            raise SettingsError(self._unknown_kind_message(kind))
        return self._parts[kind]

    def _unknown_kind_message(self, kind: str) -> str:
        """Return the error message for an unknown kind, with the kind that was probably meant."""
        similar_kind = find_similar_name(kind, self._parts)
        if similar_kind:
            hint = f"did you mean {similar_kind}?"
        else:
            hint = f"there are: {', '.join(self._parts)}"
        return f"no {self.family.removesuffix('s')} is called {kind[:60]!r}; {hint}"

    def load(self, kind: str) -> Any:
        """Import a part and return its class."""
        return _import_object(self.location(kind))

    def summary(self, kind: str) -> str:
        """Return the first line of a part's docstring, read from its source so that the part is not imported."""
        module_name, _, part_name = self.location(kind).partition(":")
        path_in_package = module_name.split(".")[1:]
        path = PACKAGE.joinpath(*path_in_package).with_suffix(".py")
        syntax_tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in syntax_tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part_name:
                docstring = ast.get_docstring(node) or ""
                return docstring.partition("\n")[0]
        return ""

    def arguments(self, kind: str) -> tuple[Argument, ...]:
        """Return the arguments of a part's constructor."""
        return _part_arguments(self, kind)

    def entry_type(self) -> Any:
        """Return the type of a recipe's entry for this family: the settings of the part that its `kind` names.

        For example, a field of type `ENCODERS.entry_type()` accepts {"kind": "lstm", "hidden_dim": 200} and
        {"kind": "transformer", "heads": 4}, and checks each against its own class of settings.
        """
        return Annotated[Settings, _EntryValidator(self)]

    def settings_class(self, kind: str) -> type[Settings]:
        """Return the settings class of one part."""
        return _build_settings_class(self, kind)

    def check_entry(self, raw: Any) -> Any:
        """Return an entry of a recipe if its kind is known, else raise an error.

        The other settings of an entry with an unknown kind cannot be checked, because they depend on the kind.
        """
        if isinstance(raw, Settings):
            return raw
        known_kinds = f"there are: {', '.join(self._parts)}"
        if isinstance(raw, str) and (similar_kind := find_similar_name(raw, self._parts)):
            raise PydanticCustomError(KIND_WITHOUT_TABLE, "{kind}", {"kind": similar_kind})
        if not isinstance(raw, Mapping):
            raise ValueError(f"must be a table with a kind; {known_kinds}")
        kind = raw.get("kind")
        if kind is None:
            error = f"must be set; {known_kinds}"
        elif not isinstance(kind, str):
            error = f"must be a name; {known_kinds}"
        elif kind not in self._parts:
            error = self._unknown_kind_message(kind)
        else:
            return raw
        raise PydanticCustomError(WRONG_KIND, "{error}", {"error": error})

    def setting_names(self, kind: str) -> frozenset[str]:
        """Return the names of a part's settings."""
        return frozenset(self.settings_class(kind).model_fields)

    def build(self, settings: Settings, available: Available) -> Any:
        """Build the part that `settings` describe.

        Args:
            settings: The settings of the part, with its `kind`.
            available: The values of the arguments in `DERIVED_ARGUMENTS`, by name, and the shared objects, by section
                and name: {"input_dim": 100, "tables": {"words": table}}, for example.
        """
        kind = _kind_of(settings)

        # Nested parts of some kinds are built with other values.
        nested_available: Available | list[Available] = available
        if kind in self._scopes:
            scope_function = _import_object(self._scopes[kind])
            nested_available = scope_function(settings, available)

        values: dict[str, Any] = {}
        for argument in self.arguments(kind):
            if argument.role == "derived":
                values[argument.name] = available[argument.name]
                continue
            value = getattr(settings, argument.name)
            if argument.role == "shared" and value is not None:
                value = available[argument.section][value]
            elif argument.registry is not None and value is not None:
                value = _build_nested(argument.registry, value, nested_available)
            values[argument.name] = value

        part_class = self.load(kind)
        return part_class(**values)

    def has_argument(self, settings: Settings, name: str) -> bool:
        """Return whether the constructor of the part that `settings` describe has an argument with this name."""
        kind = _kind_of(settings)
        return any(argument.name == name for argument in self.arguments(kind))

    def references(self, settings: Settings, section: str) -> Iterator[str]:
        """Yield the names of the shared objects of a section that a part and its nested parts refer to."""
        for argument in self.arguments(_kind_of(settings)):
            value = getattr(settings, argument.name, None)
            if argument.role == "shared" and argument.section == section and value is not None:
                yield value
            elif argument.registry is not None and value is not None:
                yield from argument.registry.references(value, section)


def derive_settings(documented_class: type) -> type[Settings]:
    """Return a settings class for a class that is not a part. All arguments of its constructor must be settings."""
    arguments = _read_signature(documented_class, {}, {})
    fields: dict[str, Any] = {argument.name: _pydantic_field(argument) for argument in arguments}
    return create_model(documented_class.__name__, __base__=Settings, **fields)


def _build_nested(registry: Registry, settings: Settings, available: Available | list[Available]) -> Any:
    """Build a nested part, or a list of parts if `available` is a list with the available values of each part."""
    if isinstance(available, list):
        return [registry.build(settings, available_to_part) for available_to_part in available]
    return registry.build(settings, available)


def _import_object(location: str) -> Any:
    """Import a class or function by its location, `module:name`."""
    module_name, _, object_name = location.partition(":")
    module = importlib.import_module(module_name)
    return getattr(module, object_name)


def _kind_of(settings: Settings) -> str:
    kind: str = settings.kind  # type: ignore[attr-defined]
    return kind


@cache
def _part_arguments(registry: Registry, kind: str) -> tuple[Argument, ...]:
    return _read_signature(registry.load(kind), registry._nested, registry._shared)


def _read_signature(part: Any, nested: Mapping[str, Registry], shared: Mapping[str, str]) -> tuple[Argument, ...]:
    """Return the arguments of a class or function, with their roles."""
    function = part.__init__ if inspect.isclass(part) else part
    annotations = get_type_hints(function, include_extras=True)
    descriptions = parse_argument_descriptions(part)
    arguments = []
    for name, parameter in inspect.signature(part).parameters.items():
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        argument = Argument(name, annotations[name], default, descriptions.get(name, ""))
        arguments.append(_assign_role(argument, nested, shared))
    return tuple(arguments)


def _assign_role(argument: Argument, nested: Mapping[str, Registry], shared: Mapping[str, str]) -> Argument:
    """Return an argument with the role that its name and annotation give it."""
    if argument.name in DERIVED_ARGUMENTS:
        return replace(argument, role="derived")
    locations = set(_class_locations(argument.annotation))
    for location, registry in nested.items():
        if location in locations:
            return replace(argument, role="nested", registry=registry)
    for location, section in shared.items():
        if location in locations:
            return replace(argument, role="shared", section=section)
    return argument


def _class_locations(annotation: Any) -> Iterator[str]:
    """Yield the locations, `module:Class`, of the classes in an annotation and of their base classes."""
    if isinstance(annotation, type):
        for base_class in annotation.__mro__:
            yield f"{base_class.__module__}:{base_class.__qualname__}"
    for inner_annotation in get_args(annotation):
        yield from _class_locations(inner_annotation)


def _pydantic_field(argument: Argument) -> tuple[Any, Any]:
    """Return the type and the default of an argument's setting, as pydantic reads them."""
    description = argument.description
    annotation = translate_bounds(argument.annotation)
    if argument.role == "shared":
        annotation = str if argument.default is ... else str | None
        description = f"{description} The name of an entry in [{argument.section}]."
    elif argument.registry is not None:
        annotation = argument.registry.entry_type()
    return Annotated[annotation, Field(description=description or None)], argument.default


@cache
def _build_settings_class(registry: Registry, kind: str) -> type[Settings]:
    """Return a pydantic model with the `kind` of a part, its arguments, and its extra settings if there are any."""
    extra_settings = None
    if kind in registry._extra_settings:
        extra_settings = _import_object(registry._extra_settings[kind])

    fields: dict[str, Any] = {"kind": (Literal[kind], ...)}  # for each name, the annotation and the default
    for argument in registry.arguments(kind):
        if extra_settings is not None and argument.name == extra_settings.before:
            for name, field in extra_settings.model_fields.items():
                fields[name] = (field.annotation, field)
        if argument.role != "derived":
            fields[argument.name] = _pydantic_field(argument)

    part_name = registry.load(kind).__name__
    return create_model(f"{part_name}Settings", __base__=Settings, **fields)


class _EntryValidator:
    """The pydantic type of a recipe's entry for a family. Only the part that an entry names is imported."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        serializer = core_schema.plain_serializer_function_ser_schema(_dump_settings, info_arg=True)
        return core_schema.no_info_plain_validator_function(self._validate, serialization=serializer)

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Return the schema of all parts. Only hints for misspelled settings need it."""
        registry = self._registry
        settings_classes = tuple(registry.settings_class(kind) for kind in registry)
        any_part: Any = Union[settings_classes]  # noqa: UP007 - known at run time
        return handler(TypeAdapter(any_part).core_schema)

    def _validate(self, raw: Any) -> Settings:
        """Return an entry as the settings of its kind."""
        entry = self._registry.check_entry(raw)
        if isinstance(entry, Settings):
            return entry
        settings_class = self._registry.settings_class(entry["kind"])
        return settings_class.model_validate(entry)


def _dump_settings(settings: Settings, info: core_schema.SerializationInfo) -> dict[str, Any]:
    return settings.model_dump(mode=info.mode)


# -- docstrings ----------------------------------------------------------------------------------------------------

_ARGUMENT_LINE = re.compile(r"(\w+): +(\S.*)")
_ARGUMENT_INDENT = 4


def parse_argument_descriptions(documented: Any) -> dict[str, str]:
    """Return the description of each argument that the docstring of a class or function lists.

    For example, `Registry` gives {"family": "Name of the family, in the plural, such as `encoders`.", ...}. A docstring
    without an `Args:` section gives an empty dictionary. A line that is neither an argument nor its continuation raises
    a `ValueError`, so that a typo cannot lose a description.
    """
    descriptions: dict[str, str] = {}
    current_name = None
    docstring = inspect.cleandoc(documented.__doc__ or "")
    for line in _args_section(docstring):
        content = line.strip()
        indent = len(line) - len(line.lstrip())
        match = None
        if indent == _ARGUMENT_INDENT:
            match = _ARGUMENT_LINE.fullmatch(content)

        if match:
            current_name, description = match.groups()
            if current_name in descriptions:
                raise ValueError(f"{documented.__qualname__}: Args: lists {current_name} twice")
            descriptions[current_name] = description
        elif current_name is not None and indent > _ARGUMENT_INDENT:
            descriptions[current_name] += f" {content}"
        elif content:
            raise ValueError(f"{documented.__qualname__}: Args: has the line {content!r}; expected `name: description`")
    return descriptions


def _args_section(docstring: str) -> list[str]:
    """Return the indented lines that follow `Args:`."""
    lines = docstring.splitlines()
    if "Args:" not in lines:
        return []
    section_start = lines.index("Args:") + 1
    section_lines = []
    for line in lines[section_start:]:
        if line and not line.startswith(" "):
            break
        section_lines.append(line)
    return section_lines
