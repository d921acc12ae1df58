"""text8 is split by characters and cut into lines of a fixed number of words."""

from __future__ import annotations

from pathlib import Path

import pytest

from reefknot.errors import DataError
from reefknot.lab.text.corpora import text8
from reefknot.lab.text.corpus import CorpusSettings, find_corpus

TEXT = b" one two three four five six seven eight"


def read_texts(folder: Path, cache: Path) -> dict[str, str]:
    files = find_corpus(CorpusSettings(name="text8"), data=folder, cache=cache)
    return {split: path.read_text(encoding="ascii") for split, path in files.files.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text8, "NUM_CHARACTERS", len(TEXT))
    monkeypatch.setattr(text8, "NUM_HELD_OUT", 14)
    monkeypatch.setattr(text8, "WORDS_PER_LINE", 3)
    (tmp_path / "text8").write_bytes(TEXT)
    return tmp_path


@pytest.mark.parametrize("block", [1, 4, 7, 1000])
def test_text_is_split_by_characters_and_lines_by_words(
    folder: Path, cache: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text8, "_BLOCK_SIZE", block)
    texts = read_texts(folder, cache)
    assert texts["train"] == "one two three\nfour five s\n"  # a split may end inside a word
    assert texts["valid"] == texts["test"] == "ix seven eight\n"


def test_file_is_found_in_a_folder_of_its_name(folder: Path, cache: Path) -> None:
    (folder / "text8").rename(folder / "file")
    (folder / "text8").mkdir()
    (folder / "file").rename(folder / "text8" / "text8")
    assert read_texts(folder, cache)["test"] == "ix seven eight\n"


def test_file_of_another_size_is_rejected(folder: Path, cache: Path) -> None:
    (folder / "text8").write_bytes(TEXT + b"!")
    with pytest.raises(DataError, match=r"text8: 41 bytes, but text8 has 40; download it again"):
        read_texts(folder, cache)


def test_non_ascii_bytes_are_rejected(folder: Path, cache: Path) -> None:
    (folder / "text8").write_bytes(TEXT[:-1] + b"\xff")
    with pytest.raises(DataError, match=r"text8: cannot be read: 'ascii' codec"):
        read_texts(folder, cache)
