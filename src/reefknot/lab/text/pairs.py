"""Parallel text: pairs of lines that mean the same, in two aligned files or in the columns of a TSV.

Line i of one file belongs to line i of the other, so files with different numbers of lines are refused: somewhere in
them every later pair would be wrong. In a TSV the first column is the source, the second the target. Files may be
packed by gzip; packed ones and TSVs are first written to the cache as aligned files. What a line is, is said in
`lines.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from reefknot.errors import DataError
from reefknot.lab.text.prepared import SPLITS, Lines, Preparation
from reefknot.storage.lines import count_lines, read_file, read_plain

STEMS = {"train": "train", "valid": "valid|validation|dev|val", "test": "test"}
"""How the files of each split may be called."""
_PACKED = "(?:[.]gz)?"


class Pair(NamedTuple):
    """Two aligned lines: their number from 1, their words, and the size of the target in bytes with its line end."""

    number: int
    source: list[str]
    target: list[str]
    size: int


class Aligned(NamedTuple):
    """Two files that are aligned line by line."""

    source: Path
    target: Path

    def lines(self) -> int:
        """How many pairs there are, DataError unless both files have as many lines."""
        source, target = map(count_lines, self)
        if source != target:
            raise DataError(
                f"{self.source} has {source:,} lines and {self.target} has {target:,}: they are not aligned;"
                " line i of one must be the translation of line i of the other"
            )
        return source

    def sha256(self, hashed: Callable[[Path], str]) -> str:
        """SHA-256 over those of both files, as `hashed` gives them."""
        return hashlib.sha256(" ".join(map(hashed, self)).encode()).hexdigest()

    def pairs(self, first: int = 0, last: int | None = None) -> Iterator[Pair]:
        """The pairs from `first`, counted from 0, up to `last`."""
        both = zip(read_file(self.source), read_file(self.target), strict=True)
        for source, target in islice(both, first, last):
            yield Pair(source.number, source.words, target.words, target.size)


def find_files(folder: Path, present: Iterable[str], languages: tuple[str, str]) -> dict[str, list[Path]]:
    """For each split the two files of a folder, source first, or the one TSV; `present` are the folder's files."""
    return {split: _find(folder, list(present), split, languages) for split in SPLITS}


def _find(folder: Path, present: list[str], split: str, languages: tuple[str, str]) -> list[Path]:
    def named(ending: str) -> list[str]:
        pattern = re.compile(rf"(?:[^.].*[.])?(?:{STEMS[split]})[.]{ending}{_PACKED}", re.IGNORECASE)
        return [file for file in present if pattern.fullmatch(file)]

    sides = [named(f"{re.escape(language)}(?:[.]txt)?") for language in languages]
    columns = named("tsv")
    if columns and not any(sides):
        sides = [columns]
    elif columns:
        sides = [[*files, *columns] for files in sides]
    for files in sides:
        if len(files) != 1:
            problem = f"{', '.join(files)} could each be" if files else "nothing there is"
            wanted = " and ".join(f"{split}.{language}[.txt][.gz]" for language in languages)
            raise DataError(
                f"{folder}: {problem} a side of the {split} text; looked for {wanted}, or {split}.tsv[.gz];"
                f" the folder holds {listing(present)}"
            )
    return [folder / file for (file,) in sides]


def listing(names: list[str], most: int = 12) -> str:
    """The files of a folder in a sentence."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "no files") + more


def unpacked(languages: tuple[str, str]) -> Preparation:
    """How a folder that holds packed files, or TSVs, becomes aligned files."""
    return Preparation("a folder of parallel text", "", (), lambda _: [], _reader(languages), languages=languages)


def published(
    title: str,
    stems: Mapping[str, str],
    languages: tuple[str, str],
    places: tuple[str, ...],
    sha256: Mapping[str, str] | None = None,
) -> Preparation:
    """A corpus of two files per split, `stem.language`, each as it is or packed by gzip."""
    names = [f"{stems[split]}.{language}" for split in SPLITS for language in languages]

    def files(place: Path) -> list[Path]:
        found = [[path for path in (place / name, place / f"{name}.gz") if path.is_file()] for name in names]
        return [paths[0] for paths in found] if all(found) else []

    wanted = f"{', '.join(names)}, or each with .gz,"
    return Preparation(title, wanted, places, files, _reader(languages), sha256 or {}, languages=languages)


def _reader(languages: tuple[str, str]) -> Callable[[list[Path]], Lines]:
    """Reads what `find_files` finds: for each split two files, or a TSV."""

    def lines(files: list[Path]) -> Lines:
        rest = iter(files)
        for split in SPLITS:
            texts = [f"{split}.{language}" for language in languages]
            path = next(rest)
            if re.search(rf"[.]tsv{_PACKED}$", path.name, re.IGNORECASE):
                for columns in _columns(path):
                    yield from zip(texts, columns, strict=True)
            else:
                yield from _both(Aligned(path, next(rest)), texts)

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
                f"{path}, line {number}: {len(columns)} column{'s' * (len(columns) > 1)} where a line is the source,"
                " a tab and the target"
            )
        yield columns
