"""The signatures of the Python interface, and the types of Reefknot that occur in them."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple


class Alias(NamedTuple):
    """A name that a module of Reefknot gives to a type, such as `Dim = Annotated[int, Ge(1)]`."""

    value: str
    docstring: str


def public_methods(member: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods that the class or its bases in Reefknot define and document."""
    if issubclass(member, Exception):
        return
    names = dict.fromkeys(
        name
        for base in member.__mro__
        if base.__module__.startswith("reefknot.")
        for name, value in vars(base).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__doc__
    )
    for name in names:
        yield name, getattr(member, name)


def signature(member: Any, is_method: bool = False) -> str:
    """Return the signature, with the annotations as they are written in the source."""
    try:
        parsed = inspect.signature(member)
    except ValueError:  # a class that is not made by calling it
        return ""
    parameters = list(parsed.parameters.values())[1 if is_method else 0 :]
    text = str(parsed.replace(parameters=parameters))
    if inspect.isclass(member):
        text = text.removesuffix(" -> None").removesuffix(" -> 'None'")
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations that are not evaluated have quotes
    return re.sub(r"\b(?:reefknot\.[\w.]+|typing|collections\.abc|pathlib)\.(\w+)", r"\1", text)


def types_in_signatures(member: Any) -> Iterator[tuple[str, Any]]:
    """Yield the capitalised names in the signatures of a class and its methods, or of a function, and their values."""
    methods = [method for _, method in public_methods(member)] if inspect.isclass(member) else []
    for function in (member, *methods):
        names = vars(sys.modules[function.__module__])
        for name in re.findall(r"(?<![.'\w])[A-Z]\w+", signature(function)):
            if name in names:
                yield name, names[name]


def find_alias(name: str, value: Any) -> Alias | None:
    """Return the alias of this name and value, or None if no module of Reefknot defines it."""
    modules = [module for key, module in sys.modules.items() if key.startswith("reefknot.")]
    candidates = (
        aliases(module)[name] for module in modules if vars(module).get(name) is value and name in aliases(module)
    )
    return next(candidates, None)


@cache
def aliases(module: ModuleType) -> dict[str, Alias]:
    """Return the capitalised names that a module assigns, with the docstrings below the assignments."""
    body = ast.parse(inspect.getsource(module)).body
    named = {}
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            is_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            docstring = after.value.value if is_docstring else ""
            named[statement.targets[0].id] = Alias(ast.unparse(statement.value), docstring)
    return named
