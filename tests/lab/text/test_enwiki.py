"""The sample of Wikipedia: articles split by their ids, paragraphs as lines, the case as it is."""

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
    """The tests' own files have other hashes."""
    monkeypatch.setattr(enwiki, "ENWIKI", replace(enwiki.ENWIKI, sha256={}))


def write(folder: Path, *lines: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(lzma.compress("".join(f"{line}\n" for line in lines).encode()))


def article(name: str, text: str) -> str:
    return json.dumps({"id": name, "title": "Title", "text": text})


def texts(data: Path, cache: Path) -> dict[str, str]:
    found = find_corpus(CorpusSettings(name="enwiki-sample"), data=data, cache=cache)
    return {split: path.read_text(encoding="utf-8") for split, path in found.files.items()}


def hundredth(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) % 100


def test_articles_are_split_by_the_hash_of_their_id(tmp_path: Path, cache: Path) -> None:
    names = [str(number) for number in range(400)]
    write(tmp_path / "enwiki-sample", *(article(name, f"article {name}") for name in names))
    found = {split: text.split("\n")[:-1] for split, text in texts(tmp_path, cache).items()}
    wanted = {
        split: [f"article {name}" for name in names if hundredth(name) == n] for n, split in ((0, "valid"), (1, "test"))
    }
    assert {split: found[split] for split in wanted} == wanted
    assert all(wanted.values())
    assert len(found["train"]) == len(names) - sum(map(len, wanted.values()))


def test_a_line_is_a_paragraph_with_its_case(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, article("12", "Anarchism isn't new.\n\n  In 1840: Zoë’s\u2028book\n \n"))
    assert hundredth("12") > 1
    assert texts(tmp_path, cache)["train"] == "Anarchism isn ' t new .\nIn 1840 : Zoë ’ s book\n"


@pytest.mark.parametrize("line", ['{"id": 12, "text": "a"}', '{"id": "12"}', "[]"])
def test_a_line_that_is_no_article(line: str, tmp_path: Path, cache: Path) -> None:
    write(tmp_path, article("12", "a"), line)
    with pytest.raises(DataError, match=r"xz, line 2: not an article with an id and a text; download the file again"):
        texts(tmp_path, cache)


def test_a_damaged_file(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, "{")
    with pytest.raises(DataError, match=r"cannot be read: .*; download it again"):
        texts(tmp_path, cache)
    (tmp_path / FILE).write_bytes(b"no xz")
    with pytest.raises(DataError, match=r"cannot be read: .*; download it again"):
        texts(tmp_path, cache)


def test_where_to_put_it(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(CorpusNotFound, match=rf"expected .*/enwiki-sample/{FILE}"):
        texts(tmp_path, cache)
