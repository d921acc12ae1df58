"""Use any text of the user as a corpus: read its files, split them into train, valid and test text, and store these.

`TextSettings` is the section `corpus.text` of a recipe. `TextCorpus.open` writes three plain texts to the cache, once:

    corpora/text-HASH/train.txt, valid.txt, test.txt, MANIFEST.json

HASH depends on the settings and on the path, size and times of the files. Groups of files are read by several processes
(`workers.py`), and a killed program continues with the groups that are not finished.

The split depends only on the text, so that the same text always has the same split:

* By documents, a document is held out if the hash of its text, or of its file name, is small. Equal documents are in
  the same split, so no document of the test text is also in the training text.
* By lines, every file is cut into blocks of consecutive lines, and the blocks that are held out are spread evenly.
* By names, files such as train-0001.jsonl, dev.txt or a folder test/ name their split.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from reefknot.errors import DataError
from reefknot.lab.config.settings import Count, Settings
from reefknot.lab.text.prepared import identify_file, store_texts
from reefknot.lab.text.published import SPLITS, Corpus
from reefknot.lab.text.sources import DEFAULT_FIELD, Document, TextFile, TextSource, cut_line, open_text
from reefknot.lab.text.workers import OnBytes, ShardJob, run_shard_jobs, work_folder
from reefknot.storage.progress import Notify

_VERSION = 2  # increase it whenever the same files give different texts
_GROUP_BYTES = 8 << 20  # files are read in groups of at least this size on disk
_GOLDEN_RATIO = 0.6180339887498949
_FILE_STEP = 0.4142135623730951  # shifts the blocks that are held out from file to file
_SPLIT_NAMES = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "dev": "valid",
    "val": "valid",
    "test": "test",
}
_NAMED_SPLIT = re.compile(rf"(?:.*[._-])?({'|'.join(_SPLIT_NAMES)})(?:[._-]\d[\w-]*)?(?:\.\w+)*", re.IGNORECASE)

SplitRule = Literal["documents", "lines", "names"]
Share = Annotated[float, Field(gt=0.0, lt=0.5)]


class TextSettings(Settings):
    """How the files at `corpus.name` are read and split."""

    split: Annotated[
        SplitRule,
        Field(
            description="Hold out whole documents (documents: rows of JSON lines or Parquet, or files), blocks of "
            "consecutive lines (lines), or the files with names such as valid.txt and test.txt (names)."
        ),
    ] = "lines"
    valid: Annotated[Share, Field(description="Share of the text that is validation text.")] = 0.05
    test: Annotated[Share, Field(description="Share of the text that is test text.")] = 0.05
    block: Annotated[Count, Field(description="Lines per block, if the text is split by lines.")] = 20
    field: Annotated[
        str, Field(min_length=1, description="Field of JSON lines, or column of Parquet, that holds the text.")
    ] = DEFAULT_FIELD
    encoding: Annotated[
        str | None, Field(description="Encoding of the files. By default, UTF-8, UTF-16 and UTF-32 are recognised.")
    ] = None
    longest_line: Annotated[
        int, Field(ge=100, le=1_000_000, description="Characters per line. Longer lines are cut at a space.")
    ] = 20_000

    @model_validator(mode="after")
    def _check_shares(self) -> TextSettings:
        if self.valid + self.test > 0.6:
            raise ValueError(f"valid + test = {self.valid + self.test:g} leaves too little training text; use less")
        return self

    def describe_split(self) -> str:
        """Return how the text is split, for a description of the text."""
        if self.split == "names":
            return "split by the names of its files"
        unit = "documents" if self.split == "documents" else f"blocks of {self.block:,} lines"
        return f"split by {unit}: {self.valid:.1%} validation text, {self.test:.1%} test text"


def name_split(file: TextFile) -> str | None:
    """Return the split that the name of a file or of its folders names: "train" for "train-0001.jsonl", or None."""
    match = _NAMED_SPLIT.fullmatch(Path(file.name).name)
    if match:
        return _SPLIT_NAMES[match[1].lower()]
    for part in Path(file.name).parts[:-1]:
        if part.lower() in _SPLIT_NAMES:
            return _SPLIT_NAMES[part.lower()]
    return None


def has_named_splits(source: TextSource) -> bool:
    """Return whether all files name their split, and there is training text and held-out text."""
    splits = {name_split(file) for file in source.files}
    return None not in splits and "train" in splits and len(splits) > 1


@dataclass(frozen=True, kw_only=True)
class TextCorpus(Corpus):
    """A file, a folder or a pattern of files of the user, which is split here."""

    source: TextSource
    settings: TextSettings

    def open(self, data: Path | None, cache: Path, notify: Notify) -> dict[str, Path]:
        identities = [identify_file(file.path) for file in self.source.files]
        identity = json.dumps([_VERSION, self.settings.model_dump(), identities])
        digest = hashlib.sha256(identity.encode()).hexdigest()
        entry_name = f"text-{digest[:32]}"
        with work_folder(cache, cache / "corpora" / entry_name, notify) as shard_folder:
            return store_texts(cache, entry_name, lambda folder: self._write(folder, shard_folder, notify), notify)

    def _write(self, folder: Path, shard_folder: Path, notify: Notify) -> None:
        """Read all files and write the texts of the splits."""
        jobs = self._plan_jobs(shard_folder)
        num_lines = dict.fromkeys(SPLITS, 0)
        with contextlib.ExitStack() as stack:
            outputs = {split: stack.enter_context((folder / f"{split}.txt").open("wb")) for split in SPLITS}
            for job, result in zip(jobs, run_shard_jobs(jobs, f"{self.name}: read", notify), strict=True):
                for split in SPLITS:
                    num_lines[split] += result[split]
                    with Path(job.arguments["out"], f"{split}.txt").open("rb") as file:
                        shutil.copyfileobj(file, outputs[split], 1 << 20)
        self._check_lines(num_lines)

    def _plan_jobs(self, shard_folder: Path) -> list[ShardJob]:
        """Return one job for each group of consecutive files."""
        named_splits = [name_split(file) if self.settings.split == "names" else None for file in self.source.files]
        groups: list[list[dict[str, Any]]] = [[]]
        sizes = [0]
        for index, (file, split) in enumerate(zip(self.source.files, named_splits, strict=True)):
            if sizes[-1] >= _GROUP_BYTES:
                groups.append([])
                sizes.append(0)
            groups[-1].append({**asdict(file), "path": str(file.path), "index": index, "split": split})
            sizes[-1] += file.size

        # By names, only missing splits are taken from the training files.
        shares = self.settings.model_dump(include={"valid", "test"})
        shares = {split: 0.0 if split in named_splits else share for split, share in shares.items()}
        settings = {**self.settings.model_dump(), **shares}
        jobs = []
        for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
            out = shard_folder / f"{number:06}"
            arguments = {"files": group, "settings": settings, "out": str(out)}
            jobs.append(ShardJob("reefknot.lab.text.splitting:split_files", arguments, out.with_suffix(".json"), size))
        return jobs

    def _check_lines(self, num_lines: dict[str, int]) -> None:
        """Raise an error if a split has no lines."""
        if not any(num_lines.values()):
            raise DataError(f"{self.name}: the text has no words")
        for split, count in num_lines.items():
            if not count:
                total = sum(num_lines.values())
                raise DataError(
                    f"{self.name}: the text is too short to split: of its {total:,} lines, none is {split} text; use "
                    "more text, or other values of corpus.text.split, corpus.text.block or corpus.text.longest_line"
                )


def open_text_corpus(name: str, settings: TextSettings) -> TextCorpus:
    """Return the text at a path as a corpus."""
    source = open_text(name, encoding=settings.encoding, field=settings.field)
    files = f"{len(source.files):,} files" if len(source.files) > 1 else "one file"
    description = f"{files}, {settings.describe_split()}"
    return TextCorpus(name=source.name, description=description, source=source, settings=settings)


# -- the job -------------------------------------------------------------------------------------------------------


def split_files(
    on_bytes: OnBytes, *, files: list[dict[str, Any]], settings: dict[str, Any], out: str
) -> dict[str, int]:
    """Read a group of files and write the lines of each split to a file in the folder `out`. This is a job.

    Returns the number of lines in each split.
    """
    rule: SplitRule = settings["split"]
    shares = (settings["valid"], settings["test"])
    num_lines = dict.fromkeys(SPLITS, 0)
    folder = Path(out)
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        outputs = {split: stack.enter_context((folder / f"{split}.txt").open("wb", 1 << 18)) for split in SPLITS}
        for entry in files:
            index, named_split = entry.pop("index"), entry.pop("split")
            file = replace(TextFile(**entry), path=Path(entry["path"]))
            held_out_split = named_split if named_split != "train" else None
            documents = _cut_long_lines(file.read_documents(on_bytes), settings["longest_line"])
            for chosen_split, line in _assign_lines(documents, rule, shares, settings["block"], index):
                split = held_out_split or chosen_split
                outputs[split].write(f"{line}\n".encode())
                num_lines[split] += 1
    return num_lines


def _assign_lines(
    documents: Iterator[Document], rule: SplitRule, shares: tuple[float, float], block: int, file_index: int
) -> Iterator[tuple[str, str]]:
    """Yield the split and the text of every line of a file."""
    line_index = 0
    for document in documents:
        if rule == "documents":
            digest = hashlib.sha256(document.key.encode("utf-8", "replace")).digest()
            split = _choose_split(int.from_bytes(digest[:6]) / 2**48, shares)
            for line in document.lines:
                yield split, line
            continue
        for line in document.lines:
            position = (line_index // block) * _GOLDEN_RATIO + file_index * _FILE_STEP + 0.5
            yield _choose_split(position % 1.0, shares), line
            line_index += 1


def _choose_split(position: float, shares: tuple[float, float]) -> str:
    """Return the split of a position between 0 and 1: first valid, then test, then train."""
    valid, test = shares
    if position < valid:
        return "valid"
    return "test" if position < valid + test else "train"


def _cut_long_lines(documents: Iterator[Document], max_length: int) -> Iterator[Document]:
    """Yield the documents with their long lines cut."""
    for document in documents:
        parts = (part for line in document.lines for part in _cut_long_line(line, max_length))
        yield document._replace(lines=parts)


def _cut_long_line(line: str, max_length: int) -> Iterator[str]:
    while len(line) > max_length:
        part, line = cut_line(line, max_length)
        yield part
    if line.strip():
        yield line
