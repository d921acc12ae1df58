"""BBC news: the archive and the unpacked folder give the same text, split by a hash of each article."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from reefknot.errors import DataError
from reefknot.lab.text.corpora import bbc
from reefknot.lab.text.corpus import CorpusSettings, find_corpus

TOPICS = ("business", "entertainment", "politics", "sport", "tech")
ARTICLES = {
    f"{topic}/{number:03}.txt": f"{topic.title()} NEWS\n\nArticle {number}, on {topic}.\n".encode()
    for topic in TOPICS
    for number in range(1, 21)
}
ARTICLES["tech/099.txt"] = ARTICLES["sport/007.txt"]  # a copy
ARTICLES["sport/199.txt"] = b"It cost \xa320.\n"  # Latin-1


@pytest.fixture(autouse=True)
def unpublished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the published hashes: the archive of these tests is not the published one."""
    monkeypatch.setattr(bbc, "BBC", replace(bbc.BBC, sha256={}))


def read_texts(data: Path, cache: Path) -> dict[str, list[str]]:
    files = find_corpus(CorpusSettings(name="bbc"), data=data, cache=cache)
    return {split: path.read_text(encoding="utf-8").splitlines() for split, path in files.files.items()}


def write_archive(folder: Path) -> None:
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "bbc-fulltext.zip", "w") as archive:
        archive.writestr("bbc-fulltext/bbc/README.TXT", "not an article")
        for name, article in reversed(ARTICLES.items()):
            archive.writestr(f"bbc-fulltext/bbc/{name}", article)


def write_folder(folder: Path) -> None:
    for name, article in ARTICLES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(article)


def test_every_paragraph_is_a_line(tmp_path: Path, cache: Path) -> None:
    write_archive(tmp_path / "bbc-news")
    texts = read_texts(tmp_path, cache)
    everything = [line for lines in texts.values() for line in lines]
    assert len(everything) == 2 * (len(ARTICLES) - 1) + 1
    assert "article 3 , on politics ." in everything
    assert "it cost £ 20 ." in everything
    assert all(texts.values())
    assert len(texts["train"]) > 0.6 * len(everything)


def test_copies_of_an_article_are_in_one_split(tmp_path: Path, cache: Path) -> None:
    write_archive(tmp_path / "bbc")
    texts = read_texts(tmp_path, cache)
    assert sorted(lines.count("article 7 , on sport .") for lines in texts.values()) == [0, 0, 2]


@pytest.mark.parametrize("below", ["bbc", "bbc/bbc", "bbc-news/bbc-fulltext/bbc", "."])
def test_unpacked_folder_gives_the_same_text_as_the_archive(tmp_path: Path, cache: Path, below: str) -> None:
    write_archive(tmp_path / "packed")
    write_folder(tmp_path / "unpacked" / below)
    assert read_texts(tmp_path / "packed", cache) == read_texts(tmp_path / "unpacked", cache)


def test_damaged_archive_is_rejected(tmp_path: Path, cache: Path) -> None:
    tmp_path.joinpath("bbc-fulltext.zip").write_bytes(b"PK no archive")
    with pytest.raises(DataError, match=r"bbc-fulltext\.zip: cannot be read: .*; download it again"):
        read_texts(tmp_path, cache)
