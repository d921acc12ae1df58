"""Corpora that are published in another form, such as a zip or JSON file, and are converted to plain text.

To define such a corpus, create a `PreparedCorpus` with two functions: `files` finds its files in a folder, and `lines`
reads them and yields the lines of the texts (`corpora/text8.py` is a short example). `PreparedCorpus.open` writes the
texts to a folder of the cache, once:

    corpora/NAME-HASH/train.txt, valid.txt, test.txt          one text per split
    corpora/NAME-HASH/train.en.txt, train.de.txt, ...         (parallel text) one text per split and language
    corpora/NAME-HASH/MANIFEST.json                           size and SHA-256 of each text

HASH depends on the path, size, mtime and ctime of the files that the texts are made from. With --check, the texts are
made again.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.text.published import SPLITS, DownloadedCorpus
from reefknot.storage.cache import load_or_create, needs_check
from reefknot.storage.progress import Notify, report_progress

NamedLines = Iterator[tuple[str, str]]
"""Pairs (name of a text, line of that text): ("train", "some words") or, for parallel text, ("train.en", ...)."""

_WORD_OR_PUNCTUATION = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, kw_only=True)
class PreparedCorpus(DownloadedCorpus):
    """A downloaded corpus that is converted to plain texts before it is read."""

    expected: str
    """Description of the files, which completes the error message "expected FOLDER/..."."""
    files: Callable[[Path], list[Path]]
    """Function that returns the files of the corpus in a folder: all files, or none if one is missing."""
    lines: Callable[[list[Path]], NamedLines]
    """Function that reads the files and yields the lines of the texts."""
    version: int = 1
    """Version of the conversion. Increase it whenever the same files give different texts."""

    def files_in(self, folder: Path) -> list[Path]:
        return self.files(folder)

    def expected_files(self) -> str:
        return self.expected

    def open(self, data: Path | None, cache: Path, notify: Notify) -> dict[str, Path]:
        files = self.find(data, cache)
        return prepare(
            name=self.name,
            files=files,
            lines=self.lines,
            cache=cache,
            notify=notify,
            languages=self.languages,
            version=self.version,
        )


def prepare(
    name: str,
    files: list[Path],
    lines: Callable[[list[Path]], NamedLines],
    cache: Path,
    notify: Notify,
    *,
    languages: tuple[str, ...] = (),
    version: int = 1,
) -> dict[str, Path]:
    """Return the paths of the texts, by the name of the text. Write the texts to the cache first, if necessary.

    Args:
        name: Name of the cache entry, and of the corpus in lines of progress.
        files: The files that the texts are made from.
        lines: Function that reads the files and yields the lines of the texts.
        cache: Cache folder.
        notify: Function that is called with lines of progress.
        languages: The languages of parallel text.
        version: Version of the conversion.
    """
    # The same files in another folder are converted again, and give the same texts.
    file_identities = [identify_file(path) for path in files]
    identity = json.dumps([version, *languages, *file_identities])
    digest = hashlib.sha256(identity.encode()).hexdigest()

    text_names = list(SPLITS)
    if languages:
        text_names = [f"{split}.{language}" for split in SPLITS for language in languages]

    def write(folder: Path) -> None:
        checked_lines = _raise_data_errors(lines(files), files)
        reported_lines = report_progress(checked_lines, lambda count: f"{name}: {count:,} lines prepared", notify)
        write_lines(folder, reported_lines, text_names)

    return store_texts(cache, f"{name}-{digest[:12]}", write, notify, text_names)


def store_texts(
    cache: Path, entry_name: str, write: Callable[[Path], None], notify: Notify, text_names: Sequence[str] = SPLITS
) -> dict[str, Path]:
    """Return the paths of the texts in a cache entry, by the name of the text.

    If the entry does not exist, `write` is called first. It writes a file NAME.txt for each text to an empty folder.
    """
    entry = cache / "corpora" / entry_name

    def find_texts(folder: Path) -> dict[str, Path]:
        return {name: folder / f"{name}.txt" for name in text_names}

    return load_or_create(entry, write, find_texts, notify, always_write=needs_check(entry))


def write_lines(folder: Path, lines: NamedLines, text_names: Iterable[str] = SPLITS) -> None:
    """Write every line to the file of its text."""
    with contextlib.ExitStack() as stack:
        files = {}
        for name in text_names:
            file = (folder / f"{name}.txt").open("wb")
            files[name] = stack.enter_context(file)
        for name, line in lines:
            files[name].write(f"{line}\n".encode())


def choose_split(text: str, num_parts: int) -> str:
    """Return the split of a document by the hash of its text or its id.

    One document in `num_parts` is validation text and one is test text.
    """
    digest = hashlib.sha256(text.encode()).digest()
    remainder = int.from_bytes(digest[:8]) % num_parts
    return {0: "valid", 1: "test"}.get(remainder, "train")


def identify_file(path: Path) -> tuple[str, int, int, int]:
    """Return the path and size of a file, and the times of the last change of its content and of its inode."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _raise_data_errors(lines: NamedLines, files: list[Path]) -> NamedLines:
    """Yield the lines. Raise a DataError if a file is damaged or does not have the expected format."""
    try:
        yield from lines
    except (OSError, EOFError, ValueError, lzma.LZMAError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{os.path.commonpath(files)}: cannot be read: {error}; download it again") from error


def separate_punctuation(text: str) -> str:
    """Put spaces between words and punctuation marks: "Yes, it is." becomes "Yes , it is ."."""
    return " ".join(_WORD_OR_PUNCTUATION.findall(text))


def tokenise(text: str) -> str:
    """Convert a text to lower case and put spaces between words and punctuation marks."""
    return separate_punctuation(text.lower())
