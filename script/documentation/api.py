"""The pages of the Python interface, from signatures and docstrings.

The docstrings are Markdown with sections in Google's style (`Args:`), so they become MyST directives without autodoc.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import reefknot
import reefknot.hf

GROUPS = {
    "losses": ("Losses", ("kernels.", "nn.linear_cross_entropy_loss")),
    "tables": ("Tables", ("nn.tables",)),
    "inputs": ("Inputs", ("nn.inputs.",)),
    "classifiers": ("Classifiers", ("nn.classifiers.",)),
    "outputs": ("Outputs", ("nn.outputs.",)),
    "encoders": ("Encoders", ("nn.encoders.",)),
    "models": ("Models", ("nn.models.",)),
    "vectors": ("Word vectors", ("vectors.",)),
    "laboratory": ("Laboratory", ("lab.",)),
    "hf": ("Hugging Face", ("hf.",)),
    "errors": ("Errors", ("errors",)),
}
"""The pages: for each a title, and the modules whose public names it has."""
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):\n((?:(?: {4}.*)?(?:\n|$))*)", re.MULTILINE)
TITLES = {"Args": "Arguments"}


def write_api_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every page."""
    members = {f"reefknot.{name}": getattr(reefknot, name) for name in reefknot.__all__}
    members |= {f"reefknot.hf.{name}": getattr(reefknot.hf, name) for name in reefknot.hf.__all__}
    rows = []
    for page, (title, prefixes) in GROUPS.items():
        names = [
            name for name, member in members.items() if member.__module__.removeprefix("reefknot.").startswith(prefixes)
        ]
        sections = [describe(name, members.pop(name)) for name in names]
        yield f"reference/api/{page}", f"# {title}\n\n" + "\n".join(sections)
        rows.append(f"| [{title}]({page}.md) | {', '.join(f'`{name}`' for name in names)} |\n")
    if members:
        raise ValueError(f"GROUPS has no page for {', '.join(members)}")
    introduction = "The public names. [Stability](../../stability.md) says which changes a release may make."
    table = "| page | names |\n|---|---|\n" + "".join(rows)
    yield "reference/api/index", f"# Python\n\n{introduction}\n\n{table}\n{toctree(list(GROUPS))}"


def toctree(pages: list[str]) -> str:
    """Return a hidden list of pages, which the sidebar shows."""
    return "```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def describe(name: str, member: Any) -> str:
    """Return the MyST directive of a class or a function, under a heading."""
    heading = f"## {name.rpartition('.')[2]}\n\n"
    if not inspect.isclass(member):
        return heading + directive("function", name, signature(member), convert(inspect.getdoc(member)))
    methods = "".join(
        directive("method", method_name, signature(method, is_method=True), convert(inspect.getdoc(method)), ticks=4)
        for method_name, method in public_methods(member)
    )
    is_error = issubclass(member, Exception)
    arguments = "" if is_error else signature(member)
    return heading + directive("exception" if is_error else "class", name, arguments, convert(member.__doc__) + methods)


def directive(kind: str, name: str, arguments: str, content: str, ticks: int = 6) -> str:
    """Return a directive of Sphinx's Python domain."""
    fence = "`" * ticks
    return f"{fence}{{py:{kind}}} {name}{arguments}\n{content}\n{fence}\n\n"


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


def convert(docstring: str | None) -> str:
    """Return a docstring as Markdown: its sections become lists of definitions, and its examples become code."""
    text = inspect.cleandoc(docstring or "")
    sections: list[str] = []

    def replace(section: re.Match[str]) -> str:
        body = textwrap.dedent(section[2]).strip()
        if section[1] in ("Args", "Attributes"):
            entries = re.split(r"\n(?=\S)", body)
            body = "\n\n".join(define(entry) for entry in entries)
        sections.append(f"**{TITLES.get(section[1], section[1])}**\n\n{body}\n\n")
        return f"\x00{len(sections) - 1}\x00\n\n"

    text = highlight_examples(SECTION.sub(replace, text))
    return re.sub(r"\x00(\d+)\x00", lambda marker: sections[int(marker[1])], text) + "\n\n"


def define(entry: str) -> str:
    """Return one argument as a definition."""
    name, _, meaning = entry.partition(":")
    return f"`{name.strip()}`\n: " + " ".join(meaning.split())


def highlight_examples(text: str) -> str:
    """Turn indented blocks into fenced ones. Blocks that are valid Python are highlighted."""

    def fence(block: re.Match[str]) -> str:
        code = textwrap.dedent(block[0]).strip("\n")
        try:
            ast.parse(code)
            language = "python"
        except SyntaxError:
            language = "text"
        return f"```{language}\n{code}\n```\n"

    return re.sub(r"(?<=\n\n)(?: {4}.*\n?(?:\n(?= {4}))?)+", fence, text)
