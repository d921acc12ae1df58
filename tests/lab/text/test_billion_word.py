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
    """Remove the published hashes: the files of these tests are not the published ones."""
    monkeypatch.setattr(billion_word, "BILLION_WORD", replace(PUBLISHED, sha256={}))


def write_release(folder: Path) -> Path:
    """Write all published shards; each training shard has its name and a non-ASCII line."""
    (folder / TRAINING).mkdir(parents=True)
    (folder / HELD_OUT).mkdir()
    for shard in range(1, 100):
        (folder / TRAINING / f"news.en-{shard:05}-of-00100").write_text(f"shard {shard}\nZoë\n", encoding="utf-8")
    for shard in range(50):
        (folder / HELD_OUT / f"news.en.heldout-{shard:05}-of-00050").write_text(f"held {shard}\n", encoding="utf-8")
    return folder


def read_texts(data: Path, cache: Path) -> dict[str, str]:
    files = find_corpus(CorpusSettings(name="billion-word"), data=data, cache=cache)
    return {split: path.read_text(encoding="utf-8") for split, path in files.files.items()}


@pytest.mark.parametrize("folder", ["billion-word", RELEASE, "."])
def test_shards_are_joined_into_three_texts(tmp_path: Path, cache: Path, folder: str) -> None:
    write_release(tmp_path / "data" / folder)
    texts = read_texts(tmp_path / "data", cache)
    assert texts["train"].split("\n")[:-1] == [line for n in range(1, 100) for line in (f"shard {n}", "Zoë")]
    assert (texts["valid"], texts["test"]) == ("held 10\n", "held 0\n")


@pytest.mark.parametrize(
    "missing", [f"{TRAINING}/news.en-00042-of-00100", f"{HELD_OUT}/news.en.heldout-00000-of-00050"]
)
def test_missing_shard_is_rejected(tmp_path: Path, cache: Path, missing: str) -> None:
    (write_release(tmp_path / "billion-word") / missing).unlink()
    with pytest.raises(CorpusNotFound, match=rf"expected .*/billion-word/{TRAINING} .* and {HELD_OUT} "):
        read_texts(tmp_path, cache)


def test_held_out_shard_with_another_hash_is_rejected(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(billion_word, "BILLION_WORD", PUBLISHED)
    write_release(tmp_path)
    with pytest.raises(DataError, match=r"heldout-00010-of-00050 is not the published billion-word file"):
        read_texts(tmp_path, cache)


def test_shard_that_is_not_utf8_is_rejected(tmp_path: Path, cache: Path) -> None:
    (write_release(tmp_path) / TRAINING / "news.en-00099-of-00100").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"cannot be read: .*; download it again"):
        read_texts(tmp_path, cache)
