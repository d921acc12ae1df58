"""The Large Movie Review Dataset (Maas et al. 2011): 100,000 reviews of films.

A line of the corpus is a paragraph in lower case with spaces around punctuation marks. All reviews in the training
folders, rated or not, are the training text. In the test folders, reviews with even numbers are the validation text
and reviews with odd numbers are the test text. The split is ours, because Miyamoto & Cho (2016), whom Press & Wolf
(2017) cite, published neither their split nor their tokenisation.

The files are read from the folder aclImdb as it is published, or from one file of tab-separated id, rating and text for
each of its folders.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from reefknot.lab.text.prepared import NamedLines, PreparedCorpus, tokenise
from reefknot.lab.text.published import find_all_files

_FOLDERS = ("train/neg", "train/pos", "train/unsup", "test/neg", "test/pos")
_TSV_FOLDERS = {f"{folder.replace('/', '_')}.tsv.xz": folder for folder in _FOLDERS}  # by the name of the TSV file
_LINE_BREAK = re.compile(r"<br\s*/?>")


def _find_files(folder: Path) -> list[Path]:
    """Return the TSV files, or all reviews, sorted by folder and number."""
    tsv_paths = find_all_files(folder, *_TSV_FOLDERS)
    if tsv_paths:
        return tsv_paths
    for root in (folder, folder / "aclImdb"):
        reviews_by_folder = [sorted((root / name).glob("*_*.txt"), key=_sort_key) for name in _FOLDERS]
        if all(reviews_by_folder):
            return [path for reviews in reviews_by_folder for path in reviews]
    return []


def _sort_key(path: Path) -> tuple[int, str]:
    """Return the number and the name of a file, such as (17, "17_9.txt") for review 17 with the rating 9."""
    number, _, _ = path.stem.partition("_")
    if not number.isdecimal():
        return -1, path.name
    return int(number), path.name


def _read_lines(files: list[Path]) -> NamedLines:
    for path in files:
        reviews: Iterable[tuple[str, str]]
        if path.name in _TSV_FOLDERS:
            reviews = _read_tsv(path)
        else:
            reviews = [_read_review(path)]
        for split, text in reviews:
            for paragraph in _LINE_BREAK.split(text):
                line = tokenise(paragraph)
                if line:
                    yield split, line


def _read_tsv(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the split and the text of every review in a file."""
    with lzma.open(path) as file:
        for line in file:
            review_number, _, text = line.decode().split("\t", 2)
            split = _choose_split(_TSV_FOLDERS[path.name], int(review_number))
            yield split, text


def _read_review(path: Path) -> tuple[str, str]:
    """Return the split and the text of a published review."""
    folder = "/".join(path.parts[-3:-1])
    review_number, _ = _sort_key(path)
    split = _choose_split(folder, review_number)
    return split, path.read_text(encoding="utf-8")


def _choose_split(folder: str, review_number: int) -> str:
    if folder.startswith("train"):
        return "train"
    if review_number % 2 == 0:
        return "valid"
    return "test"


IMDB = PreparedCorpus(
    name="imdb",
    description="IMDB film reviews in lower case; of the test folders, even reviews are validation text, odd ones test",
    how_to_get="It is published at https://ai.stanford.edu/~amaas/data/sentiment/.",
    expected=f"aclImdb, or {', '.join(_TSV_FOLDERS)}",
    folders=("imdb", "aclImdb"),
    files=_find_files,
    lines=_read_lines,
    sha256={
        "test_neg.tsv.xz": "f0f69824ddca93b18216d92db977241ec94f87346c7c6623aabca23ef7723d20",
        "test_pos.tsv.xz": "268b791be6509d84109968241f9634f06e1e164ad729f4109342a03b73aeeb6c",
        "train_neg.tsv.xz": "6953ff6e0602b52f64fbb00417c1474f62f16fb146b7902c3927b27e00c7f6db",
        "train_pos.tsv.xz": "f631130ca9ee818811e4df5ef045d3e6a3d1fded11631b9ae9b2d4ef3a795e19",
        "train_unsup.tsv.xz": "d88e6ed59310922fb8560df58941ca9ee3973d3b5314f2eea7ee19864226a8a6",
    },
)
