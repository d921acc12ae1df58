"""The built-in corpus: English prose from the Python standard library. There is nothing to download.

Docstrings, comments and the language reference behind `help()` are read from the library's source files, which are
parsed but never imported. A line of the corpus is a paragraph in lower case with spaces around punctuation marks. Code,
tables, markup and repeated paragraphs are left out. The text is split by module, so no module has paragraphs in two
splits.

The source files, and hence the corpus, differ between builds of the same Python version: quote the hash with a result.

Start with `_read_lines`, which collects the paragraphs of all modules. `_extract_paragraphs` cleans a text.
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
from reefknot.lab.text.prepared import NamedLines, identify_file, store_texts, write_lines
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
        file_identities = [identify_file(path) for path in sources.values()]
        digest = hashlib.sha256(json.dumps(file_identities).encode()).hexdigest()
        entry_name = f"python-docs-{platform.python_version()}-{_VERSION}-{digest[:12]}"
        return store_texts(cache, entry_name, lambda folder: write_lines(folder, _read_lines(sources)), notify)


PYTHON_DOCS = PythonDocs(
    name="python-docs",
    description=f"documentation of the standard library of Python {platform.python_version()}",
)


def _read_lines(sources: dict[str, Path]) -> NamedLines:
    """Yield the paragraphs of all modules, each with its split."""
    paragraphs_by_module = _read_modules(sources)
    paragraphs_by_split = _split_modules(paragraphs_by_module)
    if not all(paragraphs_by_split.values()):
        raise DataError("this Python does not include the sources of its standard library; use another corpus")
    for split, paragraphs in paragraphs_by_split.items():
        for paragraph in paragraphs:
            yield split, paragraph


def _find_sources(library: Path) -> dict[str, Path]:
    """Return the source files of the library by module name, sorted by name."""
    sources = {}
    for folder, subfolders, file_names in os.walk(library):
        # os.walk visits the subfolders that are left in its list.
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS and "-" not in name]
        for file_name in file_names:
            path = Path(folder, file_name)
            if path.suffix == ".py":
                module = ".".join(path.relative_to(library).with_suffix("").parts)
                sources[module] = path
    return dict(sorted(sources.items()))


def _read_modules(sources: dict[str, Path]) -> dict[str, list[str]]:
    """Return the paragraphs of each module, without paragraphs that occur in an earlier module."""
    earlier_paragraphs: set[str] = set()
    paragraphs_by_module = {}
    for module, path in sources.items():
        texts = _read_texts(module, path)
        # A dict is a set that keeps the order of insertion.
        paragraphs = dict.fromkeys(paragraph for text in texts for paragraph in _extract_paragraphs(text))
        paragraphs_by_module[module] = [paragraph for paragraph in paragraphs if paragraph not in earlier_paragraphs]
        earlier_paragraphs.update(paragraphs)
    return paragraphs_by_module


def _split_modules(paragraphs_by_module: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the paragraphs of each split. All paragraphs of a module are in the same split.

    Modules, sorted by the hash of their names, go to valid and then to test until each has its share of the tokens.
    """
    sizes = {}
    for module, paragraphs in paragraphs_by_module.items():
        sizes[module] = sum(len(paragraph.split()) for paragraph in paragraphs)
    min_held_out = _HELD_OUT_FRACTION * sum(sizes.values())

    # Choose the modules of each split.
    modules_by_hash = sorted(paragraphs_by_module, key=lambda module: hashlib.sha256(module.encode()).digest())
    candidates = iter(module for module in modules_by_hash if module != _REFERENCE_MODULE)
    valid_modules = _take_modules(candidates, sizes, min_held_out)
    test_modules = _take_modules(candidates, sizes, min_held_out)
    train_modules = paragraphs_by_module.keys() - {*valid_modules, *test_modules}

    # Collect the paragraphs of each split.
    paragraphs_by_split: dict[str, list[str]] = {}
    for split, modules in (("valid", valid_modules), ("test", test_modules), ("train", train_modules)):
        paragraphs_by_split[split] = []
        for module in sorted(modules):
            paragraphs_by_split[split] += paragraphs_by_module[module]
    return paragraphs_by_split


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
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield inspect.cleandoc(node.value)
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


# Consecutive lines that are comments, and the marks at the beginning of such lines.
_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#.*\n)+", re.MULTILINE)
_COMMENT_MARK = re.compile(r"^[ \t]*#+", re.MULTILINE)


def _find_comments(source: str) -> Iterator[str]:
    """Yield blocks of comment lines. Comments inside strings are included."""
    for block in _COMMENT_BLOCK.findall(source):
        yield _COMMENT_MARK.sub("", block)


# The beginning of a list item: "* ", "1. " or "(a) ".
_LIST_ITEM = re.compile(r"^[ \t]*(?:[-*+o•]|\(?[0-9a-z][.)])[ \t]+", re.MULTILINE)

# Markup of reStructuredText, and the plain text that replaces it.
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

# A paragraph of prose consists of these characters, and does not contain a match of _NOT_PROSE.
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
                tokens = _TOKEN.findall(paragraph.lower())
                yield " ".join(tokens)


def _is_prose(paragraph: str) -> bool:
    """Return whether a paragraph is English prose: mostly plain words, some of them common English words, no code."""
    if not _PROSE.fullmatch(paragraph) or _NOT_PROSE.search(paragraph):
        return False
    words = paragraph.replace("-", " ").split()
    plain_words = [word for word in words if _PLAIN_WORD.fullmatch(word)]
    common_words = [word for word in plain_words if _COMMON_ENGLISH_WORD.fullmatch(word)]
    is_long_enough = len(words) >= 6
    is_plain = len(plain_words) >= 0.75 * len(words)
    is_english = len(common_words) >= 0.08 * len(words)
    return is_long_enough and is_plain and is_english
