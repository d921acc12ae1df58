"""The Wikipedia sample: articles are split by their ids, paragraphs are lines, and case is preserved."""

from __future__ import annotations

import hashlib
import json
import lzma
from dataclasses import replace
from pathlib import Path

import pytest

from reefknot.errors import CorpusNotFound, DataError
from reefknot.lab.text.corpora import enwiki
from reefknot.lab.text.corpus import CorpusSettings, find_corpus

FILE = "enwiki-first-100MB.jsonl.xz"


@pytest.fixture(autouse=True)
def unpublished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the published hashes: the files of these tests are not the published ones."""
    monkeypatch.setattr(enwiki, "ENWIKI", replace(enwiki.ENWIKI, sha256={}))


def write_file(folder: Path, *lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode()))


def article(name: str, text: str) -> str:
    return json.dumps({"id": name, "title": "Title", "text": text})


def read_texts(data: Path, cache: Path) -> dict[str, str]:
    files = find_corpus(CorpusSettings(name="enwiki-sample"), data=data, cache=cache)
    return {split: path.read_text(encoding="utf-8") for split, path in files.files.items()}


def hash_percent(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) % 100


def test_articles_are_split_by_the_hash_of_their_id(tmp_path: Path, cache: Path) -> None:
    names = [str(number) for number in range(400)]
    write_file(tmp_path / "enwiki-sample", *(article(name, f"article {name}") for name in names))
    lines = {split: text.split("\n")[:-1] for split, text in read_texts(tmp_path, cache).items()}
    held_out = {
        split: [f"article {name}" for name in names if hash_percent(name) == n]
        for n, split in ((0, "valid"), (1, "test"))
    }
    assert {split: lines[split] for split in held_out} == held_out
    assert all(held_out.values())
    assert len(lines["train"]) == len(names) - sum(map(len, held_out.values()))


def test_paragraphs_are_lines_and_keep_their_case(tmp_path: Path, cache: Path) -> None:
    write_file(tmp_path, article("12", "Anarchism isn't new.\n\n  In 1840: Zoë’s\u2028book\n \n"))
    assert hash_percent("12") > 1
    assert read_texts(tmp_path, cache)["train"] == "Anarchism isn ' t new .\nIn 1840 : Zoë ’ s book\n"


@pytest.mark.parametrize("line", ['{"id": 12, "text": "a"}', '{"id": "12"}', "[]"])
def test_line_that_is_not_an_article_is_rejected(line: str, tmp_path: Path, cache: Path) -> None:
    write_file(tmp_path, article("12", "a"), line)
    with pytest.raises(DataError, match=r"xz, line 2: not an article with an id and a text; download the file again"):
        read_texts(tmp_path, cache)


def test_damaged_file_is_rejected(tmp_path: Path, cache: Path) -> None:
    write_file(tmp_path, "{")
    with pytest.raises(DataError, match=r"cannot be read: .*; download it again"):
        read_texts(tmp_path, cache)
    (tmp_path / FILE).write_bytes(b"no xz")
    with pytest.raises(DataError, match=r"cannot be read: .*; download it again"):
        read_texts(tmp_path, cache)


def test_missing_corpus_error_says_where_to_put_the_file(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(CorpusNotFound, match=rf"expected .*/enwiki-sample/{FILE}"):
        read_texts(tmp_path, cache)
