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
        num_source = count_lines(self.source)
        num_target = count_lines(self.target)
        if num_source != num_target:
            raise DataError(
                f"{self.source} has {num_source:,} lines and {self.target} has {num_target:,}: they are not aligned;"
                " line i of one must be the translation of line i of the other"
            )
        return num_source

    def sha256(self, file_sha256: Callable[[Path], str]) -> str:
        """Return a SHA-256 over the hashes of both files, which `file_sha256` computes."""
        both_hashes = f"{file_sha256(self.source)} {file_sha256(self.target)}"
        return hashlib.sha256(both_hashes.encode()).hexdigest()

    def read_pairs(self, start: int = 0, end: int | None = None) -> Iterator[Pair]:
        """Yield the pairs from `start`, counted from 0, up to but not including `end`."""
        aligned_lines = zip(read_file(self.source), read_file(self.target), strict=True)
        for source_line, target_line in islice(aligned_lines, start, end):
            yield Pair(source_line.number, source_line.words, target_line.words, target_line.size)


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
    """Define a corpus with two files per split, called `stem.language`, gzipped or not.

    Args:
        name: Name of the corpus in recipes.
        description: One line that says what the text is and how it is split.
        how_to_get: A sentence that says where to get the files.
        languages: Source and target language, which are the endings of the file names.
        stems: File name of each split without its language.
        folders: Subfolders of the data folder in which the files may be; the corpus name if empty.
        sha256: SHA-256 of the published files by file name.
    """
    file_names = [f"{stems[split]}.{language}" for split in SPLITS for language in languages]

    def find_files(folder: Path) -> list[Path]:
        paths = []
        for file_name in file_names:
            plain_path = folder / file_name
            gzipped_path = folder / f"{file_name}.gz"
            if plain_path.is_file():
                paths.append(plain_path)
            elif gzipped_path.is_file():
                paths.append(gzipped_path)
            else:
                return []
        return paths

    return PreparedCorpus(
        name=name,
        description=description,
        languages=languages,
        how_to_get=how_to_get,
        expected=f"{', '.join(file_names[:-1])} and {file_names[-1]}, or the same with .gz",
        folders=folders,
        files=find_files,
        lines=read_aligned(languages),
        sha256=sha256 or {},
    )


def read_aligned(languages: tuple[str, ...]) -> Callable[[list[Path]], NamedLines]:
    """Return a function that reads the files of all splits in order: two files or a TSV file per split.

    The lines that it yields are named by split and language, such as `train.en`.
    """

    def read_lines(files: list[Path]) -> NamedLines:
        remaining_files = iter(files)
        for split in SPLITS:
            text_names = [f"{split}.{language}" for language in languages]
            path = next(remaining_files)
            if re.search(rf"[.]tsv{GZIP}$", path.name, re.IGNORECASE):
                for columns in _read_columns(path):
                    yield from zip(text_names, columns, strict=True)
            else:
                files_of_split = AlignedFiles(source=path, target=next(remaining_files))
                yield from _read_both_files(files_of_split, text_names)

    return read_lines


def _read_both_files(files: AlignedFiles, text_names: Iterable[str]) -> NamedLines:
    """Yield the lines of the source file, and then the lines of the target file."""
    files.count_pairs()  # raises an error if the files are not aligned
    for text_name, path in zip(text_names, files, strict=True):
        yield from ((text_name, line) for line in read_plain(path))


def _read_columns(path: Path) -> Iterator[list[str]]:
    """Yield the source and the target of each line of a TSV file."""
    for line_number, line in enumerate(read_plain(path), start=1):
        columns = line.split("\t")
        if len(columns) != 2:
            columns_word = "column" if len(columns) == 1 else "columns"
            raise DataError(
                f"{path}, line {line_number}: expected source, tab and target, found {len(columns)} {columns_word}"
            )
        yield columns
