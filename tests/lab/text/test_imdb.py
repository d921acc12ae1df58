"""Film reviews: both file layouts give the same text, split by folder and number."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from reefknot.errors import CorpusNotFound, DataError
from reefknot.lab.text.corpora import imdb
from reefknot.lab.text.corpus import CorpusSettings, find_corpus

REVIEWS = {
    ("train", "pos"): {0: "Great!<br /><br />A film.", 10: "Tenth\u2028of them", 9: "Ninth"},
    ("train", "neg"): {3: "Bad\tfilm<br>indeed"},
    ("train", "unsup"): {0: "No rating"},
    ("test", "pos"): {0: "Even one", 1: "Odd one"},
    ("test", "neg"): {2: "Even two <br/> lines", 7: "<br />"},
}
EXPECTED = {
    "train": "bad film\nindeed\ngreat !\na film .\nninth\ntenth of them\nno rating\n",
    "valid": "even two\nlines\neven one\n",
    "test": "odd one\n",
}


@pytest.fixture(autouse=True)
def unpublished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the published hashes: the files of these tests are not the published ones."""
    monkeypatch.setattr(imdb, "IMDB", replace(imdb.IMDB, sha256={}))


def read_texts(data: Path, cache: Path) -> dict[str, str]:
    files = find_corpus(CorpusSettings(name="imdb"), data=data, cache=cache)
    return {split: path.read_text(encoding="utf-8") for split, path in files.files.items()}


def write_packed(folder: Path) -> None:
    folder.mkdir(parents=True)
    for (part, kind), reviews in REVIEWS.items():
        rows = (f"{number}\t7\t{text.replace(chr(9), ' ')}\n" for number, text in sorted(reviews.items()))
        (folder / f"{part}_{kind}.tsv.xz").write_bytes(lzma.compress("".join(rows).encode()))


def write_unpacked(folder: Path) -> None:
    for parts, reviews in REVIEWS.items():
        folder_of_kind = folder.joinpath(*parts)
        folder_of_kind.mkdir(parents=True)
        (folder_of_kind / "urls_pos.txt.bak").write_text("http", encoding="utf-8")
        for number, text in reviews.items():
            (folder_of_kind / f"{number}_7.txt").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("below", ["imdb", "."])
def test_packed_files_give_the_expected_texts(tmp_path: Path, cache: Path, below: str) -> None:
    write_packed(tmp_path / "data" / below)
    assert read_texts(tmp_path / "data", cache) == EXPECTED


@pytest.mark.parametrize("below", ["aclImdb", "imdb", "imdb/aclImdb", "."])
def test_published_folder_gives_the_expected_texts(tmp_path: Path, cache: Path, below: str) -> None:
    write_unpacked(tmp_path / "data" / below)
    assert read_texts(tmp_path / "data", cache) == EXPECTED


def test_missing_file_is_rejected(tmp_path: Path, cache: Path) -> None:
    write_packed(tmp_path / "imdb")
    (tmp_path / "imdb" / "test_pos.tsv.xz").unlink()
    with pytest.raises(CorpusNotFound, match=r"expected .*/imdb/aclImdb, or train_neg\.tsv\.xz, "):
        read_texts(tmp_path, cache)


@pytest.mark.parametrize("damage", [b"not xz", lzma.compress(b"no tabs here\n"), lzma.compress(b"x\t7\ttext\n")])
def test_damaged_file_is_rejected(tmp_path: Path, cache: Path, damage: bytes) -> None:
    write_packed(tmp_path / "imdb")
    (tmp_path / "imdb" / "train_pos.tsv.xz").write_bytes(damage)
    with pytest.raises(DataError, match=r"imdb: cannot be read: .*; download it again"):
        read_texts(tmp_path, cache)
