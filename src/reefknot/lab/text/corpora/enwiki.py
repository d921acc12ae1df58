"""A sample of English Wikipedia: the first 5,511 articles of a dump, for vocabularies of more than 100,000 words.

A line of the corpus is a paragraph in its original case, with spaces around punctuation marks. The text has 19 million
tokens, and more than 100,000 types occur at least three times in the training text. There is no published split. Here
one article in fifty is held out: the SHA-256 of its id modulo 100 is 0 for the validation text and 1 for the test text.

The file has one JSON object per line, with the id, title and text of an article.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.text.prepared import NamedLines, PreparedCorpus, choose_split, separate_punctuation
from reefknot.lab.text.published import find_all_files

_FILE = "enwiki-first-100MB.jsonl.xz"


def _read_lines(files: list[Path]) -> NamedLines:
    (path,) = files
    with lzma.open(path) as file:
        for line_number, json_line in enumerate(file, start=1):
            match json.loads(json_line):
                case {"id": str(article_id), "text": str(text)}:
                    split = choose_split(article_id, num_parts=100)
                case _:
                    raise DataError(
                        f"{path}, line {line_number}: not an article with an id and a text; download the file again"
                    )
            for paragraph in text.split("\n"):
                line = separate_punctuation(paragraph)
                if line:
                    yield split, line


ENWIKI = PreparedCorpus(
    name="enwiki-sample",
    description="a sample of English Wikipedia, 5,511 articles; a hundredth is validation text and a hundredth test"
    " text, chosen by hash",
    how_to_get="The file holds the first 100 MB of WikiExtractor's output for a dump of English Wikipedia.",
    expected=_FILE,
    folders=("enwiki-sample", "enwiki"),
    files=lambda folder: find_all_files(folder, _FILE),
    lines=_read_lines,
    sha256={_FILE: "e76a3195a7f96b14429a937dd86030543dd4cb456651420197b1a12ee41290ba"},
)
