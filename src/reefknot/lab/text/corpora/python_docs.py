"""The built-in corpus: English prose from the Python standard library. There is nothing to download.

Docstrings, comments and the language reference behind `help()` are read from the library's source files, which are
parsed but never imported. A line of the corpus is a paragraph in lower case with spaces around punctuation marks. Code,
tables, markup and repeated paragraphs are left out. The text is split by module, so no module has paragraphs in two
splits.

The source files, and hence the corpus, differ between builds of the same Python version: quote the hash with a result.
Reading order: `_read_lines` collects the paragraphs of all modules, and `_extract_paragraphs` cleans a text.
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
from collections.abc import Iterator, Mapping
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.text.prepared import NamedLines, write_texts
from reefknot.lab.text.published import Corpus
from reefknot.storage.progress import Notify

_VERSION = 1  # increase with every change to the text that the same sources give
_HELD_OUT_FRACTION = 0.06  # of the tokens, for each of valid and test
_REFERENCE_MODULE = "pydoc_data.topics"  # by far the largest module, always in the training text

# These folders hold generated tables, third-party packages, and tests, whose docstrings describe code.
_EXCLUDED_FOLDERS = frozenset(
    {"__phello__", "encodings", "ensurepip", "idlelib", "lib2to3", "msilib", "test", "tests", "turtledemo"}
)


class PythonDocs(Corpus):
    """The documentation of the running Python."""

    def open(self, data: Path | None, cache: Path, notify: Notify) -> dict[str, Path]:
        sources = _find_sources(Path(sysconfig.get_path("stdlib")))
        identity = json.dumps([(module, path.stat().st_size) for module, path in sources.items()])
        digest = hashlib.sha256(identity.encode()).hexdigest()
        entry = f"python-docs-{platform.python_version()}-{_VERSION}-{digest[:12]}"
        return write_texts(cache, entry, lambda: _read_lines(sources))


PYTHON_DOCS = PythonDocs(
    name="python-docs",
    description=f"documentation of the standard library of Python {platform.python_version()}",
)


def _read_lines(sources: dict[str, Path]) -> NamedLines:
    paragraphs_by_split = _split_modules(_read_modules(sources))
    if not all(paragraphs_by_split.values()):
        raise DataError("this Python does not include the sources of its standard library; use another corpus")
    for split, paragraphs in paragraphs_by_split.items():
        yield from ((split, paragraph) for paragraph in paragraphs)


def _find_sources(library: Path) -> dict[str, Path]:
    """Return the source files of the library by module name, sorted by name."""
    modules = {}
    for folder, subfolders, files in os.walk(library):
        # os.walk visits the subfolders that are left in its list.
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS and "-" not in name]
        for file in files:
            path = Path(folder, file)
            if path.suffix == ".py":
                modules[".".join(path.relative_to(library).with_suffix("").parts)] = path
    return dict(sorted(modules.items()))


def _read_modules(sources: dict[str, Path]) -> dict[str, list[str]]:
    """Return the paragraphs of each module, without paragraphs that occur in an earlier module."""
    earlier_paragraphs: set[str] = set()
    modules = {}
    for module, path in sources.items():
        texts = _read_texts(module, path)
        paragraphs = dict.fromkeys(paragraph for text in texts for paragraph in _extract_paragraphs(text))
        modules[module] = [paragraph for paragraph in paragraphs if paragraph not in earlier_paragraphs]
        earlier_paragraphs.update(paragraphs)
    return modules


def _split_modules(modules: dict[str, list[str]]) -> dict[str, list[str]]:
    """Divide the paragraphs into splits by module.

    Modules, sorted by the hash of their names, go to valid and then to test until each has its share of the tokens.
    """
    sizes = {module: sum(len(paragraph.split()) for paragraph in paragraphs) for module, paragraphs in modules.items()}
    min_held_out = _HELD_OUT_FRACTION * sum(sizes.values())
    by_hash = sorted(modules, key=lambda module: hashlib.sha256(module.encode()).digest())
    candidates = iter(module for module in by_hash if module != _REFERENCE_MODULE)
    valid = _take_modules(candidates, sizes, min_held_out)
    test = _take_modules(candidates, sizes, min_held_out)
    train = modules.keys() - {*valid, *test}
    return {
        split: [paragraph for module in sorted(names) for paragraph in modules[module]]
        for split, names in {"valid": valid, "test": test, "train": train}.items()
    }


def _take_modules(candidates: Iterator[str], sizes: Mapping[str, int], min_size: float) -> set[str]:
    """Take modules from the iterator until their total size is at least `min_size`, or until there are no more."""
    taken: set[str] = set()
    total_size = 0
    while total_size < min_size:
        module = next(candidates, None)
        if module is None:
            break
        taken.add(module)
        total_size += sizes[module]
    return taken


def _read_texts(module: str, path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a source file, or the topics of the language reference."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, ValueError, SyntaxError, RecursionError):  # such files are skipped
        return
    if module == _REFERENCE_MODULE:
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        yield from (inspect.cleandoc(value) for value in constants if isinstance(value, str))
        return
    yield from _find_docstrings(tree)
    yield from _find_comments(source)


def _find_docstrings(node: ast.AST) -> Iterator[str]:
    """Yield docstrings in the order of the source. Only statements are visited, because expressions have none."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for statement in getattr(node, field, ()):
            yield from _find_docstrings(statement)


_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#.*\n)+", re.MULTILINE)
_COMMENT_MARK = re.compile(r"^[ \t]*#+", re.MULTILINE)


def _find_comments(source: str) -> Iterator[str]:
    """Yield blocks of comment lines. Comments inside strings are included."""
    for block in _COMMENT_BLOCK.findall(source):
        yield _COMMENT_MARK.sub("", block)


_LIST_ITEM = re.compile(r"^[ \t]*(?:[-*+o•]|\(?[0-9a-z][.)])[ \t]+", re.MULTILINE)

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
    r"copyright|licen[cs]e|https?:|www\.|\bxxx\b|"  # legal notices, addresses, reminders
    r"::|\.\.\.|---|[,:;]\)|\s[,:;]|' ?'|"  # code
    r"^(?:todo|fixme|usage|args?|arguments|parameters|returns|raises|attributes|examples?)\W|"
    r"^\S+ --? |(?:: .*){3}",  # lists of names and definitions
    re.IGNORECASE,
)
_PLAIN_WORD = re.compile(r"""["'(]*[A-Za-z]?[a-z']+[].,;:!?"')]*""")
_TOKEN = re.compile(r"(?:e\.g|i\.e)\.|\d+(?::\d+)+|\w+(?:[-'./]\w+)*|--|[^\w\s]")
_COMMON_ENGLISH_WORD = re.compile(
    r"a|an|are|at|be|been|but|by|can|has|it|of|on|should|so|that|the|their|then|these|they|this|to|was|we|were|"
    r"when|which|will|you",
    re.IGNORECASE,
)


def _extract_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text that are English prose, as lower-case tokens."""
    for block in re.split(r"\n\s*\n", text):
        for item in _LIST_ITEM.split(block):
            paragraph = item.strip()
            for pattern, replacement in _MARKUP:
                paragraph = pattern.sub(replacement, paragraph)
            if _is_prose(paragraph):
                yield " ".join(_TOKEN.findall(paragraph.lower()))


def _is_prose(paragraph: str) -> bool:
    """Return whether a paragraph is English prose: mostly plain words, some of them common English words, no code."""
    if not _PROSE.fullmatch(paragraph) or _NOT_PROSE.search(paragraph):
        return False
    words = paragraph.replace("-", " ").split()
    plain_words = [word for word in words if _PLAIN_WORD.fullmatch(word)]
    num_common = sum(_COMMON_ENGLISH_WORD.fullmatch(word) is not None for word in plain_words)
    return len(words) >= 6 and len(plain_words) >= 0.75 * len(words) and num_common >= 0.08 * len(words)
