"""Parallel text: which files are found, and which are rejected with which message."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from reefknot.errors import DataError, SettingsError
from reefknot.lab.text.corpora import known_corpora
from reefknot.lab.text.corpus import CorpusSettings, PairFiles, PairsSettings, find_corpus, find_pairs
from reefknot.lab.text.pairs import AlignedFiles

EN = b"a cat\na dog\n"
DE = b"eine Katze\nein Hund\n"
Find = Callable[[], PairFiles]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.en").write_bytes(EN)
        (folder / f"{split}.de").write_bytes(DE)
    return folder


@pytest.fixture
def find(folder: Path, cache: Path) -> Find:
    settings = CorpusSettings(name=str(folder), pairs=PairsSettings(source="en", target="de"))
    return lambda: find_pairs(settings, data=None, cache=cache)


def joined_pairs(corpus: PairFiles, split: str = "train") -> list[tuple[str, str]]:
    return [(" ".join(pair.source), " ".join(pair.target)) for pair in corpus.read_pairs(split)]


def replace_file(folder: Path, name: str, new: str, data: bytes) -> None:
    (folder / name).unlink()
    (folder / new).write_bytes(data)


def test_two_files_are_read_in_parallel(folder: Path, find: Find) -> None:
    corpus = find()
    assert joined_pairs(corpus) == [("a cat", "eine Katze"), ("a dog", "ein Hund")]
    assert [(pair.line_number, pair.size) for pair in corpus.read_pairs("valid")] == [(1, 11), (2, 9)]
    assert corpus.files["train"] == AlignedFiles(folder / "train.en", folder / "train.de")
    assert (corpus.name, corpus.origin) == ("corpus/", "a folder of parallel text")


def test_gzip_tsv_and_other_names_give_the_same_text(folder: Path, find: Find) -> None:
    plain, expected = find().hashes, joined_pairs(find())
    for name, new, data in (
        ("train.en", "mine.train.en.txt", EN),
        ("train.de", "train.de.gz", gzip.compress(DE, mtime=0)),
        ("valid.en", "val.en", EN),
        ("valid.de", "DEV.de.txt.GZ", gzip.compress(DE, mtime=0)),
        ("test.en", "test.tsv", b"a cat\teine Katze\r\na dog\tein Hund"),
    ):
        replace_file(folder, name, new, data)
    (folder / "test.de").unlink()
    corpus = find()
    assert corpus.hashes == plain
    assert [joined_pairs(corpus, split) for split in corpus.files] == [expected] * 3


def test_unequal_line_counts_are_rejected(folder: Path, find: Find) -> None:
    (folder / "valid.de").write_bytes(DE + b"\n")
    message = r"valid\.en has 2 lines and \S*valid\.de has 3: they are not aligned"
    with pytest.raises(DataError, match=message):
        find().read_pairs("valid")
    replace_file(folder, "valid.en", "valid.en.gz", gzip.compress(EN, mtime=0))
    with pytest.raises(DataError, match=message.replace(r"\.en", r"\.en\.gz")):
        find()


@pytest.mark.parametrize("data", [DE.removesuffix(b"\n"), DE.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + DE])
def test_line_ending_style_and_bom_change_no_pair(data: bytes, folder: Path, find: Find) -> None:
    (folder / "train.de").write_bytes(data)
    assert joined_pairs(find()) == [("a cat", "eine Katze"), ("a dog", "ein Hund")]


def test_only_a_newline_ends_a_line(folder: Path, find: Find) -> None:
    (folder / "train.de").write_bytes("eine\u2028 Katze\x0b\x0c\nein\x85 \rHund\n".encode())
    assert joined_pairs(find()) == [("a cat", "eine\u2028 Katze"), ("a dog", "ein\x85 Hund")]


def test_empty_text_is_rejected(folder: Path, find: Find) -> None:
    for language in ("en", "de"):
        (folder / f"test.{language}").write_bytes(b"")
    with pytest.raises(DataError, match=r"test\.en and \S*test\.de are empty: there is no test text"):
        find().read_pairs("test")


@pytest.mark.parametrize(
    ("new", "data", "message"),
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
def test_undecodable_file_is_rejected(new: str, data: bytes, message: str, folder: Path, find: Find) -> None:
    replace_file(folder, "train.de", new, data)
    with pytest.raises(DataError, match=message):
        joined_pairs(find())


@pytest.mark.parametrize(
    ("line", "columns"), [(b"", "1 column"), (b"no tab", "1 column"), (b"two\ttabs\there", "3 columns")]
)
def test_tsv_line_must_have_two_columns(line: bytes, columns: str, folder: Path, find: Find) -> None:
    (folder / "train.de").unlink()
    replace_file(folder, "train.en", "train.tsv", b"a\tb\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"train\.tsv, line 2: expected source, tab and target, found {columns}$"):
        find()


def test_missing_and_ambiguous_files_are_named(folder: Path, find: Find) -> None:
    (folder / "train.tsv").write_bytes(b"a\tb\n")
    with pytest.raises(DataError, match=r"train\.en, train\.tsv could each be a side of the train text"):
        find()
    (folder / "train.tsv").unlink()
    (folder / "test.de").unlink()
    with pytest.raises(DataError, match=r"no file is a side of the test text; .*test\.de.* or test\.tsv"):
        find()


def test_part_cuts_only_the_training_pairs(folder: Path, cache: Path) -> None:
    pairs = PairsSettings(source="en", target="de")
    corpus = find_pairs(CorpusSettings(name=str(folder), part="2/2", pairs=pairs), data=None, cache=cache)
    assert joined_pairs(corpus) == [("a dog", "ein Hund")]
    assert len(joined_pairs(corpus, "test")) == 2
    few = find_pairs(CorpusSettings(name=str(folder), part="1/3", pairs=pairs), data=None, cache=cache)
    with pytest.raises(DataError, match=r"part 1/3 of 2 lines is empty"):
        few.read_pairs("train")


@pytest.mark.parametrize(
    ("settings", "message"),
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
def test_invalid_pair_settings_are_rejected(settings: dict[str, object], message: str) -> None:
    pairs = settings.get("pairs")
    given = settings if pairs is None else settings | {"pairs": {"source": "en", "target": "de"} | dict(pairs)}  # type: ignore[call-overload]
    with pytest.raises(ValidationError, match=message):
        CorpusSettings.model_validate(given)


def test_monolingual_and_parallel_settings_are_not_interchangeable(folder: Path, cache: Path) -> None:
    pairs = CorpusSettings(name=str(folder), pairs=PairsSettings(source="en", target="de"))
    with pytest.raises(SettingsError, match=r"for parallel text; remove corpus\.pairs to read a monolingual text"):
        find_corpus(pairs, data=None, cache=cache)
    with pytest.raises(SettingsError, match=r"parallel text; set corpus\.pairs\.source and corpus\.pairs\.target"):
        find_pairs(CorpusSettings(name=str(folder)), data=None, cache=cache)
    wrong = CorpusSettings(name="nowhere", pairs=PairsSettings(source="en", target="de"))
    with pytest.raises(DataError, match=r"is neither a known corpus nor a folder; .*tatoeba"):
        find_pairs(wrong, data=None, cache=cache)


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [(0, 3, "empty side"), (0, 0, "empty side"), (9, 10, None), (11, 9, "too long"), (2, 6, None), (7, 2, "ratio")],
)
def test_dropped_pair_has_one_reason(source: int, target: int, reason: str | None) -> None:
    settings = PairsSettings(source="en", target="de", longest=10, ratio=3.0)
    assert settings.reason_to_drop(source, target) == settings.reason_to_drop(target, source) == reason
    assert PairsSettings(source="en", target="de", longest=None).reason_to_drop(1, 10**6) is None


def test_parallel_corpora_have_two_languages() -> None:
    assert {len(corpus.languages) for corpus in known_corpora().values()} == {0, 2}
