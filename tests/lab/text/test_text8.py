"""text8: where the held-out characters begin, and lines of as many words."""

from __future__ import annotations

from pathlib import Path

import pytest

from reefknot.errors import DataError
from reefknot.lab.text.corpora import text8
from reefknot.lab.text.corpus import CorpusSettings, find_corpus

TEXT = b" one two three four five six seven eight"


def texts(folder: Path, cache: Path) -> dict[str, str]:
    found = find_corpus(CorpusSettings(name="text8"), data=folder, cache=cache)
    return {split: path.read_text(encoding="ascii") for split, path in found.files.items()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text8, "SIZE", len(TEXT))
    monkeypatch.setattr(text8, "HELD_OUT", 14)
    monkeypatch.setattr(text8, "WORDS", 3)
    (tmp_path / "text8").write_bytes(TEXT)
    return tmp_path


@pytest.mark.parametrize("block", [1, 4, 7, 1000])
def test_cut_by_characters_and_in_lines_of_words(
    folder: Path, cache: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text8, "_BLOCK", block)
    found = texts(folder, cache)
    assert found["train"] == "one two three\nfour five s\n"  # characters decide, also inside a word
    assert found["valid"] == found["test"] == "ix seven eight\n"


def test_a_file_in_a_folder_of_its_name(folder: Path, cache: Path) -> None:
    (folder / "text8").rename(folder / "file")
    (folder / "text8").mkdir()
    (folder / "file").rename(folder / "text8" / "text8")
    assert texts(folder, cache)["test"] == "ix seven eight\n"


def test_another_length_is_refused(folder: Path, cache: Path) -> None:
    (folder / "text8").write_bytes(TEXT + b"!")
    with pytest.raises(DataError, match=r"text8: 41 bytes, but text8 has 40; download it again"):
        texts(folder, cache)


def test_other_characters_are_refused(folder: Path, cache: Path) -> None:
    (folder / "text8").write_bytes(TEXT[:-1] + b"\xff")
    with pytest.raises(DataError, match=r"text8: cannot be read: 'ascii' codec"):
        texts(folder, cache)
