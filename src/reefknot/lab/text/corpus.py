"""Corpora: where a text lives, whether it is the one it claims to be, and which part of it is used."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from reefknot.errors import CorpusNotFound, DataError, SettingsError
from reefknot.lab.config.settings import Count, Settings
from reefknot.lab.text.corpora import python_docs
from reefknot.lab.text.corpora.bbc import BBC
from reefknot.lab.text.corpora.billion_word import BILLION_WORD
from reefknot.lab.text.corpora.enwiki import ENWIKI
from reefknot.lab.text.corpora.imdb import IMDB
from reefknot.lab.text.corpora.multi30k import MULTI30K, MULTI30K_RAW
from reefknot.lab.text.corpora.tatoeba import TATOEBA
from reefknot.lab.text.corpora.text8 import TEXT8
from reefknot.lab.text.corpora.wmt import WMT14_EN_DE, WMT14_EN_FR
from reefknot.lab.text.pairs import STEMS, Aligned, Pair, find_files, listing, unpacked
from reefknot.lab.text.prepared import SPLITS, Preparation
from reefknot.storage.cache import file_hash
from reefknot.storage.lines import Line, count_lines, is_packed, read_file
from reefknot.storage.progress import Say, silent

__all__ = [
    "BUILT_IN",
    "KNOWN",
    "PAIRED",
    "PREPARED",
    "SPLITS",
    "Corpus",
    "CorpusSettings",
    "PairCorpus",
    "PairsSettings",
    "find_corpus",
    "find_pairs",
]

BUILT_IN = "python-docs"
PREPARED: Mapping[str, Preparation] = {
    "text8": TEXT8,
    "imdb": IMDB,
    "bbc": BBC,
    "enwiki-sample": ENWIKI,
    "billion-word": BILLION_WORD,
}
"""Published corpora that come in other files than a train, a valid and a test text."""


PAIRED: Mapping[str, Preparation] = {
    "multi30k": MULTI30K,
    "multi30k-raw": MULTI30K_RAW,
    "tatoeba": TATOEBA,
    "wmt14-en-de": WMT14_EN_DE,
    "wmt14-en-fr": WMT14_EN_FR,
}
"""Published corpora of parallel text."""

Language = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")]


class PairsSettings(Settings):
    """Parallel text: which of its languages is translated into which, and which pairs are not trained on."""

    source: Annotated[Language, Field(description="language of the sources, as files are called: train.en")]
    target: Annotated[Language, Field(description="language that is translated into: train.de")]
    longest: Annotated[
        Count | None, Field(description="leave out training pairs with more tokens on a side, <eos> not counted")
    ] = 100
    ratio: Annotated[
        float | None,
        Field(
            gt=1.0,
            le=1e9,
            description="and those where one side has more than so many times the tokens of the other",
        ),
    ] = None

    @model_validator(mode="after")
    def _check_languages(self) -> PairsSettings:
        if self.source == self.target:
            raise ValueError(f"source and target are both {self.source}; name two languages")
        return self

    def leaves_out(self, source: int, target: int) -> str | None:
        """Why a training pair with so many tokens on its sides is left out, or None."""
        short, long = sorted((source, target))
        if not short:
            return "empty side"
        if self.longest is not None and long > self.longest:
            return "too long"
        return "ratio" if self.ratio is not None and long > self.ratio * short else None


class CorpusSettings(Settings):
    """Which text to read. A cut applies to the training text only; the held-out texts stay whole."""

    name: Annotated[
        str,
        Field(
            min_length=1,
            description="python-docs (made from the Python installation), ptb, wikitext-2, wikitext-103, text8, imdb,"
            " bbc, enwiki-sample, billion-word, or a folder that holds train, valid and test text; of pairs multi30k,"
            " multi30k-raw, tatoeba, wmt14-en-de, wmt14-en-fr, or a folder",
        ),
    ] = BUILT_IN
    part: Annotated[
        str | None,
        Field(description='"k/n": train on the k-th of n equal parts of the lines; "1/2" is the first half'),
    ] = None
    tokens: Annotated[
        Count | None,
        Field(description="train on the first so many words and line ends only, counted after part"),
    ] = None
    pairs: Annotated[PairsSettings | None, Field(description="for translation: the text is parallel")] = None

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
        name, pairs = self.name, self.pairs
        if pairs is None:
            if name in PAIRED:
                raise ValueError(f"{name} is parallel text; set corpus.pairs.source and corpus.pairs.target")
            return self
        if name in (BUILT_IN, *KNOWN, *PREPARED):
            raise ValueError(f"{name} is no parallel text; of pairs there are {', '.join(PAIRED)}, or a folder")
        languages = PAIRED[name].languages if name in PAIRED else ()
        if languages and {pairs.source, pairs.target} != set(languages):
            raise ValueError(f"{name} has {' and '.join(languages)}, not {pairs.source} and {pairs.target}")
        if self.tokens is not None:
            raise ValueError("tokens would cut a pair in two; use part for fewer pairs")
        return self

    @property
    def cut(self) -> dict[str, Any]:
        """What tells texts of the same files apart."""
        pairs = {} if self.pairs is None else {"pairs": self.pairs.model_dump(exclude={"source", "target"})}
        return {"part": self.part, "tokens": self.tokens} | pairs

    def range_of(self, total: int, where: Path) -> tuple[int, int]:
        """First line, from 0, and end of the part that is trained on, of so many lines."""
        part, parts = map(int, (self.part or "1/1").split("/"))
        first, last = (part - 1) * total // parts, part * total // parts
        if self.part and first == last:
            raise DataError(f"{where}: part {self.part} of {total} lines is empty; use fewer parts")
        return first, last


@dataclass(frozen=True)
class KnownFile:
    """One published file: its usual name, its tokens with an `<eos>` per line, and its SHA-256.

    Without a SHA-256 it is known by its tokens and types, which are counted when it is encoded.
    """

    name: str
    tokens: int
    sha256: str | None = None


@dataclass(frozen=True)
class KnownCorpus:
    """A published corpus; `types` counts the distinct tokens of its training text, `<eos>` included."""

    title: str
    types: int
    files: Mapping[str, KnownFile]


_WIKITEXT_HELD_OUT = {  # WikiText-2 and WikiText-103 have them in common
    "valid": KnownFile(
        "wiki.valid.tokens", 217_646, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"
    ),
    "test": KnownFile("wiki.test.tokens", 245_569, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
}

KNOWN: Mapping[str, KnownCorpus] = {
    "ptb": KnownCorpus(
        title="Penn Treebank in Mikolov's preprocessing",
        types=10_000,
        files={
            "train": KnownFile(
                "ptb.train.txt", 929_589, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"
            ),
            "valid": KnownFile(
                "ptb.valid.txt", 73_760, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"
            ),
            "test": KnownFile(
                "ptb.test.txt", 82_430, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"
            ),
        },
    ),
    "wikitext-2": KnownCorpus(
        title="WikiText-2, word level",
        types=33_278,
        files={
            "train": KnownFile(
                "wiki.train.tokens",
                2_088_628,
                "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
            ),
            **_WIKITEXT_HELD_OUT,
        },
    ),
    "wikitext-103": KnownCorpus(
        title="WikiText-103, word level",
        types=267_735,
        files={"train": KnownFile("wiki.train.tokens", 103_227_021), **_WIKITEXT_HELD_OUT},
    ),
}


@dataclass(frozen=True)
class Corpus:
    """A corpus found on this machine: a file and its SHA-256 per split, cut as the settings say."""

    name: str
    origin: str  # how we know what it is, for people
    files: Mapping[str, Path]
    hashes: dict[str, str]
    settings: CorpusSettings

    @property
    def known(self) -> KnownCorpus | None:
        """The published corpus that this is, if its files are those."""
        return KNOWN.get(self.name)

    def lines(self, split: str) -> Iterator[Line]:
        """The lines of a split; of the training text only the part asked for."""
        path = self.files[split]
        if split != "train" or self.settings.part is None:
            return read_file(path)
        return islice(read_file(path), *self.settings.range_of(count_lines(path), path))


@dataclass(frozen=True)
class PairCorpus:
    """Parallel text found on this machine: two aligned files per split, and a SHA-256 over both."""

    name: str
    origin: str
    files: Mapping[str, Aligned]
    hashes: dict[str, str]
    settings: CorpusSettings
    filters: PairsSettings

    def pairs(self, split: str) -> Iterator[Pair]:
        """The pairs of a split; of the training text only the part asked for."""
        files = self.files[split]
        total = files.lines()
        if not total:
            raise DataError(f"{files.source} and {files.target} hold no lines: there is no {split} text")
        return files.pairs(*self.settings.range_of(total, files.source) if split == "train" else ())


def find_corpus(settings: CorpusSettings, *, data: Path | None, cache: Path, say: Say = silent) -> Corpus:
    """Find a corpus and check it; a published one in `data`, else in the environment's REEFKNOT_DATA.

    One that has to be made from other files is made, and `say` hears of progress.
    """
    name = settings.name
    if settings.pairs is not None:
        raise SettingsError(f"the corpus {name} is parallel text, and one text is asked for; leave corpus.pairs out")
    if name == BUILT_IN:
        files, origin = _texts(python_docs.build(cache)), python_docs.ORIGIN
    elif name in PREPARED:
        files, origin = _texts(PREPARED[name].build(name, data, cache, say)), PREPARED[name].title
    elif name in KNOWN:
        files, origin = _find_known(name, data), KNOWN[name].title
    else:
        files = _find_folder(name)
        name, origin = f"{files['train'].parent.name}/", "a folder of text"
    hashes = {split: file_hash(path, cache) for split, path in files.items()}
    if name in KNOWN:
        _check_hashes(name, files, hashes)
    if recognised := _recognise(hashes):
        name, origin = recognised, f"{KNOWN[recognised].title}, recognised by SHA-256"
    return Corpus(name, origin, files, hashes, settings)


def find_pairs(settings: CorpusSettings, *, data: Path | None, cache: Path, say: Say = silent) -> PairCorpus:
    """Find parallel text, as `find_corpus` finds a text; packed files and TSVs are unpacked in the cache first."""
    if settings.pairs is None:
        raise SettingsError(f"the corpus {settings.name} is one text; set corpus.pairs.source and corpus.pairs.target")
    name, languages = settings.name, (settings.pairs.source, settings.pairs.target)
    if name in PAIRED:
        files, origin = _aligned(PAIRED[name].build(name, data, cache, say), languages), PAIRED[name].title
    else:
        folder, present = _open_folder(name)
        found = find_files(folder, present, languages)
        name, origin = f"{folder.name}/", "a folder of parallel text"
        paths = [path for both in found.values() for path in both]
        if all(len(both) == 2 for both in found.values()) and not any(map(is_packed, paths)):
            files = {split: Aligned(*both) for split, both in found.items()}
        else:
            files = _aligned(unpacked(languages).make("pairs", paths, cache, say), languages)
    hashes = {split: both.sha256(lambda path: file_hash(path, cache)) for split, both in files.items()}
    return PairCorpus(name, origin, files, hashes, settings, settings.pairs)


def _aligned(folder: Path, languages: tuple[str, str]) -> dict[str, Aligned]:
    return {split: Aligned(*(folder / f"{split}.{language}.txt" for language in languages)) for split in SPLITS}


def _texts(folder: Path) -> dict[str, Path]:
    return {split: folder / f"{split}.txt" for split in SPLITS}


def _find_known(name: str, data: Path | None) -> dict[str, Path]:
    wanted = {split: file.name for split, file in KNOWN[name].files.items()}
    listing = ", ".join(wanted.values())
    advice = f"put {listing} into DIR/{name}/ and name DIR with --data DIR or REEFKNOT_DATA"
    named = data or os.environ.get("REEFKNOT_DATA")
    if not named:
        raise CorpusNotFound(f"the corpus {name} has to be found but no data folder is named: {advice}")
    places = (Path(named) / name, Path(named))
    for place in places:
        files = {split: place / file for split, file in wanted.items()}
        if all(path.is_file() for path in files.values()):
            return files
    missing = [file for file in wanted.values() if not any((place / file).is_file() for place in places)]
    kind = CorpusNotFound if len(missing) == len(wanted) else DataError
    raise kind(
        f"the corpus {name} is not complete in {named}: {', '.join(missing) or 'no folder has all files'}"
        f" not found; {advice}"
    )


def _open_folder(name: str) -> tuple[Path, list[str]]:
    """A folder and the names of its files."""
    try:
        folder = Path(name).expanduser().resolve()
        return folder, sorted(path.name for path in folder.iterdir() if path.is_file())
    except (OSError, ValueError, RuntimeError):  # no such folder, no such user, not a possible path
        known = ", ".join((BUILT_IN, *KNOWN, *PREPARED, *PAIRED))
        raise DataError(f"corpus {name[:200]!r}: neither a known corpus ({known}) nor a folder") from None


def _find_folder(name: str) -> dict[str, Path]:
    folder, present = _open_folder(name)
    files: dict[str, Path] = {}
    for split, stems in STEMS.items():
        pattern = re.compile(rf"(?:[^.].*\.)?(?:{stems})(?:\.txt|\.tokens)?", re.IGNORECASE)
        found = [file for file in present if pattern.fullmatch(file)]
        if len(found) != 1:
            problem = f"{', '.join(found)} could each be" if found else "nothing there is"
            raise DataError(
                f"{folder}: {problem} the {split} text; looked for one file [NAME.]({stems})[.txt|.tokens];"
                f" the folder holds {listing(present)}"
            )
        files[split] = folder / found[0]
    return files


def _check_hashes(name: str, files: Mapping[str, Path], hashes: Mapping[str, str]) -> None:
    if (other := _recognise(hashes)) not in (None, name):
        raise DataError(f"{files['train'].parent}: these are the files of {other}, not of {name}")
    for split, expected in KNOWN[name].files.items():
        if expected.sha256 is not None and hashes[split] != expected.sha256:
            raise DataError(
                f"{files[split]}: not the published {name} file: SHA-256 {expected.sha256} expected,"
                f" {hashes[split]} found; to use the text as it is, name its folder instead of {name}"
            )


def _recognise(hashes: Mapping[str, str]) -> str | None:
    for name, corpus in KNOWN.items():
        if all(hashes[split] == file.sha256 for split, file in corpus.files.items()):
            return name
    return None
