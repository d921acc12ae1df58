"""The built-in corpus: prose from Python sources that are never run, split by module, extracted once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reefknot.errors import DataError
from reefknot.lab.text.corpora import python_docs
from reefknot.lab.text.corpus import SPLITS, CorpusSettings
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.storage.progress import silent

MODULE = '''
"""Tools for the number {0} and what it is used for.

    >>> this is not to be taken for a sentence of the text
    it is the output of the code

Use :func:`~tools.make` or ``other_tool()`` to make *one* of them [1]_, i.e. the first.

.. versionadded:: 3.2 of the language and of the library

+-----+-----+
| the | table of the values |
+-----+-----+

- The first item of the list is number {0}.
- ``x = y`` is the code of an item, and it is left out of the text.
"""

raise SystemExit("a source is never run")

class Tool:
    """This paragraph is the same in each of the modules."""

    # The comment that belongs to number {0} has
    # two lines of the source.
    x = 1  # a remark at the end of a line is not a block of its own
    # if x == 1: return the value of the thing
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a standard library of twenty modules."""
    folder = tmp_path / "library"
    (folder / "package" / "test").mkdir(parents=True)
    for number in range(20):
        (folder / "package" / f"module{number}.py").write_text(MODULE.format(number))
    (folder / "package" / "test" / "left_out.py").write_text('"""A test is not a part of the text at all."""')
    (folder / "broken.py").write_text('"""A file that is broken is not a part of it."""\n(')
    (folder / "latin.py").write_bytes(b'"""A file that is not UTF-8 is not a part of it \xff."""\n')
    monkeypatch.setattr(python_docs.sysconfig, "get_path", lambda _: str(folder))
    return folder


def build(cache: Path) -> Path:
    """Prepare the corpus and return the folder of its texts."""
    files = python_docs.PYTHON_DOCS.open(None, cache, silent)
    assert list(files) == list(SPLITS)
    return files["train"].parent


def read_texts(folder: Path) -> dict[str, list[str]]:
    return {split: (folder / f"{split}.txt").read_text().splitlines() for split in SPLITS}


def test_prose_is_extracted_and_code_is_left_out(library: Path, cache: Path) -> None:
    lines = [line for text in read_texts(build(cache)).values() for line in text]
    assert [line for line in lines if re.search(r"\b7\b", line)] == [
        "tools for the number 7 and what it is used for .",
        "the first item of the list is number 7 .",
        "the comment that belongs to number 7 has two lines of the source .",
    ]
    assert {line for line in lines if not re.search(r"\d", line)} == {
        "use tools.make or other_tool to make one of them , i.e. the first .",
        "this paragraph is the same in each of the modules .",
    }
    assert len(lines) == len(set(lines)) == 3 * 20 + 2


def test_every_module_is_in_one_split(library: Path, cache: Path) -> None:
    texts = read_texts(build(cache))
    numbers = {split: {n for line in text for n in re.findall(r"\d+", line)} for split, text in texts.items()}
    assert all(numbers.values())
    assert sum(map(len, numbers.values())) == len(set.union(*numbers.values())) == 20


def test_corpus_is_rebuilt_only_after_a_change_or_damage(library: Path, cache: Path) -> None:
    folder = build(cache)
    written = (folder / "train.txt").stat().st_mtime_ns
    assert build(cache) == folder
    assert (folder / "train.txt").stat().st_mtime_ns == written

    intact = (folder / "train.txt").read_bytes()
    (folder / "train.txt").write_bytes(intact[:100])
    assert build(cache) == folder
    assert (folder / "train.txt").read_bytes() == intact

    (library / "new.py").write_text('"""A new module is a reason to make the text again."""')
    assert build(cache) != folder


def test_python_without_library_sources_is_rejected(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_docs.sysconfig, "get_path", lambda _: str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="does not include the sources of its standard library"):
        build(cache)


def test_installed_python_gives_a_usable_corpus(cache: Path) -> None:
    dataset = open_dataset(CorpusSettings(), VocabularySettings(min_count=3), cache=cache)
    tokens = {name: split.tokens for name, split in dataset.splits.items()}
    assert tokens["train"] > 200_000
    assert min(tokens["valid"], tokens["test"]) > 15_000
    assert 0.85 < tokens["train"] / sum(tokens.values()) < 0.93
    assert set(dataset.vocabulary.words[:8]) >= {"the", ".", ",", "a", "to", "is"}
    [folder] = (cache / "corpora").iterdir()
    text = (folder / "train.txt").read_text()
    for debris in (">>>", "``", ":func:", "versionadded", "|", "{", "=", "@", "http:", "copyright"):
        assert debris not in text
