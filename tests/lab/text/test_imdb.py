"""Film reviews: one text from either layout of the files, split by folder and number."""

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
    """The tests' own files have other hashes."""
    monkeypatch.setattr(imdb, "IMDB", replace(imdb.IMDB, sha256={}))


def texts(data: Path, cache: Path) -> dict[str, str]:
    found = find_corpus(CorpusSettings(name="imdb"), data=data, cache=cache)
    return {split: path.read_text(encoding="utf-8") for split, path in found.files.items()}


def pack(folder: Path) -> None:
    folder.mkdir(parents=True)
    for (part, kind), reviews in REVIEWS.items():
        rows = (f"{number}\t7\t{text.replace(chr(9), ' ')}\n" for number, text in sorted(reviews.items()))
        (folder / f"{part}_{kind}.tsv.xz").write_bytes(lzma.compress("".join(rows).encode()))


def unpack(folder: Path) -> None:
    for parts, reviews in REVIEWS.items():
        place = folder.joinpath(*parts)
        place.mkdir(parents=True)
        (place / "urls_pos.txt.bak").write_text("http", encoding="utf-8")
        for number, text in reviews.items():
            (place / f"{number}_7.txt").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("place", ["imdb", "."])
def test_packed_files(tmp_path: Path, cache: Path, place: str) -> None:
    pack(tmp_path / "data" / place)
    assert texts(tmp_path / "data", cache) == EXPECTED


@pytest.mark.parametrize("place", ["aclImdb", "imdb", "imdb/aclImdb", "."])
def test_the_folder_as_it_is_published(tmp_path: Path, cache: Path, place: str) -> None:
    unpack(tmp_path / "data" / place)
    assert texts(tmp_path / "data", cache) == EXPECTED


def test_a_missing_part(tmp_path: Path, cache: Path) -> None:
    pack(tmp_path / "imdb")
    (tmp_path / "imdb" / "test_pos.tsv.xz").unlink()
    with pytest.raises(CorpusNotFound, match=r"expected .*/imdb/aclImdb, or train_neg\.tsv\.xz, "):
        texts(tmp_path, cache)


@pytest.mark.parametrize("damage", [b"not xz", lzma.compress(b"no tabs here\n"), lzma.compress(b"x\t7\ttext\n")])
def test_damage_is_told(tmp_path: Path, cache: Path, damage: bytes) -> None:
    pack(tmp_path / "imdb")
    (tmp_path / "imdb" / "train_pos.tsv.xz").write_bytes(damage)
    with pytest.raises(DataError, match=r"imdb: cannot be read: .*; download it again"):
        texts(tmp_path, cache)
