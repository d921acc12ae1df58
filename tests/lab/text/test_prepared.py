"""Prepared corpora: where their files are searched, what is checked, and errors about damaged files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reefknot.errors import CorpusNotFound, DataError
from reefknot.lab.text.corpora import known_corpus
from reefknot.lab.text.corpus import SPLITS, CorpusSettings, find_corpus
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.prepared import PreparedCorpus, tokenise
from reefknot.lab.text.published import Corpus, DownloadedCorpus, find_all_files
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.storage import progress

SOURCE = "the cat sat"


def split_lines(files: list[Path]) -> Iterator[tuple[str, str]]:
    text = files[0].read_text(encoding="utf-8")
    yield from ((split, f"{text} {split}") for split in SPLITS)


MADE = PreparedCorpus(
    name="made",
    description="A made corpus",
    how_to_get="Write it yourself.",
    expected="source",
    folders=("here", "there"),
    files=lambda folder: find_all_files(folder, "source"),
    lines=split_lines,
)


@pytest.fixture
def data(tmp_path: Path, register: Callable[[Corpus], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    register(MADE)
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    return tmp_path / "data"


def write_source(folder: Path, text: str = SOURCE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "source"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("below", ["here", "there", "."])
def test_files_are_found_and_converted_to_texts(data: Path, cache: Path, below: str) -> None:
    write_source(data / below)
    dataset = open_dataset(CorpusSettings(name="made"), VocabularySettings(), data=data, cache=cache)
    assert (dataset.name, dataset.origin) == ("made", "A made corpus")
    assert dataset.vocabulary.decode(dataset.splits["train"].ids.tolist()) == ["the", "cat", "sat", "train", "<eos>"]
    assert dataset.splits["valid"].unknown == 1


def test_corpus_is_rebuilt_only_after_a_change_or_damage(data: Path, cache: Path) -> None:
    source = write_source(data / "here")
    made = find_corpus(CorpusSettings(name="made"), data=data, cache=cache).files["train"]
    stamp = made.stat().st_mtime_ns
    assert find_corpus(CorpusSettings(name="made"), data=data, cache=cache).files["train"] == made
    assert made.stat().st_mtime_ns == stamp
    made.write_text("short", encoding="utf-8")
    find_corpus(CorpusSettings(name="made"), data=data, cache=cache)
    assert made.read_text(encoding="utf-8") == f"{SOURCE} train\n"
    source.write_text("a dog ran on", encoding="utf-8")
    again = find_corpus(CorpusSettings(name="made"), data=data, cache=cache)
    assert again.files["train"].read_text(encoding="utf-8") == "a dog ran on train\n"


def test_fingerprint_does_not_depend_on_the_folder(data: Path, tmp_path: Path, cache: Path) -> None:
    write_source(data / "here")
    write_source(tmp_path / "moved")
    settings = CorpusSettings(name="made"), VocabularySettings()
    original, moved = (open_dataset(*settings, data=folder, cache=cache) for folder in (data, tmp_path / "moved"))
    assert original.fingerprint == moved.fingerprint


@pytest.mark.parametrize("named", [True, False])
def test_missing_corpus_error_says_which_file_to_put_where(data: Path, cache: Path, named: bool) -> None:
    data.mkdir(exist_ok=True)
    where = rf" in {data}: expected {data}" if named else ": expected DIR"
    message = rf"^made not found{where}/here/source\. Write it yourself\. Pass --data DIR or set REEFKNOT_DATA\.$"
    with pytest.raises(CorpusNotFound, match=message):
        find_corpus(CorpusSettings(name="made"), data=data if named else None, cache=cache)


def test_file_with_another_hash_is_rejected(data: Path, cache: Path, register: Callable[[Corpus], None]) -> None:
    write_source(data, "something else")
    expected, actual = (hashlib.sha256(text.encode()).hexdigest() for text in (SOURCE, "something else"))
    register(replace(MADE, sha256={"source": expected}))
    message = (
        rf"source is not the published made file: expected SHA-256 {expected}, found {actual}\. Download it again\.$"
    )
    with pytest.raises(DataError, match=message):
        find_corpus(CorpusSettings(name="made"), data=data, cache=cache)
    write_source(data)
    assert find_corpus(CorpusSettings(name="made"), data=data, cache=cache).name == "made"


def test_unreadable_file_leaves_no_cache_entry(data: Path, cache: Path) -> None:
    write_source(data).write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"data/source: cannot be read: .*; download it again"):
        find_corpus(CorpusSettings(name="made"), data=data, cache=cache)
    assert list((cache / "corpora").iterdir()) == []


def test_progress_is_reported(data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PROGRESS_SECONDS", -1.0)
    write_source(data)
    messages: list[str] = []
    find_corpus(CorpusSettings(name="made"), data=data, cache=cache, notify=messages.append)
    assert messages == [f"made: {number} lines prepared" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("It's GOOD: 8/10!", "it ' s good : 8 / 10 !"),
        ("Zoë said\u00a0“no”", "zoë said “ no ”"),
        (" \t\n", ""),
    ],
)
def test_tokenise_lowers_case_and_splits_punctuation(text: str, tokens: str) -> None:
    assert tokenise(text) == tokens


def is_available(name: str) -> bool:
    folder, corpus = os.environ.get("REEFKNOT_DATA"), known_corpus(name)
    assert isinstance(corpus, DownloadedCorpus)
    return bool(folder) and any(corpus.files_in(Path(str(folder), below)) for below in (*corpus.folders, name, "."))


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("name", "hashes"),
    [
        ("imdb", {"train": "3516947f0a07ae40", "valid": "760aabefe8d2dcba", "test": "153e91c5998602b4"}),
        ("bbc", {"train": "6594725f63d5a7df", "valid": "c24796dc82d4c0e2", "test": "15a97bbf02f67ada"}),
        ("enwiki-sample", {"train": "9d1dfa6b7f31dca0", "valid": "ca580d0dbf56dad3", "test": "93b66f57a8eb1431"}),
    ],
)
def test_real_corpora_have_the_recorded_hashes(name: str, hashes: dict[str, str], tmp_path: Path) -> None:
    if not is_available(name):
        pytest.skip(f"REEFKNOT_DATA names no folder that holds {name}")
    corpus = find_corpus(CorpusSettings(name=name), data=None, cache=tmp_path)
    assert {split: sha256[:16] for split, sha256 in corpus.hashes.items()} == hashes


@pytest.mark.corpus
def test_real_text8_has_the_published_size(tmp_path: Path) -> None:
    if not is_available("text8"):
        pytest.skip("REEFKNOT_DATA names no folder that holds text8")
    dataset = open_dataset(CorpusSettings(name="text8"), VocabularySettings(min_count=11), cache=tmp_path)
    assert 40_000 < len(dataset.vocabulary) < 50_000
    assert sum(split.bytes for split in dataset.splits.values()) == pytest.approx(101_000_000, rel=1e-6)


@pytest.mark.corpus
def test_real_billion_word_has_the_published_counts(tmp_path: Path) -> None:
    if not is_available("billion-word"):
        pytest.skip("REEFKNOT_DATA names no folder that holds billion-word")
    dataset = open_dataset(CorpusSettings(name="billion-word"), VocabularySettings(min_count=3), cache=tmp_path)
    assert (dataset.splits["valid"].tokens, dataset.splits["test"].tokens) == (161_828, 159_658)
    assert len(dataset.vocabulary) == pytest.approx(793_471, abs=5)
