"""Find the text files of an experiment.

`CorpusSettings` is the `corpus` section of a recipe (the file that describes an experiment): the name of a known corpus
or a folder, and the part of the training text that is used. `find_corpus` returns the files of the text:

    text_files = find_corpus(CorpusSettings(name="wikitext-2"), data=None, cache=Path("cache"))
    for line in text_files.read_lines("train"):
        print(line.words)

`find_pairs` does the same for parallel text, the lines of which are pairs of a sentence and its translation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.settings import Count, Settings
from reefknot.lab.text.corpora import CORPORA, known_corpora, known_corpus, parallel_corpora
from reefknot.lab.text.published import SPLITS, Corpus, PublishedCorpus
from reefknot.lab.text.sources import open_text
from reefknot.lab.text.splitting import TextSettings, open_text_corpus
from reefknot.storage.cache import file_hash
from reefknot.storage.lines import Line, count_lines, read_file
from reefknot.storage.progress import Notify, silent

if TYPE_CHECKING:
    from reefknot.lab.text.pairs import AlignedFiles, Pair

__all__ = ["SPLITS", "CorpusSettings", "PairFiles", "PairsSettings", "TextFiles", "find_corpus", "find_pairs"]

Language = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]


class PairsSettings(Settings):
    """Parallel text: its languages, and which training pairs are left out."""

    source: Annotated[Language, Field(description="Source language, as in the file name train.en.")]
    target: Annotated[Language, Field(description="Target language, as in the file name train.de.")]
    longest: Annotated[
        Count | None,
        Field(description="Maximum number of tokens per side, not counting <eos>. Longer training pairs are left out."),
    ] = 100
    ratio: Annotated[
        float | None,
        Field(
            gt=1.0,
            le=1e9,
            description="Maximum ratio between the numbers of tokens on the two sides of a training pair. Pairs "
            "with a larger ratio are left out.",
        ),
    ] = None

    @model_validator(mode="after")
    def _check_languages(self) -> PairsSettings:
        if self.source == self.target:
            raise ValueError(f"source and target are both {self.source}; use two languages")
        return self

    def reason_to_drop(self, source_length: int, target_length: int) -> str | None:
        """Return why a training pair with these numbers of tokens is left out, or None if it is not."""
        shorter, longer = sorted((source_length, target_length))
        if not shorter:
            return "empty side"
        if self.longest is not None and longer > self.longest:
            return "too long"
        if self.ratio is not None and longer > self.ratio * shorter:
            return "ratio"
        return None


class CorpusSettings(Settings):
    """Settings that define the text. `part` and `tokens` cut only the training text; valid and test stay whole."""

    name: Annotated[
        str,
        Field(
            min_length=1,
            description=f"A known corpus ({', '.join(CORPORA)}), a folder with train, valid and test text, or with "
            "`text` any file or folder.",
        ),
    ] = "python-docs"
    part: Annotated[
        str | None,
        Field(description='Train on the k-th of n equal parts of the lines, written "k/n": "1/2" is the first half.'),
    ] = None
    tokens: Annotated[
        Count | None,
        Field(
            description="Number of words and line ends to train on, from the beginning of the text or of its `part`."
        ),
    ] = None
    pairs: Annotated[
        PairsSettings | None, Field(description="Languages and filters of parallel text, for translation.")
    ] = None
    text: Annotated[
        TextSettings | None,
        Field(description="Read any text: how the file or folder `name` is read and split. `reefknot new` writes it."),
    ] = None

    @model_serializer(mode="wrap")
    def _leave_out_text(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `text` if it is not set, so that older runs, which do not have it, can be resumed."""
        contents: dict[str, Any] = serialize(self)
        if contents.get("text", ...) is None:
            del contents["text"]
        return contents

    @field_validator("part")
    @classmethod
    def _check_part(cls, part: str | None) -> str | None:
        if part is None:
            return None
        match = re.fullmatch(r"([1-9]\d{0,8})/([1-9]\d{0,8})", part, re.ASCII)
        if match is None or int(match[1]) > int(match[2]):
            raise ValueError('give "k/n" with 1 <= k <= n, such as "1/2" for the first half')
        return part

    @model_validator(mode="after")
    def _check_pairs(self) -> CorpusSettings:
        corpus = known_corpus(self.name)
        if corpus is not None:  # not a folder
            self._check_known_corpus(corpus)
        if self.pairs is not None and self.tokens is not None:
            raise ValueError("tokens would cut a pair in two; use part for fewer pairs")
        if self.text is not None and (corpus is not None or self.pairs is not None):
            raise ValueError("text is for your own files; remove it, or set name to a file or folder, without pairs")
        return self

    def _check_known_corpus(self, corpus: Corpus) -> None:
        """Check that `pairs` is set only if the corpus is parallel, and has the languages of the corpus."""
        pairs = self.pairs
        if pairs is None:
            if corpus.languages:
                raise ValueError(f"{self.name} is parallel text; set corpus.pairs.source and corpus.pairs.target")
            return
        if not corpus.languages:
            raise ValueError(f"{self.name} is not parallel text; use {', '.join(parallel_corpora())}, or a folder")
        if {pairs.source, pairs.target} != set(corpus.languages):
            raise ValueError(f"{self.name} has {' and '.join(corpus.languages)}, not {pairs.source} and {pairs.target}")

    @property
    def is_present(self) -> bool:
        """Whether `name` is a path that exists: a folder or, with `text`, any file, folder or pattern of files."""
        try:
            if self.text is None:
                return Path(self.name).expanduser().is_dir()
            return bool(open_text(self.name).files)
        except (DataError, OSError, RuntimeError):  # not a possible path, or no such user
            return False

    @property
    def reads_data_folder(self) -> bool:
        """Whether the text is read from the folder that `--data` names.

        This is false if the text is part of Python, or if it is a file or folder that exists.
        """
        corpus = known_corpus(self.name)
        if corpus is None:
            return not self.is_present
        return corpus.needs_data

    @property
    def selection(self) -> dict[str, Any]:
        """The settings that select a part of the files. Together with the files' hashes they identify the text."""
        selection: dict[str, Any] = {"part": self.part, "tokens": self.tokens}
        if self.pairs is not None:
            selection["pairs"] = self.pairs.model_dump(exclude={"source", "target"})
        return selection

    def training_range(self, num_lines: int, path: Path) -> tuple[int, int]:
        """Return the first line to train on, counted from 0, and the line after the last.

        The part "2/2" of 10 lines gives (5, 10).

        Args:
            num_lines: Number of lines in the training text.
            path: The file, for the error message.
        """
        if self.part is None:
            return 0, num_lines
        part_number, num_parts = map(int, self.part.split("/"))
        start = (part_number - 1) * num_lines // num_parts
        end = part_number * num_lines // num_parts
        if start == end:
            raise DataError(f"{path}: part {self.part} of {num_lines} lines is empty; use fewer parts")
        return start, end


@dataclass(frozen=True)
class TextFiles:
    """A corpus on this machine: for each split a file and its SHA-256. The settings say how the text is cut."""

    corpus: Corpus
    """The known corpus that the files belong to, or the folder that they are in."""
    origin: str
    """Human-readable description of the text and of how it was identified."""
    files: Mapping[str, Path]
    """File of each split (train, valid and test)."""
    hashes: dict[str, str]
    """SHA-256 of each file."""
    settings: CorpusSettings

    @property
    def name(self) -> str:
        return self.corpus.name

    def read_lines(self, split: str) -> Iterator[Line]:
        """Yield the lines of a split. Of the training text, yield only the part that the settings select."""
        path = self.files[split]
        if split != "train" or self.settings.part is None:
            return read_file(path)
        start, end = self.settings.training_range(count_lines(path), path)
        return islice(read_file(path), start, end)


@dataclass(frozen=True)
class PairFiles:
    """Parallel text on this machine: for each split two aligned files and a SHA-256 over both."""

    name: str
    origin: str
    """Human-readable description of the text."""
    files: Mapping[str, AlignedFiles]
    """The source file and the target file of each split."""
    hashes: dict[str, str]
    """SHA-256 over both files of each split."""
    settings: CorpusSettings
    filters: PairsSettings
    """Settings that say which training pairs are left out."""

    def read_pairs(self, split: str) -> Iterator[Pair]:
        """Yield the pairs of a split. Of the training text, yield only the part that the settings select."""
        files = self.files[split]
        num_pairs = files.count_pairs()
        if not num_pairs:
            raise DataError(f"{files.source} and {files.target} are empty: there is no {split} text")
        if split != "train":
            return files.read_pairs()
        start, end = self.settings.training_range(num_pairs, files.source)
        return files.read_pairs(start, end)


def find_corpus(settings: CorpusSettings, *, data: Path | None, cache: Path, notify: Notify = silent) -> TextFiles:
    """Find the files of a text and check their hashes.

    Args:
        settings: The corpus, and the part of it that is used.
        data: Folder of the downloaded corpora; REEFKNOT_DATA if None.
        cache: Folder for texts that have to be prepared first.
        notify: Function that is called with lines of progress.
    """
    if settings.pairs is not None:
        raise SettingsError(
            f"the corpus {settings.name} has corpus.pairs set, which is for parallel text; remove corpus.pairs to read "
            "a monolingual text"
        )
    if settings.text is not None:
        corpus: Corpus = open_text_corpus(settings.name, settings.text)
    else:
        corpus = known_corpus(settings.name) or _open_folder(settings.name)
    files = corpus.open(data, cache, notify)
    hashes = {split: file_hash(path, cache) for split, path in files.items()}

    # A folder of the user may hold the files of a published corpus.
    published = _find_published(corpus, hashes)
    if published is None:
        return TextFiles(corpus, corpus.description, files, hashes, settings)
    if published.name != corpus.name and not corpus.is_folder:
        raise DataError(f"{files['train'].parent}: these are the files of {published.name}, not of {corpus.name}")
    return TextFiles(published, f"{published.description}, recognised by SHA-256", files, hashes, settings)


def find_pairs(settings: CorpusSettings, *, data: Path | None, cache: Path, notify: Notify = silent) -> PairFiles:
    """Find the files of a parallel text and check their hashes, as `find_corpus` does for a text."""
    if settings.pairs is None:
        raise SettingsError(
            f"the corpus {settings.name} is not described as parallel text; set corpus.pairs.source and "
            "corpus.pairs.target"
        )
    from reefknot.lab.text.pairs import AlignedFiles

    source = settings.pairs.source
    target = settings.pairs.target
    corpus = known_corpus(settings.name) or _open_folder(settings.name, (source, target))
    paths = corpus.open(data, cache, notify)

    files = {}
    hashes = {}
    for split in SPLITS:
        files[split] = AlignedFiles(paths[f"{split}.{source}"], paths[f"{split}.{target}"])
        hashes[split] = files[split].sha256(lambda path: file_hash(path, cache))
    return PairFiles(corpus.name, corpus.description, files, hashes, settings, settings.pairs)


def _open_folder(name: str, languages: tuple[str, ...] = ()) -> Corpus:
    from reefknot.lab.text.folders import open_folder

    return open_folder(name, languages)


def _find_published(corpus: Corpus, hashes: Mapping[str, str]) -> PublishedCorpus | None:
    """Return the published corpus whose files have these hashes, if there is one."""
    if isinstance(corpus, PublishedCorpus):
        if corpus.matches(hashes):
            return corpus
    elif not corpus.is_folder:
        return None
    # This imports the modules of all known corpora, so `corpus` itself is tried first.
    for candidate in known_corpora().values():
        if isinstance(candidate, PublishedCorpus) and candidate.matches(hashes):
            return candidate
    return None
