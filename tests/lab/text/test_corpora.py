"""Corpora: where texts are looked for, how the published ones are told apart, and what a cut leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from pydantic import ValidationError

from reefknot.errors import DataError
from reefknot.lab.text import corpus as corpora
from reefknot.lab.text.corpus import KNOWN, Corpus, CorpusSettings, KnownCorpus, KnownFile, find_corpus
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.vocabulary import VocabularySettings


def find(name: object, cache: Path, data: Path | None = None, **cut: object) -> Corpus:
    return find_corpus(CorpusSettings.model_validate({"name": str(name), **cut}), data=data, cache=cache)


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(f"{name}\n")
    return folder


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A published corpus of three one-word files, each holding its own name."""

    def file(name: str) -> KnownFile:
        return KnownFile(name, 2, hashlib.sha256(f"{name}\n".encode()).hexdigest())

    files = {split: file(f"tiny.{split}.txt") for split in corpora.SPLITS}
    monkeypatch.setattr(corpora, "KNOWN", {"tiny": KnownCorpus("A tiny corpus", 2, files)})
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    return "tiny"


TINY = ("tiny.train.txt", "tiny.valid.txt", "tiny.test.txt")


@pytest.mark.parametrize("part", ["3/2", "0/4", "x", "1", "1/0", "-1/2", "1/2/3", "", " 1/2", "１/２", "01/2"])
def test_a_part_that_is_none(part: str) -> None:
    with pytest.raises(ValidationError, match="1 <= k <= n"):
        CorpusSettings(part=part)


@pytest.mark.parametrize("bad", [{"name": ""}, {"tokens": 0}, {"tokens": "5"}, {"split": "train"}])
def test_settings_are_strict(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CorpusSettings.model_validate(bad)


def test_published_types_need_no_data() -> None:
    assert (KNOWN["ptb"].types, KNOWN["wikitext-2"].types, KNOWN["wikitext-103"].types) == (10_000, 33_278, 267_735)


def test_a_file_without_a_hash_is_known_by_its_counts(
    tiny: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the training text of WikiText-103 is, whose held-out texts are those of WikiText-2."""
    small = corpora.KNOWN[tiny]
    train = replace(small.files["train"], sha256=None, tokens=4)
    large = replace(small, title="A large corpus", types=3, files={**small.files, "train": train})
    monkeypatch.setattr(corpora, "KNOWN", {"tiny": small, "large": large})
    folder = fill(tmp_path / "data" / "large", *TINY)
    with pytest.raises(DataError, match="these are the files of tiny, not of large"):
        find("large", cache, tmp_path / "data")
    settings = CorpusSettings(name="large"), VocabularySettings()
    (folder / TINY[0]).write_text("a b\n")
    with pytest.raises(DataError, match=r"tiny\.train\.txt: 3 tokens with <eos>, 4 published"):
        open_dataset(*settings, data=tmp_path / "data", cache=cache)
    (folder / TINY[0]).write_text("a b b\n")
    assert open_dataset(*settings, data=tmp_path / "data", cache=cache).splits["train"].tokens == 4
    (folder / TINY[0]).write_text("a b c\n")
    with pytest.raises(DataError, match=r"tiny\.train\.txt: 4 types with <eos>, 3 published"):
        open_dataset(*settings, data=tmp_path / "data", cache=cache)
    assert find(folder, cache).name == "large/"  # a text of one's own, for all that its hashes say


@pytest.mark.parametrize("below", ["tiny", "."])
@pytest.mark.parametrize("named", ["option", "environment"])
def test_a_published_corpus_is_found(
    tiny: str, below: str, named: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "data" / below, *TINY)
    if named == "environment":
        monkeypatch.setenv("REEFKNOT_DATA", str(tmp_path / "data"))
    found = find(tiny, cache, tmp_path / "data" if named == "option" else None)
    assert found.known == corpora.KNOWN[tiny]
    assert {split: path.name for split, path in found.files.items()} == dict(zip(corpora.SPLITS, TINY, strict=True))


def test_no_data_folder_says_what_to_put_where(tiny: str, cache: Path) -> None:
    with pytest.raises(DataError, match=r"put tiny\.train\.txt, .* into DIR/tiny/ .*--data DIR or REEFKNOT_DATA"):
        find(tiny, cache)


def test_a_missing_file_is_named(tiny: str, cache: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "data", *TINY[:2])
    with pytest.raises(DataError, match=r"tiny is not complete in .*data: tiny\.test\.txt not found; put"):
        find(tiny, cache, folder)


def test_a_changed_file_is_refused_with_both_hashes(tiny: str, cache: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "data", *TINY)
    (folder / TINY[1]).write_bytes(b"something else\n")
    expected = corpora.KNOWN[tiny].files["valid"].sha256
    found = hashlib.sha256(b"something else\n").hexdigest()
    with pytest.raises(DataError, match=rf"tiny\.valid\.txt: .*{expected} expected, {found} found"):
        find(tiny, cache, folder)


def test_a_folder_is_recognised_by_its_hashes_not_by_its_name(tiny: str, cache: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "mine", *TINY)
    found = find(folder, cache)
    assert (found.name, found.origin) == ("tiny", "A tiny corpus, recognised by SHA-256")
    other = fill(tmp_path / "tiny", "train.txt", "valid.txt", "test.txt")
    assert find(other, cache).known is None
    assert find(other, cache).name == "tiny/"


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "valid.txt", "test.txt"),
        ("train", "dev", "test"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("Train.txt", "validation.txt", "a.b.test"),
    ],
)
def test_usual_names_are_found(names: tuple[str, ...], cache: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "mine", *names, "README.md", "train.txt.bak", ".train.txt", "strain.txt")
    found = find(folder, cache)
    assert tuple(path.name for path in found.files.values()) == names
    assert found.known is None


def test_two_candidates_or_none(cache: Path, tmp_path: Path) -> None:
    folder = fill(tmp_path / "mine", "train.txt", "valid.txt", "dev.txt", "notes")
    with pytest.raises(DataError, match=r"dev\.txt, valid\.txt could each be the valid text; looked for"):
        find(folder, cache)
    (folder / "dev.txt").unlink()
    with pytest.raises(DataError, match=r"nothing there is the test text; .* holds notes, train\.txt, valid\.txt"):
        find(folder, cache)


@pytest.mark.parametrize("name", ["no-such-folder", "~nobody-of-that-name/x", "a\0b", "x" * 10_000])
def test_a_name_that_is_no_corpus(name: str, cache: Path) -> None:
    with pytest.raises(
        DataError, match=r"neither a known corpus \(python-docs, ptb, wikitext-2, wikitext-103, .*\) nor a folder"
    ) as error:
        find(name, cache)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("lines", [4, 5, 7, 12])
def test_parts_follow_each_other_and_are_the_whole(lines: int, corpus: Callable[..., Path], cache: Path) -> None:
    folder = corpus(train=b"".join(b"%d\n" % number for number in range(1, lines + 1)))
    parts = [list(find(folder, cache, part=f"{k}/4").lines("train")) for k in (1, 2, 3, 4)]
    assert [int(line.words[0]) for line in chain(*parts)] == list(range(1, lines + 1))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_part_without_lines(corpus: Callable[..., Path], cache: Path) -> None:
    with pytest.raises(DataError, match=r"train\.txt: part 1/9 of 4 lines is empty; use fewer parts"):
        find(corpus(), cache, part="1/9").lines("train")


def test_a_part_leaves_held_out_texts_whole(corpus: Callable[..., Path], cache: Path) -> None:
    found = find(corpus(), cache, part="1/2")
    assert [line.number for line in found.lines("train")] == [1, 2]
    assert [line.number for line in found.lines("valid")] == [1, 2]
