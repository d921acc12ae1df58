"""One Billion Word: the shards of a release become three texts, sentence by sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reefknot.errors import CorpusNotFound, DataError
from reefknot.lab.text.corpora import billion_word
from reefknot.lab.text.corpus import CorpusSettings, find_corpus

TRAINING, HELD_OUT = "training-monolingual.tokenized.shuffled", "heldout-monolingual.tokenized.shuffled"
RELEASE = "1-billion-word-language-modeling-benchmark-r13output"


PUBLISHED = billion_word.BILLION_WORD


@pytest.fixture(autouse=True)
def unpublished(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own files have other hashes."""
    monkeypatch.setattr(billion_word, "BILLION_WORD", replace(PUBLISHED, sha256={}))


def release(folder: Path) -> Path:
    """All that is published, each shard a sentence with its name and one with a character beyond ASCII."""
    (folder / TRAINING).mkdir(parents=True)
    (folder / HELD_OUT).mkdir()
    for shard in range(1, 100):
        (folder / TRAINING / f"news.en-{shard:05}-of-00100").write_text(f"shard {shard}\nZoë\n", encoding="utf-8")
    for shard in range(50):
        (folder / HELD_OUT / f"news.en.heldout-{shard:05}-of-00050").write_text(f"held {shard}\n", encoding="utf-8")
    return folder


def texts(data: Path, cache: Path) -> dict[str, str]:
    found = find_corpus(CorpusSettings(name="billion-word"), data=data, cache=cache)
    return {split: path.read_text(encoding="utf-8") for split, path in found.files.items()}


@pytest.mark.parametrize("place", ["billion-word", RELEASE, "."])
def test_shards_become_texts(tmp_path: Path, cache: Path, place: str) -> None:
    release(tmp_path / "data" / place)
    found = texts(tmp_path / "data", cache)
    assert found["train"].split("\n")[:-1] == [line for n in range(1, 100) for line in (f"shard {n}", "Zoë")]
    assert (found["valid"], found["test"]) == ("held 10\n", "held 0\n")


@pytest.mark.parametrize("gone", [f"{TRAINING}/news.en-00042-of-00100", f"{HELD_OUT}/news.en.heldout-00000-of-00050"])
def test_a_shard_is_missing(tmp_path: Path, cache: Path, gone: str) -> None:
    (release(tmp_path / "billion-word") / gone).unlink()
    with pytest.raises(CorpusNotFound, match=rf"expected .*/billion-word/{TRAINING} .* and {HELD_OUT} "):
        texts(tmp_path, cache)


def test_the_published_held_out_shards_are_told_by_their_hash(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(billion_word, "BILLION_WORD", PUBLISHED)
    release(tmp_path)
    with pytest.raises(DataError, match=r"heldout-00010-of-00050 is not the published billion-word file"):
        texts(tmp_path, cache)


def test_bytes_that_are_no_text(tmp_path: Path, cache: Path) -> None:
    (release(tmp_path) / TRAINING / "news.en-00099-of-00100").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"cannot be read: .*; download it again"):
        texts(tmp_path, cache)
