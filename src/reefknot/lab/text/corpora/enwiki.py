"""A sample of English Wikipedia: the first 5,511 articles of a dump, for vocabularies of more than 100,000 words.

Nobody has published a split. Here one article in fifty is held out: of a hundred remainders of the SHA-256 of its id,
0 is valid, 1 is test. A line is a paragraph; words and marks of punctuation are set apart, and the case stays as it is:
19 million tokens, more than 100,000 of whose types occur three times or more in the training text.

Read from one file of JSON lines, each an article with id, title and text.
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
                case {"id": str(name), "text": str(text)}:
                    split = _split(name)
                case _:
                    raise DataError(f"{path}, line {number}: no article with an id and a text; download the file again")
            yield from ((split, line) for line in map(separate, text.split("\n")) if line)


def _split(name: str) -> str:
    hundredth = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 100
    return {0: "valid", 1: "test"}.get(hundredth, "train")


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
