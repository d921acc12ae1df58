"""BBC news of 2004 and 2005 (Greene & Cunningham 2006): 2,225 articles on five topics.

A line of the corpus is a paragraph in lower case with spaces around punctuation marks. One article in ten belongs to
the validation text and one in ten to the test text, chosen by the hash of its words. Some articles occur several times;
all copies of an article are in the same split. The split is ours, because Miyamoto & Cho (2016), whom Press & Wolf
(2017) cite, published neither their split nor their tokenisation.

The files are read from bbc-fulltext.zip as it is published, or from the folder that it unpacks to.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from reefknot.lab.text.prepared import NamedLines, PreparedCorpus, choose_split, tokenise

_ARCHIVE = "bbc-fulltext.zip"
_TOPICS = ("business", "entertainment", "politics", "sport", "tech")


def _find_files(folder: Path) -> list[Path]:
    """Return the archive, or all articles, sorted by topic and file name."""
    if (folder / _ARCHIVE).is_file():
        return [folder / _ARCHIVE]
    for root in (folder, folder / "bbc", folder / "bbc-fulltext" / "bbc"):
        articles_by_topic = [sorted((root / topic).glob("*.txt")) for topic in _TOPICS]
        if all(articles_by_topic):
            return [path for articles in articles_by_topic for path in articles]
    return []


def _read_lines(files: list[Path]) -> NamedLines:
    for article in _read_articles(files):
        lines = [tokenise(line) for line in article.split("\n")]
        paragraphs = [line for line in lines if line]
        split = choose_split("\n".join(paragraphs), num_parts=10)
        for paragraph in paragraphs:
            yield split, paragraph


def _read_articles(files: list[Path]) -> Iterator[str]:
    """Yield the text of each article, from the archive or from the files that it unpacks to."""
    if [path.name for path in files] != [_ARCHIVE]:
        for path in files:
            yield _decode(path.read_bytes())
        return

    with zipfile.ZipFile(files[0]) as archive:
        members = [PurePosixPath(name) for name in archive.namelist()]
        articles = [member for member in members if member.suffix == ".txt" and member.parent.name in _TOPICS]
        articles.sort(key=_topic_and_file_name)
        for article in articles:
            yield _decode(archive.read(str(article)))


def _topic_and_file_name(path: PurePosixPath) -> tuple[str, ...]:
    return path.parts[-2:]


def _decode(article: bytes) -> str:
    try:
        return article.decode()
    except UnicodeDecodeError:  # one published article is in Latin-1
        return article.decode("latin-1")


BBC = PreparedCorpus(
    name="bbc",
    description="BBC news articles in lower case; a tenth is validation text and a tenth test text, chosen by hash",
    how_to_get="The archive is published at http://mlg.ucd.ie/datasets/bbc.html.",
    expected=f"{_ARCHIVE}, or the folders it unpacks to",
    folders=("bbc", "bbc-news"),
    files=_find_files,
    lines=_read_lines,
    sha256={_ARCHIVE: "3b63088333102316c4780aff395f5eebd3cebfdb117691af7e8380905ccff8bd"},
)
