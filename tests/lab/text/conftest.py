"""Small corpora and an empty cache for the tests of `reefknot.lab.text`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from reefknot.lab.text.corpora import CORPORA
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.published import Corpus
from reefknot.lab.text.vocabulary_settings import VocabularySettings

TRAIN = b"the cat sat\nthe dog sat on the cat\n\na bird\n"
HELD_OUT = b"the bird sat\na fish\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes train.txt, valid.txt and test.txt to a folder and returns it."""

    def write(train: bytes = TRAIN, valid: bytes = HELD_OUT, test: bytes = HELD_OUT) -> Path:
        folder = tmp_path / "corpus"
        folder.mkdir(exist_ok=True)
        for name, text in (("train", train), ("valid", valid), ("test", test)):
            (folder / f"{name}.txt").write_bytes(text)
        return folder

    return write


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def opened(cache: Path) -> Callable[..., Dataset]:
    """Return a function that opens a folder; keywords are corpus or vocabulary settings."""

    def open_folder(folder: Path, notify: Callable[[str], None] = lambda _: None, **settings: object) -> Dataset:
        cut = {key: settings.pop(key) for key in ("part", "tokens") if key in settings}
        corpus_settings = CorpusSettings.model_validate({"name": str(folder), **cut})
        return open_dataset(corpus_settings, VocabularySettings.model_validate(settings), cache=cache, notify=notify)

    return open_folder


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Corpus], None]:
    """Return a function that registers a corpus for one test."""

    def add(corpus: Corpus) -> None:
        module = ModuleType(f"test_corpus_{corpus.name}")
        module.CORPUS = corpus  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(CORPORA, corpus.name, f"{module.__name__}:CORPUS")

    return add
