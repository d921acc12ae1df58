"""The built-in corpus: the prose of the Python standard library, made on this machine, nothing to download.

Docstrings, comments and the language reference behind `help()` are read from the sources, which are parsed,
never imported. A line of the corpus is a paragraph in lower case, words and punctuation set apart. Code,
tables and markup are left out, and of equal paragraphs all but the first. The texts are split by module, so
that no module has paragraphs on both sides. The sources differ between builds of the same Python, and so does
the corpus: quote its hash.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.text.prepared import Lines, write_texts
from reefknot.lab.text.published import Corpus
from reefknot.storage.progress import Say

_BUILDER = 1  # to be raised with every change of the text that the same sources give
_HELD_OUT = 0.06  # share of the tokens for valid, and for test
_REFERENCE = "pydoc_data.topics"  # by far the largest module: always trained on

# Generated tables, other people's packages, and tests, whose docstrings are about code.
_LEFT_OUT = frozenset(
    {"__phello__", "encodings", "ensurepip", "idlelib", "lib2to3", "msilib", "test", "tests", "turtledemo"}
)


class PythonDocs(Corpus):
    """The documentation of the running Python, which is always there."""

    def open(self, data: Path | None, cache: Path, say: Say) -> dict[str, Path]:
        sources = _sources(Path(sysconfig.get_path("stdlib")))
        listing = json.dumps([(module, path.stat().st_size) for module, path in sources.items()])
        digest = hashlib.sha256(listing.encode()).hexdigest()
        entry = f"python-docs-{platform.python_version()}-{_BUILDER}-{digest[:12]}"
        return write_texts(cache, entry, lambda: _lines(sources))


PYTHON_DOCS = PythonDocs(
    name="python-docs",
    description=f"documentation of the standard library of Python {platform.python_version()}",
)


def _lines(sources: dict[str, Path]) -> Lines:
    texts = _split(_modules(sources))
    if not all(texts.values()):
        raise DataError("this Python came without the sources of its library; name another corpus")
    for split, paragraphs in texts.items():
        yield from ((split, paragraph) for paragraph in paragraphs)


def _sources(library: Path) -> dict[str, Path]:
    """Module names and files of the library, sorted by name."""
    found = {}
    for folder, inner, files in os.walk(library):
        inner[:] = [name for name in inner if name not in _LEFT_OUT and "-" not in name]
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py":
                found[".".join(path.relative_to(library).with_suffix("").parts)] = path
    return dict(sorted(found.items()))


def _modules(sources: dict[str, Path]) -> dict[str, list[str]]:
    """The paragraphs of each module, without those that an earlier module has."""
    seen: set[str] = set()
    modules = {}
    for module, path in sources.items():
        fresh = dict.fromkeys(paragraph for text in _texts(module, path) for paragraph in _paragraphs(text))
        modules[module] = [paragraph for paragraph in fresh if paragraph not in seen]
        seen.update(fresh)
    return modules


def _split(modules: dict[str, list[str]]) -> dict[str, list[str]]:
    """Deal modules, in the order of the hash of their names, to valid and test until each has its share."""
    size = {module: sum(len(p.split()) for p in paragraphs) for module, paragraphs in modules.items()}
    share = _HELD_OUT * sum(size.values())
    dealt: dict[str, list[str]] = {"valid": [], "test": []}
    order = sorted(modules, key=lambda module: hashlib.sha256(module.encode()).digest())
    waiting = iter(module for module in order if module != _REFERENCE)
    for held_out in dealt.values():
        while sum(size[module] for module in held_out) < share and (module := next(waiting, None)):
            held_out.append(module)
    dealt["train"] = list(set(modules) - set(chain(*dealt.values())))
    return {name: [p for module in sorted(chosen) for p in modules[module]] for name, chosen in dealt.items()}


def _texts(module: str, path: Path) -> Iterator[str]:
    """The docstrings and comments of a source file, and of the reference its topics."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):  # not for us to mend
        return
    if module == _REFERENCE:
        strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        yield from (inspect.cleandoc(text) for text in strings if isinstance(text, str))
        return
    yield from _docstrings(tree)
    yield from _comments(source)


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings in the order of the source; only statements are visited, since expressions have none."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for statement in getattr(node, field, ()):
            yield from _docstrings(statement)


_COMMENTS = re.compile(r"(?:^[ \t]*#.*\n)+", re.MULTILINE)
_HASHES = re.compile(r"^[ \t]*#+", re.MULTILINE)


def _comments(source: str) -> Iterator[str]:
    """Blocks of lines that are comments; one inside a string is as good as any."""
    for block in _COMMENTS.findall(source):
        yield _HASHES.sub("", block)


_ITEM = re.compile(r"^[ \t]*(?:[-*+o•]|\(?[0-9a-z][.)])[ \t]+", re.MULTILINE)

_MARKUP = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r":[a-z][a-z:+-]*:`[~!]?([^`<]+?)(?:\s*<[^`>]*>)?`", r"\1"),  # :func:`~os.path.join`
        (r"``([^`]+)``", r"\1"),
        (r"`([^`']+)[`']_*", r"\1"),
        (r"\*{1,2}(\w[^*]*?)\*{1,2}", r"\1"),  # emphasis
        (r"\s*\[\d+\]_?", ""),  # footnotes
        (r"(\w)\(\)", r"\1"),  # name()
        (r"\s*[—–]\s*", " -- "),
        (r"[‘’]", "'"),
        (r"[“”]", '"'),
        (r"::$", ":"),
        (r"\s+", " "),
    ]
]

_PROSE = re.compile(r"""["'(]?[a-z][\w .,;:!?'"()/%-]+""", re.ASCII | re.IGNORECASE)
_NOT_PROSE = re.compile(
    r"copyright|licen[cs]e|https?:|www\.|\bxxx\b|"  # notices, addresses, notes to oneself
    r"::|\.\.\.|---|[,:;]\)|\s[,:;]|' ?'|"  # code
    r"^(?:todo|fixme|usage|args?|arguments|parameters|returns|raises|attributes|examples?)\W|"
    r"^\S+ --? |(?:: .*){3}",  # lists of names and their meanings
    re.IGNORECASE,
)
_PLAIN = re.compile(r"""["'(]*[A-Za-z]?[a-z']+[].,;:!?"')]*""")
_TOKEN = re.compile(r"(?:e\.g|i\.e)\.|\d+(?::\d+)+|\w+(?:[-'./]\w+)*|--|[^\w\s]")
_ENGLISH = re.compile(
    r"a|an|are|at|be|been|but|by|can|has|it|of|on|should|so|that|the|their|then|these|they|this|to|was|we|were|"
    r"when|which|will|you",
    re.IGNORECASE,
)


def _paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a text that are English prose, as lower-case tokens."""
    for block in re.split(r"\n\s*\n", text):
        for item in _ITEM.split(block):
            paragraph = item.strip()
            for pattern, replacement in _MARKUP:
                paragraph = pattern.sub(replacement, paragraph)
            if _is_prose(paragraph):
                yield " ".join(_TOKEN.findall(paragraph.lower()))


def _is_prose(paragraph: str) -> bool:
    """Whether nearly all of it is plain words, some of them those that only English has, and none code."""
    if not _PROSE.fullmatch(paragraph) or _NOT_PROSE.search(paragraph):
        return False
    words = paragraph.replace("-", " ").split()
    plain = [word for word in words if _PLAIN.fullmatch(word)]
    english = sum(_ENGLISH.fullmatch(word) is not None for word in plain)
    return len(words) >= 6 and len(plain) >= 0.75 * len(words) and english >= 0.08 * len(words)
