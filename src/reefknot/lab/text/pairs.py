"""Read parallel text: pairs of lines that are translations of each other.

The text is in two aligned files (`AlignedFiles`): line i of one file is the translation of line i of the other. Files
with different numbers of lines are rejected, because every pair after the first missing line would be wrong.

`published_pairs` defines a parallel corpus that the user downloads. Its files may be gzipped, or a split may be one TSV
file with the source in the first column and the target in the second. Such files are first written to the cache as
aligned files. `storage/lines.py` defines what a line is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from reefknot.errors import DataError
from reefknot.lab.text.prepared import NamedLines, PreparedCorpus
from reefknot.lab.text.published import SPLITS
from reefknot.storage.lines import count_lines, read_file, read_plain

GZIP = "(?:[.]gz)?"
"""Regular expression of the optional ending of a gzipped file."""


class Pair(NamedTuple):
    """Two aligned lines."""

    line_number: int
    """Line number in both files, counted from 1."""
    source: list[str]
    """Words of the source line."""
    target: list[str]
    """Words of the target line."""
    size: int
    """Size of the target line in bytes, line end included."""


class AlignedFiles(NamedTuple):
    """Two files that are aligned line by line."""

    source: Path
    target: Path

    def count_pairs(self) -> int:
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

    def read_pairs(self, start: int = 0, end: int | None = None) -> Iterator[Pair]:
        """Yield the pairs from `start`, counted from 0, up to but not including `end`."""
        aligned_lines = zip(read_file(self.source), read_file(self.target), strict=True)
        for source, target in islice(aligned_lines, start, end):
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

    def find_files(folder: Path) -> list[Path]:
        paths = []
        for name in names:
            existing = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
            if not existing:
                return []
            paths.append(existing[0])
        return paths

    return PreparedCorpus(
        name=name,
        description=description,
        languages=languages,
        how_to_get=how_to_get,
        expected=f"{', '.join(names[:-1])} and {names[-1]}, or the same with .gz",
        folders=folders,
        files=find_files,
        lines=read_aligned(languages),
        sha256=sha256 or {},
    )


def read_aligned(languages: tuple[str, ...]) -> Callable[[list[Path]], NamedLines]:
    """Return a function that reads the files of all splits in order: two files or a TSV file per split."""

    def read_lines(files: list[Path]) -> NamedLines:
        remaining_files = iter(files)
        for split in SPLITS:
            text_names = [f"{split}.{language}" for language in languages]
            path = next(remaining_files)
            if re.search(rf"[.]tsv{GZIP}$", path.name, re.IGNORECASE):
                for columns in _read_columns(path):
                    yield from zip(text_names, columns, strict=True)
            else:
                yield from _read_both_files(AlignedFiles(path, next(remaining_files)), text_names)

    return read_lines


def _read_both_files(files: AlignedFiles, text_names: Iterable[str]) -> NamedLines:
    files.count_pairs()  # raises an error if the files are not aligned
    for text_name, path in zip(text_names, files, strict=True):
        yield from ((text_name, line) for line in read_plain(path))


def _read_columns(path: Path) -> Iterator[list[str]]:
    for line_number, line in enumerate(read_plain(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            raise DataError(
                f"{path}, line {line_number}: expected source, tab and target, found {len(columns)}"
                f" column{'s' * (len(columns) > 1)}"
            )
        yield columns
