"""Corpora that are published in another form and have to be converted to texts, which are stored in the cache.

The texts of a corpus are in a folder of the cache:

    corpora/NAME-HASH/train.txt, valid.txt, test.txt          one text per split, or for parallel text
    corpora/NAME-HASH/train.en.txt, train.de.txt, ...         one text per split and language
    corpora/NAME-HASH/sizes.json                              size of each text, to detect a damaged folder

HASH depends on the path, size and modification time of the files that the texts are made from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.text.published import SPLITS, DownloadedCorpus
from reefknot.storage.cache import cached
from reefknot.storage.progress import Notify, reported

Lines = Iterator[tuple[str, str]]
"""Pairs of the name of a text and a line to write to it. The name is `split`, or `split.language` for parallel text."""

_TOKEN = re.compile(r"\w+|[^\w\s]")


def separate(text: str) -> str:
    """Put spaces between words and punctuation marks."""
    return " ".join(_TOKEN.findall(text))


def tokenise(text: str) -> str:
    """Convert a text to lower case and put spaces between words and punctuation marks."""
    return separate(text.lower())


@dataclass(frozen=True, kw_only=True)
class PreparedCorpus(DownloadedCorpus):
    """A published corpus that is converted to texts before it is read."""

    expected: str
    """Description of the files for an error message, in which it follows the name of their folder."""
    files: Callable[[Path], list[Path]]
    """Function that returns the files of the corpus in a folder: all files, or none if one is missing."""
    lines: Callable[[list[Path]], Lines]
    """Function that reads the files and yields the lines of the texts."""
    version: int = 1
    """Version of the conversion. Increase it whenever the same files give different texts."""

    def files_in(self, folder: Path) -> list[Path]:
        return self.files(folder)

    def expected_files(self) -> str:
        return self.expected

    def open(self, data: Path | None, cache: Path, notify: Notify) -> dict[str, Path]:
        files = self.find(data, cache)
        return prepare(self.name, files, self.lines, cache, notify, languages=self.languages, version=self.version)


def prepare(
    name: str,
    files: list[Path],
    lines: Callable[[list[Path]], Lines],
    cache: Path,
    notify: Notify,
    *,
    languages: tuple[str, ...] = (),
    version: int = 1,
) -> dict[str, Path]:
    """Return the texts that `lines` makes from `files`. Write them to the cache first, if they are not there."""
    # The same files in another folder are converted again, and give the same texts.
    listing = json.dumps([version, *languages, *(_facts(path) for path in files)])

    def reported_lines() -> Lines:
        return reported(_readable(lines(files), files), lambda number: f"{name}: {number:,} lines prepared", notify)

    texts = [f"{split}.{language}" for split in SPLITS for language in languages]
    digest = hashlib.sha256(listing.encode()).hexdigest()
    return write_texts(cache, f"{name}-{digest[:12]}", reported_lines, texts or SPLITS)


def write_texts(cache: Path, entry: str, lines: Callable[[], Lines], texts: Iterable[str] = SPLITS) -> dict[str, Path]:
    """Return the texts of a cache entry by name. Write `lines` to the entry first, if it does not exist."""
    names = list(texts)
    folder = cached(cache / "corpora" / entry, lambda new: _write(new, lines(), names), _read)
    return {name: folder / f"{name}.txt" for name in names}


def _facts(path: Path) -> tuple[str, int, int]:
    try:
        facts = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return str(path.absolute()), facts.st_size, facts.st_mtime_ns


def _readable(lines: Lines, files: list[Path]) -> Lines:
    """Yield the lines. Raise a DataError if a file is damaged or does not have the expected format."""
    try:
        yield from lines
    except (OSError, EOFError, ValueError, lzma.LZMAError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{os.path.commonpath(files)}: cannot be read: {error}; download it again") from error


def _write(folder: Path, lines: Iterable[tuple[str, str]], texts: Iterable[str]) -> None:
    with contextlib.ExitStack() as stack:
        streams = {text: stack.enter_context((folder / f"{text}.txt").open("wb")) for text in texts}
        for text, line in lines:
            streams[text].write(f"{line}\n".encode())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")


def _read(folder: Path) -> Path | None:
    """Return the folder if its texts have the recorded sizes, or else None."""
    try:
        sizes = json.loads((folder / "sizes.json").read_bytes())
        complete = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return None
    return folder if complete and sizes else None
