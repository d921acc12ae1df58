"""The Large Movie Review Dataset (Maas et al. 2011): 100,000 reviews of films.

Miyamoto & Cho (2016), whom Press & Wolf (2017) cite, published neither their split nor their tokenisation. Here all
reviews in the training folders, rated or not, are the training text. In the test folders, reviews with
even numbers are valid and reviews with odd numbers are test. A line is a paragraph in lower case with spaces around
punctuation marks.

The files are read from the folder aclImdb as it is published, or from one file of tab-separated id, rating and text for
each of its folders.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterator
from pathlib import Path

from reefknot.lab.text.prepared import Lines, PreparedCorpus, tokenise
from reefknot.lab.text.published import all_of

_FOLDERS = ("train/neg", "train/pos", "train/unsup", "test/neg", "test/pos")
_PACKED = {f"{folder.replace('/', '_')}.tsv.xz": folder for folder in _FOLDERS}
_BREAK = re.compile(r"<br\s*/?>")


def _files(folder: Path) -> list[Path]:
    if packed := all_of(folder, *_PACKED):
        return packed
    for root in (folder, folder / "aclImdb"):
        reviews = [sorted((root / name).glob("*_*.txt"), key=_number) for name in _FOLDERS]
        if all(reviews):
            return [path for paths in reviews for path in paths]
    return []


def _number(path: Path) -> tuple[int, str]:
    """Return the sort key of a file name, which has a number and a rating, such as 17_9.txt."""
    number = path.stem.partition("_")[0]
    return (int(number), path.name) if number.isdecimal() else (-1, path.name)


def _lines(files: list[Path]) -> Lines:
    for path in files:
        for split, text in _packed(path) if path.name in _PACKED else _published(path):
            for paragraph in _BREAK.split(text):
                if line := tokenise(paragraph):
                    yield split, line


def _packed(path: Path) -> Iterator[tuple[str, str]]:
    with lzma.open(path) as stream:
        for raw in stream:
            number, _, text = raw.decode().split("\t", 2)
            yield _split(_PACKED[path.name], int(number)), text


def _published(path: Path) -> Iterator[tuple[str, str]]:
    folder = "/".join(path.parts[-3:-1])
    yield _split(folder, _number(path)[0]), path.read_text(encoding="utf-8")


def _split(folder: str, number: int) -> str:
    if folder.startswith("train"):
        return "train"
    return "test" if number % 2 else "valid"


IMDB = PreparedCorpus(
    name="imdb",
    description="IMDB film reviews, lower-cased; valid and test are the even and the odd reviews of the test folders",
    how_to_get="It is published at https://ai.stanford.edu/~amaas/data/sentiment/.",
    expected=f"aclImdb, or {', '.join(_PACKED)}",
    folders=("imdb", "aclImdb"),
    files=_files,
    lines=_lines,
    sha256={
        "test_neg.tsv.xz": "f0f69824ddca93b18216d92db977241ec94f87346c7c6623aabca23ef7723d20",
        "test_pos.tsv.xz": "268b791be6509d84109968241f9634f06e1e164ad729f4109342a03b73aeeb6c",
        "train_neg.tsv.xz": "6953ff6e0602b52f64fbb00417c1474f62f16fb146b7902c3927b27e00c7f6db",
        "train_pos.tsv.xz": "f631130ca9ee818811e4df5ef045d3e6a3d1fded11631b9ae9b2d4ef3a795e19",
        "train_unsup.tsv.xz": "d88e6ed59310922fb8560df58941ca9ee3973d3b5314f2eea7ee19864226a8a6",
    },
)
