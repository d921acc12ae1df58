"""Corpora that have to be made: train.txt, valid.txt and test.txt in the cache, written from other files.

Of parallel text there is one for each language: train.en.txt, train.de.txt and so on.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reefknot.errors import CorpusNotFound, DataError
from reefknot.storage.cache import cached, file_hash
from reefknot.storage.progress import Say, reported

SPLITS = ("train", "valid", "test")

Lines = Iterator[tuple[str, str]]
"""Lines of the texts as they are to be written, each after the name of its text: a split, or split.language."""

_TOKEN = re.compile(r"\w+|[^\w\s]")


def set_apart(text: str) -> str:
    """Words and marks of punctuation with spaces between them."""
    return " ".join(_TOKEN.findall(text))


def tokenise(text: str) -> str:
    """Lower case, words and marks of punctuation set apart."""
    return set_apart(text.lower())


def made(entry: Path, lines: Callable[[], Lines], texts: Iterable[str] = SPLITS) -> Path:
    """The folder `entry` of the cache with these texts, written first if it is not there."""
    return cached(entry, lambda folder: _write(folder, lines(), texts), _read)


@dataclass(frozen=True)
class Preparation:
    """How a published corpus that comes in other files becomes three texts."""

    title: str
    """What it is and how it is cut, for people."""
    wanted: str
    """The files, as a person is told to put them somewhere."""
    places: tuple[str, ...]
    """Folders of the data folder they may be in."""
    files: Callable[[Path], list[Path]]
    """Those of them that are in a folder: all that are needed, or none."""
    lines: Callable[[list[Path]], Lines]
    """The texts that the files hold."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """Of published files, by their names."""
    version: int = 1
    """To be raised with every change of the texts that the same files give."""
    languages: tuple[str, ...] = ()
    """Those of parallel text."""

    def build(self, name: str, data: Path | None, cache: Path, say: Say) -> Path:
        """The folder of the texts, made first if it is not in the cache."""
        files = self._find(name, data)
        for path in files:
            expected = self.sha256.get(path.name)
            if expected is not None and (found := file_hash(path, cache)) != expected:
                raise DataError(
                    f"{path}: not the published {name} file: SHA-256 {expected} expected, {found} found; copy it anew"
                )
        return self.make(name, files, cache, say)

    def make(self, name: str, files: list[Path], cache: Path, say: Say) -> Path:
        """The folder of the texts of these files, made first if it is not in the cache."""
        # Equal files in another place are read again, to equal texts.
        listing = json.dumps([self.version, *self.languages, *(_facts(path) for path in files)])
        entry = cache / "corpora" / f"{name}-{hashlib.sha256(listing.encode()).hexdigest()[:12]}"

        def lines() -> Lines:
            return reported(
                _readable(self.lines(files), files), lambda number: f"{name}: {number:,} lines prepared", say
            )

        texts = [f"{split}.{language}" for split in SPLITS for language in self.languages]
        return made(entry, lines, texts or SPLITS)

    def _find(self, name: str, data: Path | None) -> list[Path]:
        named = data or os.environ.get("REEFKNOT_DATA")
        advice = f"put {self.wanted} into DIR/{self.places[0]}/ and name DIR with --data DIR or REEFKNOT_DATA"
        if not named:
            raise CorpusNotFound(f"the corpus {name} has to be found but no data folder is named: {advice}")
        for place in (*(Path(named) / place for place in self.places), Path(named)):
            with contextlib.suppress(OSError):
                if files := self.files(place):
                    return files
        raise CorpusNotFound(f"the corpus {name} is not in {named}: {advice}")


def _facts(path: Path) -> tuple[str, int, int]:
    try:
        facts = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return str(path.absolute()), facts.st_size, facts.st_mtime_ns


def _readable(lines: Lines, files: list[Path]) -> Lines:
    """The lines, or a sentence where a file is not what its name says."""
    try:
        yield from lines
    except (OSError, EOFError, ValueError, lzma.LZMAError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{os.path.commonpath(files)}: cannot be read: {error}; copy it anew") from error


def _write(folder: Path, lines: Iterable[tuple[str, str]], texts: Iterable[str]) -> None:
    with contextlib.ExitStack() as stack:
        streams = {text: stack.enter_context((folder / f"{text}.txt").open("wb")) for text in texts}
        for text, line in lines:
            streams[text].write(f"{line}\n".encode())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    (folder / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")


def _read(folder: Path) -> Path | None:
    try:
        sizes = json.loads((folder / "sizes.json").read_bytes())
        sound = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return None
    return folder if sound and sizes else None
