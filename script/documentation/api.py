"""The pages of the Python interface, from signatures and docstrings.

The docstrings are Markdown with sections in Google's style (`Args:`), so they become MyST directives without autodoc.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from documentation.signatures import find_alias, public_methods, signature, types_in_signatures

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
TYPES = """# Types in signatures

These names occur in the signatures of the other pages, but they are not names of `reefknot`. If a name stands for
another type, which is shown after the equals sign, pass an ordinary value of that type. `Annotated` types are numbers
and lists with bounds: `Ge(1)` means at least 1, `Gt` greater than, `Le` at most, and `Lt` less than.

"""
SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):\n((?:(?: {4}.*)?(?:\n|$))*)", re.MULTILINE)
TITLES = {"Args": "Arguments"}


def write_api_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every page."""
    members: dict[str, Any] = {f"reefknot.{name}": getattr(reefknot, name) for name in reefknot.__all__}
    members |= {f"reefknot.hf.{name}": getattr(reefknot.hf, name) for name in reefknot.hf.__all__}
    types_page = write_types_page(list(members.values()))
    rows = []
    for page, (title, prefixes) in GROUPS.items():
        names = [
            name for name, member in members.items() if member.__module__.removeprefix("reefknot.").startswith(prefixes)
        ]
        sections = [describe(name, members.pop(name)) for name in names]
        module = "reefknot.hf" if page == "hf" else "reefknot"
        yield f"reference/api/{page}", f"# {title}\n\n```{{py:currentmodule}} {module}\n```\n\n" + "\n".join(sections)
        rows.append(f"| [{title}]({page}.md) | {', '.join(f'`{name}`' for name in names)} |\n")
    if members:
        raise ValueError(f"GROUPS has no page for {', '.join(members)}")
    yield "reference/api/types", types_page
    introduction = "The public names. [Stability](../../stability.md) says which changes a release may make."
    rows.append("| [Types in signatures](types.md) | types of arguments and results that are not public names |\n")
    table = "| page | names |\n|---|---|\n" + "".join(rows)
    yield "reference/api/index", f"# Python\n\n{introduction}\n\n{table}\n{toctree([*GROUPS, 'types'])}"


def write_types_page(members: Collection[Any]) -> str:
    """Return the page of all types of Reefknot in the signatures of the members, except the members themselves."""
    waiting, described = list(members), list(members)
    entries: dict[str, str] = {}
    while waiting:
        for name, value in types_in_signatures(waiting.pop()):
            if name in entries or value in described:
                continue
            alias = find_alias(name, value)
            if alias:
                options = [f"canonical: {alias.value}", "no-index-entry:"]
                entries[name] = directive("type", name, "", convert(alias.docstring), options)
            elif inspect.isclass(value) and value.__module__.startswith("reefknot."):
                options = [f"canonical: {value.__module__}.{name}", "no-index-entry:"]
                entries[name] = directive("class", name, signature(value), convert(value.__doc__), options)
                waiting.append(value)
    return TYPES + "".join(entries[name] for name in sorted(entries))


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


def directive(kind: str, name: str, arguments: str, content: str, options: Collection[str] = (), ticks: int = 6) -> str:
    """Return a directive of Sphinx's Python domain. The part of the name before the last dot is its module."""
    module, _, name = name.rpartition(".")
    options = [f"module: {module}", *options] if module else options
    fence = "`" * ticks
    lines = [f"{fence}{{py:{kind}}} {name}{arguments}", *(f":{option}" for option in options), "", content, fence]
    return "\n".join(lines) + "\n\n"


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
