"""Multi30k, Tatoeba and WMT: which files are read, and how they are split."""

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
    """Remove the published hashes: the files of these tests are not the published ones."""
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    for corpus in PAIRED.values():
        assert isinstance(corpus, PreparedCorpus)
        register(replace(corpus, sha256={}))


def settings(name: str, reverse: bool = False) -> CorpusSettings:
    source, target = reversed(PAIRED[name].languages) if reverse else PAIRED[name].languages
    return CorpusSettings(name=name, pairs=PairsSettings(source=source, target=target))


def read_texts(corpus: PairFiles) -> dict[str, list[str]]:
    return {split: [path.read_text(encoding="utf-8") for path in files] for split, files in corpus.files.items()}


@pytest.mark.parametrize(
    ("name", "below", "stems", "language"),
    [
        ("multi30k", "multi30k/tok", ("train.lc.norm.tok", "val.lc.norm.tok", "test_2016_flickr.lc.norm.tok"), "de"),
        ("multi30k-raw", "multi30k/raw", ("train", "val", "test_2016_flickr"), "de"),
        ("wmt14-en-de", "wmt14-en-de", ("train", "newstest2013", "newstest2014"), "de"),
        ("wmt14-en-fr", "wmt14-en-fr", ("train", "newstest2013", "newstest2014"), "fr"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_each_split_is_read_from_two_files(
    name: str, below: str, stems: tuple[str, ...], language: str, packed: bool, tmp_path: Path, unpublished: None
) -> None:
    with pytest.raises(CorpusNotFound, match=rf"expected .*/{below}/{stems[0]}\.en, .*, or the same with \.gz\."):
        find_pairs(settings(name), data=tmp_path, cache=tmp_path / "cache")
    folder = tmp_path / below
    folder.mkdir(parents=True)
    expected = {}
    for split, stem in zip(("train", "valid", "test"), stems, strict=True):
        sides = [f"{split} {side} 1\n\n{split} {side} 3\n" for side in ("en", language)]
        for side, text in zip(("en", language), sides, strict=True):
            path, data = folder / f"{stem}.{side}", text.encode()
            (path.with_name(f"{path.name}.gz") if packed else path).write_bytes(gzip.compress(data) if packed else data)
        expected[split] = sides
    assert read_texts(find_pairs(settings(name), data=tmp_path, cache=tmp_path / "cache")) == expected
    reverse = read_texts(find_pairs(settings(name, reverse=True), data=tmp_path, cache=tmp_path / "cache"))
    assert reverse == {split: sides[::-1] for split, sides in expected.items()}


def test_file_with_another_hash_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "multi30k" / "tok"
    folder.mkdir(parents=True)
    for stem in ("train", "val", "test_2016_flickr"):
        for language in ("en", "de"):
            (folder / f"{stem}.lc.norm.tok.{language}").write_text("x\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"train\.lc\.norm\.tok\.en is not the published multi30k file"):
        find_pairs(settings("multi30k"), data=tmp_path, cache=tmp_path / "cache")


def write_archive(folder: Path, text: str, name: str = "deu.txt") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "deu-eng.zip", "w") as file:
        file.writestr(name, text)


def letters_only(sentence: str) -> str:
    return re.sub(r"[\W_]", "", sentence.casefold())


def tatoeba_pairs(lines: list[str], folder: Path) -> dict[str, list[tuple[str, ...]]]:
    """Write a Tatoeba archive with these lines and return the pairs of each split."""
    write_archive(folder / "tatoeba", "".join(f"{line}\n" for line in lines))
    texts = read_texts(find_pairs(settings("tatoeba"), data=folder, cache=folder / "cache"))
    return {split: list(zip(*(side.split("\n")[:-1] for side in sides), strict=True)) for split, sides in texts.items()}


def assert_nothing_leaks(splits: list[list[tuple[str, ...]]]) -> None:
    """Check that no sentence is in two splits, and no English sentence twice in valid or test."""
    for side in (0, 1):
        sentences = [{letters_only(pair[side]) for pair in pairs} for pairs in splits]
        assert sum(map(len, sentences)) == len(set.union(*sentences))
    for pairs in splits[1:]:
        assert len({letters_only(pair[0]) for pair in pairs}) == len(pairs)


def test_tatoeba_splits_keep_linked_sentences_together(
    tmp_path: Path, unpublished: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tatoeba, "_NUM_HELD_OUT", 5)
    # The first two lines of a number share their English sentence, the last two their German one.
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
    # A hash selects which translation is held out, whatever their order in the file.
    assert {pair[1].split()[0] for pair in splits["valid"] + splits["test"]} == {"Das", "Es", "es"}
    others = tatoeba_pairs(lines[::-1], tmp_path / "other")
    assert {split: set(pairs) for split, pairs in others.items()} == {k: set(pairs) for k, pairs in splits.items()}


def test_tatoeba_long_chain_stays_in_one_split(
    tmp_path: Path, unpublished: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tatoeba, "_NUM_HELD_OUT", 1)
    chain = [f"English {n}\tGerman {m}" for n in range(40) for m in (n, n + 1)]
    splits = tatoeba_pairs([*chain[::3], *chain[1::3], *chain[2::3], "Yes.\tJa.", "No.\tNein."], tmp_path)
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 1, "valid": 1, "test": 40}
    assert_nothing_leaks(list(splits.values()))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("a\tb\n", "other.txt", r"deu-eng\.zip does not contain deu\.txt"),
        ("a\tb\nc\n", "deu.txt", r"deu-eng\.zip, line 2: not English, tab, German"),
    ],
)
def test_damaged_archive_is_rejected(text: str, name: str, message: str, tmp_path: Path, unpublished: None) -> None:
    write_archive(tmp_path / "tatoeba", text, name)
    with pytest.raises(DataError, match=message):
        find_pairs(settings("tatoeba"), data=tmp_path, cache=tmp_path / "cache")


@pytest.mark.skipif(not os.environ.get("REEFKNOT_DATA"), reason="REEFKNOT_DATA names no folder of real corpora")
@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("multi30k", (29_000, 1_014, 1_000), ((377_534, 360_706), (13_308, 12_828), (12_968, 12_103))),
        ("multi30k-raw", (29_000, 1_014, 1_000), None),
        ("tatoeba", (164_418, 2_156, 2_165), None),
    ],
)
def test_real_parallel_corpora_have_the_published_counts(
    name: str, sizes: tuple[int, ...], words: tuple[tuple[int, int], ...] | None, tmp_path: Path
) -> None:
    try:
        corpus = find_pairs(settings(name), data=None, cache=tmp_path)
    except CorpusNotFound:
        pytest.skip(f"REEFKNOT_DATA names no folder that holds {name}")
    splits = [list(corpus.read_pairs(split)) for split in corpus.files]
    assert tuple(map(len, splits)) == sizes
    if words:
        assert (
            tuple((sum(len(p.source) for p in pairs), sum(len(p.target) for p in pairs)) for pairs in splits) == words
        )
    if name == "tatoeba":
        assert_nothing_leaks([[(" ".join(pair.source), " ".join(pair.target)) for pair in pairs] for pairs in splits])
