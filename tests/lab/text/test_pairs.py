"""Parallel text: which files are found, and which are refused in which words."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from reefknot.errors import DataError, SettingsError
from reefknot.lab.text.corpora import known_corpora
from reefknot.lab.text.corpus import CorpusSettings, PairFiles, PairsSettings, find_corpus, find_pairs
from reefknot.lab.text.pairs import Aligned

EN = b"a cat\na dog\n"
DE = b"eine Katze\nein Hund\n"
Find = Callable[[], PairFiles]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "corpus"
    place.mkdir()
    for split in ("train", "valid", "test"):
        (place / f"{split}.en").write_bytes(EN)
        (place / f"{split}.de").write_bytes(DE)
    return place


@pytest.fixture
def find(folder: Path, cache: Path) -> Find:
    settings = CorpusSettings(name=str(folder), pairs=PairsSettings(source="en", target="de"))
    return lambda: find_pairs(settings, data=None, cache=cache)


def words(corpus: PairFiles, split: str = "train") -> list[tuple[str, str]]:
    return [(" ".join(pair.source), " ".join(pair.target)) for pair in corpus.pairs(split)]


def replace(folder: Path, name: str, new: str, data: bytes) -> None:
    (folder / name).unlink()
    (folder / new).write_bytes(data)


def test_two_files_are_read_side_by_side_in_their_place(folder: Path, find: Find) -> None:
    found = find()
    assert words(found) == [("a cat", "eine Katze"), ("a dog", "ein Hund")]
    assert [(pair.number, pair.size) for pair in found.pairs("valid")] == [(1, 11), (2, 9)]
    assert found.files["train"] == Aligned(folder / "train.en", folder / "train.de")
    assert (found.name, found.origin) == ("corpus/", "a folder of parallel text")


def test_other_names_packed_files_and_columns_are_the_same_text(folder: Path, find: Find) -> None:
    plain, expected = find().hashes, words(find())
    for name, new, data in (
        ("train.en", "mine.train.en.txt", EN),
        ("train.de", "train.de.gz", gzip.compress(DE, mtime=0)),
        ("valid.en", "val.en", EN),
        ("valid.de", "DEV.de.txt.GZ", gzip.compress(DE, mtime=0)),
        ("test.en", "test.tsv", b"a cat\teine Katze\r\na dog\tein Hund"),
    ):
        replace(folder, name, new, data)
    (folder / "test.de").unlink()
    found = find()
    assert found.hashes == plain
    assert [words(found, split) for split in found.files] == [expected] * 3


def test_files_of_different_length_are_refused_with_both_counts(folder: Path, find: Find) -> None:
    (folder / "valid.de").write_bytes(DE + b"\n")
    sentence = r"valid\.en has 2 lines and \S*valid\.de has 3: they are not aligned"
    with pytest.raises(DataError, match=sentence):
        find().pairs("valid")
    replace(folder, "valid.en", "valid.en.gz", gzip.compress(EN, mtime=0))
    with pytest.raises(DataError, match=sentence.replace(r"\.en", r"\.en\.gz")):
        find()


@pytest.mark.parametrize("data", [DE.removesuffix(b"\n"), DE.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + DE])
def test_line_ends_and_marks_change_no_pair(data: bytes, folder: Path, find: Find) -> None:
    (folder / "train.de").write_bytes(data)
    assert words(find()) == [("a cat", "eine Katze"), ("a dog", "ein Hund")]


def test_only_a_newline_ends_a_line(folder: Path, find: Find) -> None:
    (folder / "train.de").write_bytes("eine\u2028 Katze\x0b\x0c\nein\x85 \rHund\n".encode())
    assert words(find()) == [("a cat", "eine\u2028 Katze"), ("a dog", "ein\x85 Hund")]


def test_an_empty_text_is_refused(folder: Path, find: Find) -> None:
    for language in ("en", "de"):
        (folder / f"test.{language}").write_bytes(b"")
    with pytest.raises(DataError, match=r"test\.en and \S*test\.de are empty: there is no test text"):
        find().pairs("test")


@pytest.mark.parametrize(
    ("new", "data", "sentence"),
    [
        ("train.de", b"eine \xff\nein\n", r"train\.de, line 1: byte 5 \(0xff\) is not valid UTF-8"),
        ("train.de", b"eine\nei\0n\n", r"train\.de, line 2: NUL byte"),
        ("train.de.gz", b"plain text", r"train\.de\.gz: cannot be read: Not a gzipped file"),
        ("train.de.gz", gzip.compress(DE, mtime=0)[:-9], r"train\.de\.gz: cannot be unpacked: .*; download it again"),
        (
            "train.de.gz",
            gzip.compress(b"\xff\nx\n", mtime=0),
            r"train\.de\.gz, line 1: byte 0 \(0xff\) is not valid UTF-8",
        ),
    ],
)
def test_what_is_no_text_is_refused(new: str, data: bytes, sentence: str, folder: Path, find: Find) -> None:
    replace(folder, "train.de", new, data)
    with pytest.raises(DataError, match=sentence):
        words(find())


@pytest.mark.parametrize(
    ("line", "columns"), [(b"", "1 column"), (b"no tab", "1 column"), (b"two\ttabs\there", "3 columns")]
)
def test_a_line_of_a_tsv_has_two_columns(line: bytes, columns: str, folder: Path, find: Find) -> None:
    (folder / "train.de").unlink()
    replace(folder, "train.en", "train.tsv", b"a\tb\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"train\.tsv, line 2: expected source, tab and target, found {columns}$"):
        find()


def test_missing_and_ambiguous_files_are_told(folder: Path, find: Find) -> None:
    (folder / "train.tsv").write_bytes(b"a\tb\n")
    with pytest.raises(DataError, match=r"train\.en, train\.tsv could each be a side of the train text"):
        find()
    (folder / "train.tsv").unlink()
    (folder / "test.de").unlink()
    with pytest.raises(DataError, match=r"no file is a side of the test text; .*test\.de.* or test\.tsv"):
        find()


def test_a_part_of_the_training_pairs(folder: Path, cache: Path) -> None:
    pairs = PairsSettings(source="en", target="de")
    found = find_pairs(CorpusSettings(name=str(folder), part="2/2", pairs=pairs), data=None, cache=cache)
    assert words(found) == [("a dog", "ein Hund")]
    assert len(words(found, "test")) == 2
    few = find_pairs(CorpusSettings(name=str(folder), part="1/3", pairs=pairs), data=None, cache=cache)
    with pytest.raises(DataError, match=r"part 1/3 of 2 lines is empty"):
        few.pairs("train")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"name": "multi30k"}, "multi30k is parallel text; set corpus.pairs.source and corpus.pairs.target"),
        ({"name": "ptb", "pairs": {}}, "ptb is not parallel text; use multi30k, "),
        ({"name": "tatoeba", "pairs": {"target": "fr"}}, "tatoeba has en and de, not en and fr"),
        ({"name": "x", "tokens": 5, "pairs": {}}, "tokens would cut a pair in two"),
        ({"name": "x", "pairs": {"target": "en"}}, "source and target are both en"),
        ({"name": "x", "pairs": {"target": "../de"}}, "String should match pattern"),
        ({"name": "x", "pairs": {"ratio": 1.0}}, "greater than 1"),
        ({"name": "x", "pairs": {"longest": 0}}, "greater than or equal to 1"),
    ],
)
def test_settings_without_a_meaning(settings: dict[str, object], sentence: str) -> None:
    pairs = settings.get("pairs")
    given = settings if pairs is None else settings | {"pairs": {"source": "en", "target": "de"} | dict(pairs)}  # type: ignore[call-overload]
    with pytest.raises(ValidationError, match=sentence):
        CorpusSettings.model_validate(given)


def test_one_text_is_not_two(folder: Path, cache: Path) -> None:
    pairs = CorpusSettings(name=str(folder), pairs=PairsSettings(source="en", target="de"))
    with pytest.raises(SettingsError, match=r"is parallel text; leave corpus\.pairs out to read one text"):
        find_corpus(pairs, data=None, cache=cache)
    with pytest.raises(SettingsError, match=r"is one text; set corpus\.pairs\.source and corpus\.pairs\.target"):
        find_pairs(CorpusSettings(name=str(folder)), data=None, cache=cache)
    wrong = CorpusSettings(name="nowhere", pairs=PairsSettings(source="en", target="de"))
    with pytest.raises(DataError, match=r"is neither a known corpus \(.*tatoeba.*\) nor a folder"):
        find_pairs(wrong, data=None, cache=cache)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [(0, 3, "empty side"), (0, 0, "empty side"), (9, 10, None), (11, 9, "too long"), (2, 6, None), (7, 2, "ratio")],
)
def test_pairs_are_left_out_for_one_reason(source: int, target: int, reason: str | None) -> None:
    settings = PairsSettings(source="en", target="de", longest=10, ratio=3.0)
    assert settings.leaves_out(source, target) == settings.leaves_out(target, source) == reason
    assert PairsSettings(source="en", target="de", longest=None).leaves_out(1, 10**6) is None


def test_corpora_of_pairs_have_two_languages() -> None:
    assert {len(corpus.languages) for corpus in known_corpora().values()} == {0, 2}
