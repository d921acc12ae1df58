"""Parallel text: pairs of lines that are translations of each other, in two aligned files or in the columns of a TSV.

Line i of one file is the translation of line i of the other. Files with different numbers of lines are rejected,
because every pair after the first missing line would be wrong. In a TSV file, the first column is the source and the
second column is the target. Files may be gzipped. Gzipped files and TSV files are first written to the cache as aligned
files.
`storage/lines.py` defines what a line is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from reefknot.errors import DataError
from reefknot.lab.text.prepared import Lines, PreparedCorpus
from reefknot.lab.text.published import SPLITS
from reefknot.storage.lines import count_lines, read_file, read_plain

GZIP = "(?:[.]gz)?"
"""Pattern of the optional ending of a gzipped file."""


class Pair(NamedTuple):
    """Two aligned lines: their number, counted from 1, their words, and the bytes of the target with its line end."""

    number: int
    source: list[str]
    target: list[str]
    size: int


class Aligned(NamedTuple):
    """Two files that are aligned line by line."""

    source: Path
    target: Path

    def lines(self) -> int:
        """Return the number of pairs. Raise a DataError if the files have different numbers of lines."""
        source, target = map(count_lines, self)
        if source != target:
            raise DataError(
                f"{self.source} has {source:,} lines and {self.target} has {target:,}: they are not aligned;"
                " line i of one must be the translation of line i of the other"
            )
        return source

    def sha256(self, file_sha256: Callable[[Path], str]) -> str:
        """Return a SHA-256 over the hashes of both files, which `file_sha256` computes."""
        return hashlib.sha256(" ".join(map(file_sha256, self)).encode()).hexdigest()

    def pairs(self, first: int = 0, last: int | None = None) -> Iterator[Pair]:
        """Yield the pairs from `first`, counted from 0, up to `last`."""
        both = zip(read_file(self.source), read_file(self.target), strict=True)
        for source, target in islice(both, first, last):
            yield Pair(source.number, source.words, target.words, target.size)


def published_pairs(
    *,
    name: str,
    description: str,
    how_to_get: str,
    languages: tuple[str, str],
    stems: Mapping[str, str],
    folders: tuple[str, ...] = (),
    sha256: Mapping[str, str] | None = None,
) -> PreparedCorpus:
    """Define a corpus with two files per split, called `stem.language`, gzipped or not."""
    names = [f"{stems[split]}.{language}" for split in SPLITS for language in languages]

    def files(folder: Path) -> list[Path]:
        present = [[path for path in (folder / name, folder / f"{name}.gz") if path.is_file()] for name in names]
        return [paths[0] for paths in present] if all(present) else []

    return PreparedCorpus(
        name=name,
        description=description,
        languages=languages,
        how_to_get=how_to_get,
        expected=f"{', '.join(names[:-1])} and {names[-1]}, or the same with .gz",
        folders=folders,
        files=files,
        lines=read_aligned(languages),
        sha256=sha256 or {},
    )


def read_aligned(languages: tuple[str, ...]) -> Callable[[list[Path]], Lines]:
    """Return a function that reads the files of all splits in order: two files or a TSV file per split."""

    def lines(files: list[Path]) -> Lines:
        remaining = iter(files)
        for split in SPLITS:
            texts = [f"{split}.{language}" for language in languages]
            path = next(remaining)
            if re.search(rf"[.]tsv{GZIP}$", path.name, re.IGNORECASE):
                for columns in _columns(path):
                    yield from zip(texts, columns, strict=True)
            else:
                yield from _both(Aligned(path, next(remaining)), texts)

    return lines


def _both(files: Aligned, texts: Iterable[str]) -> Lines:
    files.lines()
    for text, path in zip(texts, files, strict=True):
        yield from ((text, line) for line in read_plain(path))


def _columns(path: Path) -> Iterator[list[str]]:
    for number, line in enumerate(read_plain(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise DataError(
                f"{path}, line {number}: expected source, tab and target, found {len(columns)}"
                f" column{'s' * (len(columns) > 1)}"
            )
        yield columns
