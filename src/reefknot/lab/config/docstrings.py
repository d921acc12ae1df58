"""Descriptions of arguments, read from the `Args:` section of a Google-style docstring.

Args:
    dim: Dimension of the word vectors.
    dropout: Dropout rate of the vectors, which may need
        a second line.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

_ARGUMENT = re.compile(r"(\w+): +(\S.*)")


def argument_descriptions(documented: Any) -> dict[str, str]:
    """Return the description of each argument that the docstring of a class or function lists.

    A docstring without an `Args:` section gives an empty dictionary. A line that fits neither an argument nor its
    continuation is a `ValueError`, so that a typing error cannot drop a description.
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
