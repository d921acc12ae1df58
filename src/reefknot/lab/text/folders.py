"""Use a folder of the user's own text files as a corpus.

`open_folder` returns a corpus, whose method `open` returns its files:

    TextFolder    one file per split: train.txt, valid.txt and test.txt
    PairFolder    parallel text: two aligned files per split, such as train.en and train.de, or a TSV file
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from reefknot.errors import DataError, find_similar_name
from reefknot.lab.text.corpora import CORPORA
from reefknot.lab.text.published import SPLITS, Corpus
from reefknot.storage.progress import Notify

_SPLIT_PATTERNS = {"train": "train", "valid": "valid|validation|dev|val", "test": "test"}
_MAX_LISTED_NAMES = 12  # in an error message


def open_folder(name: str, languages: tuple[str, ...] = ()) -> TextFolder | PairFolder:
    """Return the folder at the path `name` as a corpus or, with languages, as a corpus of parallel text."""
    is_folder = is_file = False
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # not a possible path, or no such user
        folder = Path(name).expanduser().resolve()
        is_folder = folder.is_dir()
        is_file = folder.is_file()
    if not is_folder:
        similar_name = find_similar_name(name, CORPORA)
        if is_file:
            hint = "it is a file: use `reefknot train --text FILE`, or set corpus.text.split=lines"
        elif similar_name:
            hint = f"did you mean {similar_name}?"
        else:
            hint = f"the known corpora are: {', '.join(CORPORA)}"
        raise DataError(f"corpus {name[:200]!r} is neither a known corpus nor a folder; {hint}")
    if languages:
        return PairFolder(name=f"{folder.name}/", folder=folder, languages=languages)
    return TextFolder(name=f"{folder.name}/", folder=folder)


@dataclass(frozen=True, kw_only=True)
class TextFolder(Corpus):
    """A folder that holds one file for each of train, valid and test."""

    is_folder: ClassVar[bool] = True
    folder: Path
    description: str = "a folder of text"

    def open(self, data: Path | None, cache: Path, notify: Notify) -> dict[str, Path]:
        file_names = _list_file_names(self.folder)
        files = {}
        for split, split_pattern in _SPLIT_PATTERNS.items():
            pattern = re.compile(rf"(?:[^.].*\.)?(?:{split_pattern})(?:\.txt|\.tokens)?", re.IGNORECASE)
            matches = [name for name in file_names if pattern.fullmatch(name)]
            if len(matches) != 1:
                raise DataError(
                    f"{self.folder}: {_describe_matches(matches)} the {split} text; expected one file"
                    f" [NAME.]({split_pattern})[.txt|.tokens]; the folder holds {_format_names(file_names)};"
                    " to split a text, use `reefknot train --text FOLDER`, or set corpus.text.split=lines"
                )
            files[split] = self.folder / matches[0]
        return files


@dataclass(frozen=True, kw_only=True)
class PairFolder(Corpus):
    """A folder that holds parallel text: for each split two aligned files or a TSV file, possibly gzipped."""

    folder: Path
    description: str = "a folder of parallel text"

    def open(self, data: Path | None, cache: Path, notify: Notify) -> dict[str, Path]:
        file_names = _list_file_names(self.folder)
        files = {split: self._find_split(split, file_names) for split in SPLITS}

        # Gzipped files and TSV files are first converted to plain files.
        all_files = [path for split_files in files.values() for path in split_files]
        has_tsv = any(len(split_files) == 1 for split_files in files.values())
        has_gzip = any(path.suffix.lower() == ".gz" for path in all_files)
        if has_tsv or has_gzip:
            from reefknot.lab.text.pairs import read_aligned
            from reefknot.lab.text.prepared import prepare

            return prepare(
                name="pairs",
                files=all_files,
                lines=read_aligned(self.languages),
                cache=cache,
                notify=notify,
                languages=self.languages,
            )

        plain_files = {}
        for split, split_files in files.items():
            for language, path in zip(self.languages, split_files, strict=True):
                plain_files[f"{split}.{language}"] = path
        return plain_files

    def _find_split(self, split: str, file_names: list[str]) -> list[Path]:
        """Return the two files of a split, source first, or its TSV file."""
        matches_by_side = []
        for language in self.languages:
            ending = f"{re.escape(language)}(?:[.]txt)?"
            matches_by_side.append(_match_split(split, ending, file_names))

        tsv_names = _match_split(split, "tsv", file_names)
        if tsv_names and not any(matches_by_side):
            matches_by_side = [tsv_names]  # one file for both sides
        elif tsv_names:
            # Ambiguous. The error message below names all files.
            matches_by_side = [[*matches, *tsv_names] for matches in matches_by_side]

        for matches in matches_by_side:
            if len(matches) != 1:
                expected = " and ".join(f"{split}.{language}[.txt][.gz]" for language in self.languages)
                raise DataError(
                    f"{self.folder}: {_describe_matches(matches)} a side of the {split} text; expected {expected}, or"
                    f" {split}.tsv[.gz]; the folder holds {_format_names(file_names)}"
                )
        return [self.folder / matches[0] for matches in matches_by_side]


def _match_split(split: str, ending: str, file_names: list[str]) -> list[str]:
    """Return the file names of a split that end in the regular expression `ending`, possibly with `.gz`."""
    from reefknot.lab.text.pairs import GZIP

    pattern = re.compile(rf"(?:[^.].*[.])?(?:{_SPLIT_PATTERNS[split]})[.]{ending}{GZIP}", re.IGNORECASE)
    return [name for name in file_names if pattern.fullmatch(name)]


def _list_file_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder, sorted."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise DataError(f"{folder}: cannot be read: {error.strerror}") from error


def _describe_matches(matches: list[str]) -> str:
    """Return the beginning of an error message about none or several files."""
    if not matches:
        return "no file is"
    return f"{', '.join(matches)} could each be"


def _format_names(names: list[str]) -> str:
    if not names:
        return "no files"
    formatted_names = ", ".join(names[:_MAX_LISTED_NAMES])
    if len(names) > _MAX_LISTED_NAMES:
        formatted_names += f" and {len(names) - _MAX_LISTED_NAMES} more"
    return formatted_names
