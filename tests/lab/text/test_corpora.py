"""Corpora: where files are searched, how published files are recognised, and parts of a training text."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
from pydantic import ValidationError

from reefknot.errors import CorpusNotFound, DataError
from reefknot.lab.cli.ls import ls
from reefknot.lab.text.corpora import CORPORA, known_corpora, known_corpus
from reefknot.lab.text.corpus import SPLITS, CorpusSettings, TextFiles, find_corpus
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.published import Corpus, PublishedCorpus
from reefknot.lab.text.vocabulary_settings import VocabularySettings


def find(name: object, cache: Path, data: Path | None = None, **cut: object) -> TextFiles:
    return find_corpus(CorpusSettings.model_validate({"name": str(name), **cut}), data=data, cache=cache)


def write_files(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(f"{name}\n")
    return folder


TINY = ("tiny.train.txt", "tiny.valid.txt", "tiny.test.txt")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, register: Callable[[Corpus], None]) -> PublishedCorpus:
    """A published corpus of three one-word files, each holding its own name."""
    corpus = PublishedCorpus(
        name="tiny",
        description="A tiny corpus",
        how_to_get="Write it yourself.",
        files=dict(zip(SPLITS, TINY, strict=True)),
        tokens=dict.fromkeys(SPLITS, 2),
        types=2,
        sha256={name: hashlib.sha256(f"{name}\n".encode()).hexdigest() for name in TINY},
    )
    register(corpus)
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    return corpus


def test_every_corpus_has_its_registered_name_and_a_description() -> None:
    for name, corpus in known_corpora().items():
        assert corpus.name == name
        assert corpus.description
        assert "\n" not in corpus.description


FILE = """
from reefknot.lab.text.prepared import PreparedCorpus
from reefknot.lab.text.published import find_all_files


def lines(files):
    for number, line in enumerate(files[0].read_text(encoding="utf-8").splitlines()):
        yield ("train", "valid", "test")[min(number, 2)], line


HAIKU = PreparedCorpus(
    name="haiku",
    description="one haiku, a line to a split",
    how_to_get="Write one.",
    expected="haiku.txt",
    files=lambda folder: find_all_files(folder, "haiku.txt"),
    lines=lines,
)
"""


def test_new_corpus_needs_one_file_and_one_line(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "haiku_corpus.py").write_text(FILE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(CORPORA, "haiku", "haiku_corpus:HAIKU")

    ls("corpora")
    assert "haiku                    one haiku, a line to a split (needs --data)\n" in capsys.readouterr().out
    with pytest.raises(ValidationError, match="haiku is not parallel text"):
        CorpusSettings.model_validate({"name": "haiku", "pairs": {"source": "en", "target": "de"}})
    data = tmp_path / "data"
    with pytest.raises(
        CorpusNotFound, match=f"haiku not found: the folder {data} does not exist; expected {data}/haiku/"
    ):
        find("haiku", cache, data)
    data.mkdir()
    with pytest.raises(CorpusNotFound) as error:
        find("haiku", cache, data)
    assert str(error.value) == (
        f"haiku not found in {data}: expected {data}/haiku/haiku.txt. Write one. Pass --data DIR or set REEFKNOT_DATA."
    )
    write_files(data / "haiku")
    (data / "haiku" / "haiku.txt").write_text("an old silent pond\na frog jumps\nsplash silence again\n")
    dataset = open_dataset(CorpusSettings(name="haiku"), VocabularySettings(), data=data, cache=cache)
    assert (dataset.name, dataset.origin) == ("haiku", "one haiku, a line to a split")
    assert {name: split.words for name, split in dataset.splits.items()} == {"train": 4, "valid": 3, "test": 3}


def test_only_the_requested_corpus_module_is_imported() -> None:
    code = "import sys; from reefknot.lab.text.corpus import CorpusSettings; CorpusSettings(name='ptb');"
    code += "print(*sorted(m.rpartition('.')[2] for m in sys.modules if m.startswith('reefknot.lab.text.corpora.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ptb"]


@pytest.mark.parametrize("part", ["3/2", "0/4", "x", "1", "1/0", "-1/2", "1/2/3", "", " 1/2", "１/２", "01/2"])
def test_invalid_part_is_rejected(part: str) -> None:
    with pytest.raises(ValidationError, match="1 <= k <= n"):
        CorpusSettings(part=part)


@pytest.mark.parametrize("settings", [{"name": ""}, {"tokens": 0}, {"tokens": "5"}, {"split": "train"}])
def test_invalid_corpus_settings_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CorpusSettings.model_validate(settings)


def test_published_type_counts_are_known_without_files() -> None:
    types = {"ptb": 10_000, "wikitext-2": 33_278, "wikitext-103": 267_735}
    assert {name: corpus.types for name in types if (corpus := known_corpus(name))} == types


def test_file_without_published_hash_is_checked_by_its_counts(
    tiny: PublishedCorpus, cache: Path, tmp_path: Path, register: Callable[[Corpus], None]
) -> None:
    """WikiText-103 is such a corpus: only its held-out files, which WikiText-2 shares, have hashes."""
    held_out = {name: tiny.sha256[name] for name in TINY[1:]}
    register(replace(tiny, name="large", types=3, tokens={**tiny.tokens, "train": 4}, sha256=held_out))
    folder = write_files(tmp_path / "data" / "large", *TINY)
    with pytest.raises(DataError, match="these are the files of tiny, not of large"):
        find("large", cache, tmp_path / "data")
    settings = CorpusSettings(name="large"), VocabularySettings()
    (folder / TINY[0]).write_text("a b\n")
    with pytest.raises(DataError, match=r"tiny\.train\.txt: 3 tokens with <eos>, 4 published"):
        open_dataset(*settings, data=tmp_path / "data", cache=cache)
    (folder / TINY[0]).write_text("a b b\n")
    assert open_dataset(*settings, data=tmp_path / "data", cache=cache).splits["train"].tokens == 4
    (folder / TINY[0]).write_text("a b c\n")
    with pytest.raises(DataError, match=r"tiny\.train\.txt: 4 types with <eos>, 3 published"):
        open_dataset(*settings, data=tmp_path / "data", cache=cache)
    assert find(folder, cache).name == "large/"  # the hashes do not identify it, so it is the user's own text


@pytest.mark.parametrize("below", ["tiny", "."])
@pytest.mark.parametrize("source", ["option", "environment"])
def test_published_corpus_is_found_in_either_folder(
    tiny: PublishedCorpus, below: str, source: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path / "data" / below, *TINY)
    if source == "environment":
        monkeypatch.setenv("REEFKNOT_DATA", str(tmp_path / "data"))
    corpus = find("tiny", cache, tmp_path / "data" if source == "option" else None)
    assert corpus.corpus == tiny
    assert {split: path.name for split, path in corpus.files.items()} == dict(zip(SPLITS, TINY, strict=True))


def test_missing_data_folder_error_says_which_files_to_put_where(tiny: PublishedCorpus, cache: Path) -> None:
    with pytest.raises(CorpusNotFound) as error:
        find("tiny", cache)
    assert str(error.value) == (
        "tiny not found: expected DIR/tiny/tiny.train.txt, tiny.valid.txt and tiny.test.txt. Write it yourself."
        " Pass --data DIR or set REEFKNOT_DATA."
    )


def test_missing_file_is_named(tiny: PublishedCorpus, cache: Path, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "data", *TINY[:2])
    with pytest.raises(DataError, match=r"tiny is incomplete in .*data: tiny\.test\.txt not found; expected") as error:
        find("tiny", cache, folder)
    assert not isinstance(error.value, CorpusNotFound)


def test_changed_file_is_rejected_with_both_hashes(tiny: PublishedCorpus, cache: Path, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "data", *TINY)
    (folder / TINY[1]).write_bytes(b"something else\n")
    expected = tiny.sha256[TINY[1]]
    actual = hashlib.sha256(b"something else\n").hexdigest()
    with pytest.raises(DataError, match=rf"tiny\.valid\.txt is not .*: expected SHA-256 {expected}, found {actual}\."):
        find("tiny", cache, folder)


def test_folder_is_recognised_by_hashes_not_by_name(tiny: PublishedCorpus, cache: Path, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "mine", *TINY)
    corpus = find(folder, cache)
    assert (corpus.name, corpus.origin) == ("tiny", "A tiny corpus, recognised by SHA-256")
    other = write_files(tmp_path / "tiny", "train.txt", "valid.txt", "test.txt")
    assert find(other, cache).name == "tiny/"
    assert find(other, cache).corpus.types is None


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "valid.txt", "test.txt"),
        ("train", "dev", "test"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("Train.txt", "validation.txt", "a.b.test"),
    ],
)
def test_common_file_names_are_found(names: tuple[str, ...], cache: Path, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "mine", *names, "README.md", "train.txt.bak", ".train.txt", "strain.txt")
    corpus = find(folder, cache)
    assert tuple(path.name for path in corpus.files.values()) == names
    assert corpus.corpus.types is None


def test_ambiguous_or_missing_split_file_is_rejected(cache: Path, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "mine", "train.txt", "valid.txt", "dev.txt", "notes")
    with pytest.raises(DataError, match=r"dev\.txt, valid\.txt could each be the valid text; expected one file"):
        find(folder, cache)
    (folder / "dev.txt").unlink()
    with pytest.raises(DataError, match=r"no file is the test text; .* holds notes, train\.txt, valid\.txt"):
        find(folder, cache)


@pytest.mark.parametrize("name", ["no-such-folder", "~nobody-of-that-name/x", "a\0b", "x" * 10_000])
def test_unknown_corpus_name_is_rejected(name: str, cache: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"is neither a known corpus nor a folder; the known corpora are: python-docs, ptb, ",
    ) as error:
        find(name, cache)
    assert "x" * 500 not in str(error.value), "a long name is shortened"


@pytest.mark.parametrize("lines", [4, 5, 7, 12])
def test_parts_are_consecutive_and_cover_the_text(lines: int, corpus: Callable[..., Path], cache: Path) -> None:
    folder = corpus(train=b"".join(b"%d\n" % number for number in range(1, lines + 1)))
    parts = [list(find(folder, cache, part=f"{k}/4").read_lines("train")) for k in (1, 2, 3, 4)]
    assert [int(line.words[0]) for line in chain(*parts)] == list(range(1, lines + 1))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_empty_part_is_rejected(corpus: Callable[..., Path], cache: Path) -> None:
    with pytest.raises(DataError, match=r"train\.txt: part 1/9 of 4 lines is empty; use fewer parts"):
        find(corpus(), cache, part="1/9").read_lines("train")


def test_part_does_not_cut_held_out_texts(corpus: Callable[..., Path], cache: Path) -> None:
    files = find(corpus(), cache, part="1/2")
    assert [line.number for line in files.read_lines("train")] == [1, 2]
    assert [line.number for line in files.read_lines("valid")] == [1, 2]
