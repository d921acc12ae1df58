"""Multi30k, Tatoeba and WMT: the files they are read from, and how they are split."""

from __future__ import annotations

import gzip
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from reefknot.errors import CorpusNotFound, DataError
from reefknot.lab.text.corpora import parallel_corpora, tatoeba
from reefknot.lab.text.corpus import CorpusSettings, PairFiles, PairsSettings, find_pairs
from reefknot.lab.text.prepared import PreparedCorpus
from reefknot.lab.text.published import Corpus

PAIRED = parallel_corpora()


@pytest.fixture
def unpublished(monkeypatch: pytest.MonkeyPatch, register: Callable[[Corpus], None]) -> None:
    """The tests' own files have other hashes."""
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    for corpus in PAIRED.values():
        assert isinstance(corpus, PreparedCorpus)
        register(replace(corpus, sha256={}))


def settings(name: str, reverse: bool = False) -> CorpusSettings:
    source, target = reversed(PAIRED[name].languages) if reverse else PAIRED[name].languages
    return CorpusSettings(name=name, pairs=PairsSettings(source=source, target=target))


def texts(found: PairFiles) -> dict[str, list[str]]:
    return {split: [path.read_text(encoding="utf-8") for path in files] for split, files in found.files.items()}


@pytest.mark.parametrize(
    ("name", "place", "stems", "language"),
    [
        ("multi30k", "multi30k/tok", ("train.lc.norm.tok", "val.lc.norm.tok", "test_2016_flickr.lc.norm.tok"), "de"),
        ("multi30k-raw", "multi30k/raw", ("train", "val", "test_2016_flickr"), "de"),
        ("wmt14-en-de", "wmt14-en-de", ("train", "newstest2013", "newstest2014"), "de"),
        ("wmt14-en-fr", "wmt14-en-fr", ("train", "newstest2013", "newstest2014"), "fr"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_two_files_per_split(
    name: str, place: str, stems: tuple[str, ...], language: str, packed: bool, tmp_path: Path, unpublished: None
) -> None:
    with pytest.raises(CorpusNotFound, match=rf"expected .*/{place}/{stems[0]}\.en, .*, or the same with \.gz\."):
        find_pairs(settings(name), data=tmp_path, cache=tmp_path / "cache")
    folder = tmp_path / place
    folder.mkdir(parents=True)
    expected = {}
    for split, stem in zip(("train", "valid", "test"), stems, strict=True):
        sides = [f"{split} {each} 1\n\n{split} {each} 3\n" for each in ("en", language)]
        for each, text in zip(("en", language), sides, strict=True):
            path, data = folder / f"{stem}.{each}", text.encode()
            (path.with_name(f"{path.name}.gz") if packed else path).write_bytes(gzip.compress(data) if packed else data)
        expected[split] = sides
    assert texts(find_pairs(settings(name), data=tmp_path, cache=tmp_path / "cache")) == expected
    reverse = texts(find_pairs(settings(name, reverse=True), data=tmp_path, cache=tmp_path / "cache"))
    assert reverse == {split: sides[::-1] for split, sides in expected.items()}


def test_another_file_is_not_the_published_one(tmp_path: Path) -> None:
    folder = tmp_path / "multi30k" / "tok"
    folder.mkdir(parents=True)
    for stem in ("train", "val", "test_2016_flickr"):
        for language in ("en", "de"):
            (folder / f"{stem}.lc.norm.tok.{language}").write_text("x\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"train\.lc\.norm\.tok\.en is not the published multi30k file"):
        find_pairs(settings("multi30k"), data=tmp_path, cache=tmp_path / "cache")


def archive(folder: Path, text: str, name: str = "deu.txt") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "deu-eng.zip", "w") as file:
        file.writestr(name, text)


def bare(sentence: str) -> str:
    return re.sub(r"[\W_]", "", sentence.casefold())


def tatoeba_pairs(lines: list[str], folder: Path) -> dict[str, list[tuple[str, ...]]]:
    archive(folder / "tatoeba", "".join(f"{line}\n" for line in lines))
    found = texts(find_pairs(settings("tatoeba"), data=folder, cache=folder / "cache"))
    return {split: list(zip(*(side.split("\n")[:-1] for side in sides), strict=True)) for split, sides in found.items()}


def assert_nothing_leaks(splits: list[list[tuple[str, ...]]]) -> None:
    """No bare sentence of either language in two splits, no bare English sentence twice in valid or test."""
    for side in (0, 1):
        sentences = [{bare(pair[side]) for pair in pairs} for pairs in splits]
        assert sum(map(len, sentences)) == len(set.union(*sentences))
    for pairs in splits[1:]:
        assert len({bare(pair[0]) for pair in pairs}) == len(pairs)


def test_tatoeba_is_split_by_components(tmp_path: Path, unpublished: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tatoeba, "_HELD_OUT", 5)
    # The first two of each number are one English sentence, the last two one German sentence: three are a component.
    lines = [
        line
        for n in range(30)
        for line in (f"It is {n}.\tDas ist {n}.", f"it is {n}!\tEs heißt {n}.", f"It's called {n}.\tes heisst: {n}")
    ]
    splits = tatoeba_pairs(lines, tmp_path / "one")
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 60, "valid": 10, "test": 10}
    assert_nothing_leaks(list(splits.values()))
    numbers = {split: {re.sub(r"\D", "", pair[0]) for pair in pairs} for split, pairs in splits.items()}
    assert {split: len(names) for split, names in numbers.items()} == {"train": 20, "valid": 5, "test": 5}
    together = ["\t".join(pair) for pairs in splits.values() for pair in pairs]
    assert len(set(together)) == len(together)
    assert set(together) < set(lines)
    # Of two translations a hash keeps one, now the first and now the second, wherever they stand in the file.
    assert {pair[1].split()[0] for pair in splits["valid"] + splits["test"]} == {"Das", "Es", "es"}
    others = tatoeba_pairs(lines[::-1], tmp_path / "other")
    assert {split: set(pairs) for split, pairs in others.items()} == {k: set(pairs) for k, pairs in splits.items()}


def test_tatoeba_follows_long_chains(tmp_path: Path, unpublished: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tatoeba, "_HELD_OUT", 1)
    chain = [f"English {n}\tGerman {m}" for n in range(40) for m in (n, n + 1)]
    splits = tatoeba_pairs([*chain[::3], *chain[1::3], *chain[2::3], "Yes.\tJa.", "No.\tNein."], tmp_path)
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 1, "valid": 1, "test": 40}
    assert_nothing_leaks(list(splits.values()))


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("a\tb\n", "other.txt", r"deu-eng\.zip does not contain deu\.txt"),
        ("a\tb\nc\n", "deu.txt", r"deu-eng\.zip, line 2: not English, tab, German"),
    ],
)
def test_a_damaged_archive(text: str, name: str, sentence: str, tmp_path: Path, unpublished: None) -> None:
    archive(tmp_path / "tatoeba", text, name)
    with pytest.raises(DataError, match=sentence):
        find_pairs(settings("tatoeba"), data=tmp_path, cache=tmp_path / "cache")


@pytest.mark.skipif(not os.environ.get("REEFKNOT_DATA"), reason="REEFKNOT_DATA names no folder of real corpora")
@pytest.mark.parametrize(
    ("name", "pairs", "words"),
    [
        ("multi30k", (29_000, 1_014, 1_000), ((377_534, 360_706), (13_308, 12_828), (12_968, 12_103))),
        ("multi30k-raw", (29_000, 1_014, 1_000), None),
        ("tatoeba", (164_418, 2_156, 2_165), None),
    ],
)
def test_published_counts(
    name: str, pairs: tuple[int, ...], words: tuple[tuple[int, int], ...] | None, tmp_path: Path
) -> None:
    try:
        found = find_pairs(settings(name), data=None, cache=tmp_path)
    except CorpusNotFound:
        pytest.skip(f"REEFKNOT_DATA names no folder that holds {name}")
    read = [list(found.pairs(split)) for split in found.files]
    assert tuple(map(len, read)) == pairs
    if words:
        assert tuple((sum(len(p.source) for p in each), sum(len(p.target) for p in each)) for each in read) == words
    if name == "tatoeba":
        assert_nothing_leaks([[(" ".join(pair.source), " ".join(pair.target)) for pair in each] for each in read])
