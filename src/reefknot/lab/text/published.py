"""Base classes of corpora: a name, a description, and how to find the text files.

`Corpus.open` returns the files of a corpus. These are the kinds of corpora:

    Corpus
      DownloadedCorpus       files that the user downloads into a data folder
        PublishedCorpus      train, valid and test texts that are read unchanged, such as `corpora/ptb.py`
        PreparedCorpus       files in another form that are converted to such texts first (`prepared.py`)
      TextFolder, PairFolder texts of the user in any folder (`folders.py`)
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from reefknot.errors import CorpusNotFound, DataError
from reefknot.storage.cache import file_hash
from reefknot.storage.progress import Notify

SPLITS = ("train", "valid", "test")
"""The parts of every corpus: text for training, for choosing settings, and for the final score."""


@dataclass(frozen=True, kw_only=True)
class Corpus(ABC):
    """A text, or a parallel text, with a name. Creating the object does not read any file."""

    name: str
    description: str
    """One line that says what the text is and how it is split."""
    languages: tuple[str, ...] = ()
    """The two languages of a parallel text; empty for any other text."""
    types: int | None = None
    """Number of distinct words in the training text, `<eos>` included, if it is published."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of tokens in each split, one `<eos>` per line included, if it is published."""

    is_folder: ClassVar[bool] = False
    """Whether this is a user's folder, whose files may be recognised as those of a known corpus."""

    @abstractmethod
    def open(self, data: Path | None, cache: Path, notify: Notify) -> dict[str, Path]:
        """Return the files of the splits: `train`, `valid` and `test`, or `train.en`, `train.de` and so on.

        Files that have to be converted are written to `cache`, and `notify` is called with lines of progress.
        """

    @property
    def needs_data(self) -> bool:
        """Whether the user has to download files first."""
        return False


@dataclass(frozen=True, kw_only=True)
class DownloadedCorpus(Corpus):
    """A corpus whose files the user downloads into a subfolder of the data folder, or into the data folder itself."""

    how_to_get: str
    """A sentence that says where to get the files, for the error message if files are missing."""
    folders: tuple[str, ...] = ()
    """Subfolders of the data folder in which the files may be; the corpus name if empty."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the published files by file name."""

    @abstractmethod
    def files_in(self, folder: Path) -> list[Path]:
        """Return the files of the corpus in a folder: all files, or none if one is missing."""

    @abstractmethod
    def expected_files(self) -> str:
        """Return a description of the files, which completes the error message "expected FOLDER/..."."""

    @property
    def needs_data(self) -> bool:
        return True

    def find(self, data: Path | None, cache: Path) -> list[Path]:
        """Return the files in `data`, or in REEFKNOT_DATA. Raise a DataError if a hash is not the published hash."""
        paths = self._search(data)
        for path in paths:
            expected_sha256 = self.sha256.get(path.name)
            if expected_sha256 is None:
                continue
            sha256 = file_hash(path, cache)
            if sha256 != expected_sha256:
                raise DataError(
                    f"{path} is not the published {self.name} file: expected SHA-256 {expected_sha256}, found {sha256}."
                    f" Download it again{self._describe_alternative()}."
                )
        return paths

    def _search(self, data: Path | None) -> list[Path]:
        """Return the files from the first folder that has all of them, or raise CorpusNotFound."""
        data_folder = data or os.environ.get("REEFKNOT_DATA")
        if not data_folder:
            raise CorpusNotFound(f"{self.name} not found: {self._explain_download('DIR')}")
        if not Path(data_folder).is_dir():
            raise CorpusNotFound(
                f"{self.name} not found: the folder {data_folder} does not exist; {self._explain_download(data_folder)}"
            )
        folders = [Path(data_folder, subfolder) for subfolder in (*self._subfolders, ".")]
        for folder in folders:
            with contextlib.suppress(OSError):
                paths = self.files_in(folder)
                if paths:
                    return paths
        self._check_incomplete(folders, data_folder)
        raise CorpusNotFound(f"{self.name} not found in {data_folder}: {self._explain_download(data_folder)}")

    @property
    def _subfolders(self) -> tuple[str, ...]:
        return self.folders or (self.name,)

    def _explain_download(self, data_folder: str | Path) -> str:
        """Return where the files are expected and where to get them, for an error message."""
        folder = Path(data_folder, self._subfolders[0])
        return f"expected {folder}/{self.expected_files()}. {self.how_to_get} Pass --data DIR or set REEFKNOT_DATA."

    def _check_incomplete(self, folders: list[Path], data_folder: str | Path) -> None:
        """Raise a DataError if only some of the files exist. If no file exists, the corpus is just not found."""

    def _describe_alternative(self) -> str:
        """Return what to do instead of downloading a file again, for an error message."""
        return ""


@dataclass(frozen=True, kw_only=True)
class PublishedCorpus(DownloadedCorpus):
    """A corpus that is published as a train, a valid and a test text, which are read unchanged.

    A file without a SHA-256 is identified by the published `tokens` and `types`, which are compared when it is encoded.
    """

    files: Mapping[str, str]
    """File name of each split."""

    def files_in(self, folder: Path) -> list[Path]:
        return find_all_files(folder, *self.files.values())

    def expected_files(self) -> str:
        *first_names, last_name = self.files.values()
        return f"{', '.join(first_names)} and {last_name}"

    def open(self, data: Path | None, cache: Path, notify: Notify) -> dict[str, Path]:
        paths = self.find(data, cache)
        return dict(zip(self.files, paths, strict=True))

    def matches(self, hashes: Mapping[str, str]) -> bool:
        """Return whether files with these hashes, by split, are the files of this corpus."""
        return all(hashes[split] == self.sha256.get(name) for split, name in self.files.items())

    def _check_incomplete(self, folders: list[Path], data_folder: str | Path) -> None:
        missing_names = []
        for name in self.files.values():
            if not any((folder / name).is_file() for folder in folders):
                missing_names.append(name)
        if len(missing_names) == len(self.files):
            return

        problem = "the files are in different folders"
        if missing_names:
            problem = f"{', '.join(missing_names)} not found"
        raise DataError(f"{self.name} is incomplete in {data_folder}: {problem}; {self._explain_download(data_folder)}")

    def _describe_alternative(self) -> str:
        return f", or set corpus.name to its folder instead of {self.name} to use the text as it is"


def find_all_files(folder: Path, *names: str) -> list[Path]:
    """Return the files with these names in a folder, or an empty list if one is missing."""
    paths = [folder / name for name in names]
    if not all(path.is_file() for path in paths):
        return []
    return paths
