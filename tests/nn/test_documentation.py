"""Everything public in `reefknot.nn` has a docstring, and `Args:` sections describe arguments that exist."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import reefknot.nn
from reefknot.lab.config.registry import parse_argument_descriptions


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield all public classes and functions of the package, and the public methods that its classes define."""
    for module_info in pkgutil.walk_packages(reefknot.nn.__path__, "reefknot.nn."):
        module = importlib.import_module(module_info.name)
        yield module.__name__, module
        for name, member in vars(module).items():
            if name.startswith("_") or getattr(member, "__module__", None) != module.__name__:
                continue
            if inspect.isclass(member) or inspect.isfunction(member):
                yield f"{module.__name__}.{name}", member
            if inspect.isclass(member):
                yield from ((f"{module.__name__}.{name}.{method}", value) for method, value in methods(member))


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        if name.startswith("_"):
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(function) or isinstance(function, property):
            yield name, function


def test_every_public_object_has_a_docstring() -> None:
    objects = dict(public_objects())
    assert len(objects) > 200
    assert [name for name, documented in objects.items() if not documented.__doc__] == []


def test_args_sections_describe_arguments_that_exist() -> None:
    for name, documented in public_objects():
        if not (inspect.isclass(documented) or inspect.isfunction(documented)):
            continue
        descriptions = parse_argument_descriptions(documented)
        parameters = [
            parameter for parameter in inspect.signature(documented).parameters if parameter not in ("self", "cls")
        ]
        assert not descriptions or list(descriptions) == parameters, name


def test_overriding_methods_inherit_docstrings() -> None:
    softmax, end = reefknot.Softmax, inspect.getmro(reefknot.Softmax)[1]
    assert softmax.log_probs.__doc__ == end.log_probs.__doc__  # type: ignore[attr-defined]
    assert softmax.loss.__doc__ != end.loss.__doc__  # type: ignore[attr-defined]
    assert "head" in (reefknot.AdaptiveSoftmax.loss.__doc__ or "")
