"""Folders of a user's texts: one file per split or, for parallel text, two aligned files or a TSV file per split."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from reefknot.errors import DataError
from reefknot.lab.text.corpora import CORPORA
from reefknot.lab.text.published import SPLITS, Corpus
from reefknot.storage.lines import is_gzip
from reefknot.storage.progress import Notify

_SPLIT_NAMES = {"train": "train", "valid": "valid|validation|dev|val", "test": "test"}
_MOST_LISTED = 12  # file names in an error message


@dataclass(frozen=True, kw_only=True)
class TextFolder(Corpus):
    """A folder that holds one file for each of train, valid and test."""

    is_folder: ClassVar[bool] = True
    folder: Path
    description: str = "a folder of text"

    def open(self, data: Path | None, cache: Path, notify: Notify) -> dict[str, Path]:
        names = list_folder(self.folder)
        files = {}
        for split, stems in _SPLIT_NAMES.items():
            pattern = re.compile(rf"(?:[^.].*\.)?(?:{stems})(?:\.txt|\.tokens)?", re.IGNORECASE)
            matches = [name for name in names if pattern.fullmatch(name)]
            if len(matches) != 1:
                raise DataError(
                    f"{self.folder}: {_count(matches)} the {split} text; expected one file"
                    f" [NAME.]({stems})[.txt|.tokens]; the folder holds {_listing(names)}"
                )
            files[split] = self.folder / matches[0]
        return files


@dataclass(frozen=True, kw_only=True)
class PairFolder(Corpus):
    """A folder that holds parallel text: for each split two aligned files or a TSV file, possibly gzipped."""

    folder: Path
    description: str = "a folder of parallel text"

    def open(self, data: Path | None, cache: Path, notify: Notify) -> dict[str, Path]:
        names = list_folder(self.folder)
        files = {split: self._files(split, names) for split in SPLITS}
        paths = [path for sides in files.values() for path in sides]
        if any(len(sides) == 1 for sides in files.values()) or any(map(is_gzip, paths)):
            from reefknot.lab.text.pairs import read_aligned
            from reefknot.lab.text.prepared import prepare

            return prepare("pairs", paths, read_aligned(self.languages), cache, notify, languages=self.languages)
        return {
            f"{split}.{language}": path
            for split, sides in files.items()
            for language, path in zip(self.languages, sides, strict=True)
        }

    def _files(self, split: str, names: list[str]) -> list[Path]:
        """Return the two files of a split, source first, or its TSV file."""
        from reefknot.lab.text.pairs import GZIP

        def matches(ending: str) -> list[str]:
            pattern = re.compile(rf"(?:[^.].*[.])?(?:{_SPLIT_NAMES[split]})[.]{ending}{GZIP}", re.IGNORECASE)
            return [name for name in names if pattern.fullmatch(name)]

        sides = [matches(f"{re.escape(language)}(?:[.]txt)?") for language in self.languages]
        tables = matches("tsv")
        if tables and not any(sides):
            sides = [tables]
        elif tables:
            sides = [[*side, *tables] for side in sides]
        for side in sides:
            if len(side) != 1:
                expected = " and ".join(f"{split}.{language}[.txt][.gz]" for language in self.languages)
                raise DataError(
                    f"{self.folder}: {_count(side)} a side of the {split} text; expected {expected}, or"
                    f" {split}.tsv[.gz]; the folder holds {_listing(names)}"
                )
        return [self.folder / name for (name,) in sides]


def open_folder(name: str, languages: tuple[str, ...] = ()) -> TextFolder | PairFolder:
    """Return the folder at the path `name` as a corpus or, with languages, as a corpus of parallel text."""
    try:
        folder = Path(name).expanduser().resolve()
        is_folder = folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # not a possible path, or no such user
        is_folder = False
    if not is_folder:
        raise DataError(f"corpus {name[:200]!r} is neither a known corpus ({', '.join(CORPORA)}) nor a folder")
    if languages:
        return PairFolder(name=f"{folder.name}/", folder=folder, languages=languages)
    return TextFolder(name=f"{folder.name}/", folder=folder)


def list_folder(folder: Path) -> list[str]:
    """Return the names of the files in a folder, sorted."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error


def _count(matches: list[str]) -> str:
    return f"{', '.join(matches)} could each be" if matches else "no file is"


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return (", ".join(names[:_MOST_LISTED]) or "no files") + more
