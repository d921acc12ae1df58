"""News articles: one text from the archive or the folder, split by the hash of an article's words."""

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
    """The tests' own archive has another hash."""
    monkeypatch.setattr(bbc, "BBC", replace(bbc.BBC, sha256={}))


def texts(data: Path, cache: Path) -> dict[str, list[str]]:
    found = find_corpus(CorpusSettings(name="bbc"), data=data, cache=cache)
    return {split: path.read_text(encoding="utf-8").splitlines() for split, path in found.files.items()}


def pack(folder: Path) -> None:
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "bbc-fulltext.zip", "w") as archive:
        archive.writestr("bbc-fulltext/bbc/README.TXT", "not an article")
        for name, article in reversed(ARTICLES.items()):
            archive.writestr(f"bbc-fulltext/bbc/{name}", article)


def unpack(folder: Path) -> None:
    for name, article in ARTICLES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(article)


def test_paragraphs_of_articles(tmp_path: Path, cache: Path) -> None:
    pack(tmp_path / "bbc-news")
    found = texts(tmp_path, cache)
    everything = [line for lines in found.values() for line in lines]
    assert len(everything) == 2 * (len(ARTICLES) - 1) + 1
    assert "article 3 , on politics ." in everything
    assert "it cost £ 20 ." in everything
    assert all(found.values())
    assert len(found["train"]) > 0.6 * len(everything)


def test_an_article_and_its_copies_are_in_one_split(tmp_path: Path, cache: Path) -> None:
    pack(tmp_path / "bbc")
    found = texts(tmp_path, cache)
    assert sorted(lines.count("article 7 , on sport .") for lines in found.values()) == [0, 0, 2]


@pytest.mark.parametrize("place", ["bbc", "bbc/bbc", "bbc-news/bbc-fulltext/bbc", "."])
def test_the_folder_it_unpacks_to(tmp_path: Path, cache: Path, place: str) -> None:
    pack(tmp_path / "one")
    unpack(tmp_path / "two" / place)
    assert texts(tmp_path / "one", cache) == texts(tmp_path / "two", cache)


def test_a_damaged_archive(tmp_path: Path, cache: Path) -> None:
    tmp_path.joinpath("bbc-fulltext.zip").write_bytes(b"PK no archive")
    with pytest.raises(DataError, match=r"bbc-fulltext\.zip: cannot be read: .*; download it again"):
        texts(tmp_path, cache)
