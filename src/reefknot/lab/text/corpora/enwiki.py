"""A sample of English Wikipedia: the first 5,511 articles of a dump, for vocabularies of more than 100,000 words.

There is no published split. Here one article in fifty is held out: the SHA-256 of its id modulo 100 is 0 for valid and
1 for test. A line is a paragraph in its original case, with spaces around punctuation marks. The text has 19 million
tokens, and more than 100,000 types occur at least three times in the training text.

The file has one JSON object per line, with the id, title and text of an article.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.text.prepared import Lines, PreparedCorpus, separate
from reefknot.lab.text.published import all_of

_FILE = "enwiki-first-100MB.jsonl.xz"


def _lines(files: list[Path]) -> Lines:
    (path,) = files
    with lzma.open(path) as stream:
        for number, raw in enumerate(stream, start=1):
            match json.loads(raw):
                case {"id": str(article), "text": str(text)}:
                    split = _split(article)
                case _:
                    raise DataError(
                        f"{path}, line {number}: not an article with an id and a text; download the file again"
                    )
            yield from ((split, line) for line in map(separate, text.split("\n")) if line)


def _split(article: str) -> str:
    remainder = int.from_bytes(hashlib.sha256(article.encode()).digest()[:8]) % 100
    return {0: "valid", 1: "test"}.get(remainder, "train")


ENWIKI = PreparedCorpus(
    name="enwiki-sample",
    description="a sample of English Wikipedia, 5,511 articles; a hundredth of them, by hash, is valid and a hundredth"
    " test",
    how_to_get="The file holds the first 100 MB of WikiExtractor's output for a dump of English Wikipedia.",
    expected=_FILE,
    folders=("enwiki-sample", "enwiki"),
    files=lambda folder: all_of(folder, _FILE),
    lines=_lines,
    sha256={_FILE: "e76a3195a7f96b14429a937dd86030543dd4cb456651420197b1a12ee41290ba"},
)
