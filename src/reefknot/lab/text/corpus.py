"""The corpus of an experiment: which text to read, where its files are, and which part of the training text is used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator, model_validator

from reefknot.errors import DataError, SettingsError
from reefknot.lab.config.settings import Count, Settings
from reefknot.lab.text.corpora import CORPORA, known_corpora, known_corpus, parallel_corpora
from reefknot.lab.text.published import SPLITS, Corpus, PublishedCorpus
from reefknot.storage.cache import file_hash
from reefknot.storage.lines import Line, count_lines, read_file
from reefknot.storage.progress import Notify, silent

if TYPE_CHECKING:
    from reefknot.lab.text.pairs import Aligned, Pair

__all__ = ["SPLITS", "CorpusSettings", "PairFiles", "PairsSettings", "TextFiles", "find_corpus", "find_pairs"]

Language = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]


class PairsSettings(Settings):
    """Parallel text: its languages, and which training pairs are left out."""

    source: Annotated[Language, Field(description="Source language, as in the file name train.en.")]
    target: Annotated[Language, Field(description="Target language, as in the file name train.de.")]
    longest: Annotated[
        Count | None,
        Field(description="Maximum number of tokens per side, without <eos>. Longer training pairs are left out."),
    ] = 100
    ratio: Annotated[
        float | None,
        Field(
            gt=1.0,
            le=1e9,
            description="Maximum ratio between the numbers of tokens on the two sides of a training pair. Other pairs "
            "are left out.",
        ),
    ] = None

    @model_validator(mode="after")
    def _check_languages(self) -> PairsSettings:
        if self.source == self.target:
            raise ValueError(f"source and target are both {self.source}; name two languages")
        return self

    def leaves_out(self, source: int, target: int) -> str | None:
        """Return why a training pair with these numbers of tokens is left out, or None if it is not."""
        short, long = sorted((source, target))
        if not short:
            return "empty side"
        if self.longest is not None and long > self.longest:
            return "too long"
        return "ratio" if self.ratio is not None and long > self.ratio * short else None


class CorpusSettings(Settings):
    """Settings that define the text. `part` and `tokens` cut only the training text; valid and test stay whole."""

    name: Annotated[
        str,
        Field(
            min_length=1,
            description=f"A known corpus ({', '.join(CORPORA)}), or a folder with train, valid and test text.",
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

    @field_validator("part")
    @classmethod
    def _check_part(cls, part: str | None) -> str | None:
        if part is not None:
            numbers = re.fullmatch(r"([1-9]\d{0,8})/([1-9]\d{0,8})", part, re.ASCII)
            if numbers is None or int(numbers[1]) > int(numbers[2]):
                raise ValueError('give "k/n" with 1 <= k <= n, such as "1/2" for the first half')
        return part

    @model_validator(mode="after")
    def _check_pairs(self) -> CorpusSettings:
        name, pairs, known = self.name, self.pairs, known_corpus(self.name)
        if pairs is None:
            if known is not None and known.languages:
                raise ValueError(f"{name} is parallel text; set corpus.pairs.source and corpus.pairs.target")
            return self
        if known is not None and not known.languages:
            raise ValueError(f"{name} is not parallel text; use {', '.join(parallel_corpora())}, or a folder")
        if known is not None and {pairs.source, pairs.target} != set(known.languages):
            raise ValueError(f"{name} has {' and '.join(known.languages)}, not {pairs.source} and {pairs.target}")
        if self.tokens is not None:
            raise ValueError("tokens would cut a pair in two; use part for fewer pairs")
        return self

    @property
    def cut(self) -> dict[str, Any]:
        """The settings that distinguish texts from the same files."""
        pairs = {} if self.pairs is None else {"pairs": self.pairs.model_dump(exclude={"source", "target"})}
        return {"part": self.part, "tokens": self.tokens} | pairs

    def range_of(self, total: int, where: Path) -> tuple[int, int]:
        """Return the range of lines to train on, out of `total` lines: the first line, counted from 0, and the end."""
        part, parts = map(int, (self.part or "1/1").split("/"))
        first, last = (part - 1) * total // parts, part * total // parts
        if self.part and first == last:
            raise DataError(f"{where}: part {self.part} of {total} lines is empty; use fewer parts")
        return first, last


@dataclass(frozen=True)
class TextFiles:
    """A corpus on this machine: for each split a file and its SHA-256. The settings say how the text is cut."""

    corpus: Corpus
    """The known corpus that the files belong to, or the folder that they are in."""
    origin: str
    """Description of the text and of how it was identified, for people."""
    files: Mapping[str, Path]
    hashes: dict[str, str]
    settings: CorpusSettings

    @property
    def name(self) -> str:
        return self.corpus.name

    def lines(self, split: str) -> Iterator[Line]:
        """Yield the lines of a split. Of the training text, yield only the part that the settings select."""
        path = self.files[split]
        if split != "train" or self.settings.part is None:
            return read_file(path)
        return islice(read_file(path), *self.settings.range_of(count_lines(path), path))


@dataclass(frozen=True)
class PairFiles:
    """Parallel text on this machine: for each split two aligned files and a SHA-256 over both."""

    name: str
    origin: str
    files: Mapping[str, Aligned]
    hashes: dict[str, str]
    settings: CorpusSettings
    filters: PairsSettings

    def pairs(self, split: str) -> Iterator[Pair]:
        """Yield the pairs of a split. Of the training text, yield only the part that the settings select."""
        files = self.files[split]
        total = files.lines()
        if not total:
            raise DataError(f"{files.source} and {files.target} are empty: there is no {split} text")
        return files.pairs(*self.settings.range_of(total, files.source) if split == "train" else ())


def find_corpus(settings: CorpusSettings, *, data: Path | None, cache: Path, notify: Notify = silent) -> TextFiles:
    """Find the files of a text and check their hashes.

    Args:
        settings: The corpus, and the part of it that is used.
        data: Folder of the downloaded corpora; REEFKNOT_DATA if None.
        cache: Folder for texts that have to be prepared first.
        notify: Function that is called with lines of progress.
    """
    if settings.pairs is not None:
        raise SettingsError(f"the corpus {settings.name} is parallel text; leave corpus.pairs out to read one text")
    corpus = known_corpus(settings.name) or _open_folder(settings.name)
    files = corpus.open(data, cache, notify)
    hashes = {split: file_hash(path, cache) for split, path in files.items()}
    published = _recognise(corpus, hashes)
    if published is None:
        return TextFiles(corpus, corpus.description, files, hashes, settings)
    if published.name != corpus.name and not corpus.is_folder:
        raise DataError(f"{files['train'].parent}: these are the files of {published.name}, not of {corpus.name}")
    return TextFiles(published, f"{published.description}, recognised by SHA-256", files, hashes, settings)


def find_pairs(settings: CorpusSettings, *, data: Path | None, cache: Path, notify: Notify = silent) -> PairFiles:
    """Find the files of a parallel text and check their hashes, as `find_corpus` does for a text."""
    if settings.pairs is None:
        raise SettingsError(f"the corpus {settings.name} is one text; set corpus.pairs.source and corpus.pairs.target")
    languages = (settings.pairs.source, settings.pairs.target)
    corpus = known_corpus(settings.name) or _open_folder(settings.name, languages)
    texts = corpus.open(data, cache, notify)
    from reefknot.lab.text.pairs import Aligned

    files = {split: Aligned(*(texts[f"{split}.{language}"] for language in languages)) for split in SPLITS}
    hashes = {split: both.sha256(lambda path: file_hash(path, cache)) for split, both in files.items()}
    return PairFiles(corpus.name, corpus.description, files, hashes, settings, settings.pairs)


def _open_folder(name: str, languages: tuple[str, ...] = ()) -> Corpus:
    from reefknot.lab.text.folders import open_folder

    return open_folder(name, languages)


def _recognise(corpus: Corpus, hashes: Mapping[str, str]) -> PublishedCorpus | None:
    """Return the published corpus whose files have these hashes, if there is one.

    The modules of all known corpora are imported only if the hashes are not those of `corpus`.
    """
    if isinstance(corpus, PublishedCorpus) and corpus.matches(hashes):
        return corpus
    if isinstance(corpus, PublishedCorpus) or corpus.is_folder:
        for known in known_corpora().values():
            if isinstance(known, PublishedCorpus) and known.matches(hashes):
                return known
    return None
