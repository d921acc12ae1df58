"""Count and encode the words of a large plain text, shard by shard, in several processes.

A shard is a range of bytes of a file that begins and ends at a line end. `count_file` and `encode_file` give the same
counts and ids as reading the file from beginning to end. The results of shards are kept in a folder until all shards
are finished, so that a killed program continues where it stopped.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from reefknot.errors import DataError
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.lab.text.vocabulary_settings import UnknownPolicy
from reefknot.lab.text.workers import OnBytes, ShardJob, run_shard_jobs
from reefknot.nn.constants import END_OF_LINE, UNKNOWN
from reefknot.storage import files as durable
from reefknot.storage.lines import Line, read_stream
from reefknot.storage.progress import Notify

SHARD_BYTES = 8 << 20
MAX_TYPES = 5_000_000
"""Maximum number of distinct words that are counted. Beyond it, the rarest words are dropped."""
_MAX_CACHED_WORDS = 500_000
_BLOCK_BYTES = 1 << 20
_PROGRESS_LINES = 20_000  # between two reports of progress


@dataclass(frozen=True)
class Shard:
    """A range of bytes of a file, which begins at a line."""

    path: Path
    start: int
    end: int
    first_line: int
    """Number of the first line in the file, counted from 1."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The shard as JSON values."""
        return {"path": str(self.path), "start": self.start, "end": self.end, "first_line": self.first_line}

    def read_lines(self) -> Iterator[Line]:
        """Yield the lines of the shard, with their numbers in the file."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            lines = _limit(file, self.end - self.start)
            yield from read_stream(lines, str(self.path), self.first_line, self.start)


def _limit(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """Yield the lines in the next `num_bytes` bytes."""
    remaining = num_bytes
    while remaining > 0:
        line = file.readline()
        remaining -= len(line)
        yield line


def cut_file(path: Path, shard_bytes: int = SHARD_BYTES) -> list[Shard]:
    """Cut a file into shards of about this size. A line that is longer is not cut."""
    shards: list[Shard] = []
    start = position = 0
    first_line = next_line = 1
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            # Cut after the first line end behind the size of a shard.
            offset = 0
            while position + len(block) - start >= shard_bytes:
                line_end = block.find(b"\n", max(start + shard_bytes - 1 - position, offset))
                if line_end < 0:
                    break
                next_line += block.count(b"\n", offset, line_end + 1)
                offset = line_end + 1
                shards.append(Shard(path, start, position + offset, first_line))
                start, first_line = position + offset, next_line
            next_line += block.count(b"\n", offset)
            position += len(block)
    if start < position:
        shards.append(Shard(path, start, position, first_line))
    return shards


# -- count words ---------------------------------------------------------------------------------------------------


def count_file(path: Path, *, end_of_line: bool, work_folder: Path, notify: Notify) -> Counter[str]:
    """Return the counts of the words of a file, and of `<eos>`, in the order of their first occurrence.

    If there are more than `MAX_TYPES` distinct words, the rarest are dropped and counted as `<unk>`.
    """
    jobs = []
    for index, shard in enumerate(cut_file(path)):
        result_path = work_folder / f"{path.stem}-{index:06}.counts.json"
        arguments = {**shard.arguments, "end_of_line": end_of_line}
        jobs.append(ShardJob("reefknot.lab.text.shards:count_words", arguments, result_path, shard.end - shard.start))
    counts: Counter[str] = Counter()
    for shard_counts in run_shard_jobs(jobs, f"{path.stem}: words counted", notify):
        counts.update(shard_counts)
        if len(counts) > MAX_TYPES:
            counts = _drop_rarest(counts, notify)
    return counts


def _drop_rarest(counts: Counter[str], notify: Notify) -> Counter[str]:
    """Drop the rarest words, until at most half of the maximum is left."""
    threshold = 1
    kept = counts
    while len(kept) > MAX_TYPES // 2:
        kept = Counter({word: count for word, count in kept.items() if count > threshold})
        threshold += 1
    notify(f"more than {MAX_TYPES:,} distinct words; words seen fewer than {threshold} times so far are dropped")
    kept[UNKNOWN] += counts.total() - kept.total()
    return kept


def count_words(
    on_bytes: OnBytes, *, path: str, start: int, end: int, first_line: int, end_of_line: bool
) -> dict[str, int]:
    """Return the counts of the words of a shard. This is a job."""
    counts: Counter[str] = Counter()
    num_lines = 0
    for line in _report_bytes(Shard(Path(path), start, end, first_line), on_bytes):
        counts.update(line.words)
        if end_of_line and not num_lines:
            counts[END_OF_LINE] += 0  # words are in the order of their first occurrence
        num_lines += 1
    if end_of_line:
        counts[END_OF_LINE] += num_lines
    return counts


def _report_bytes(shard: Shard, on_bytes: OnBytes) -> Iterator[Line]:
    """Yield the lines of a shard, and report the number of bytes now and then."""
    num_bytes = 0
    for index, line in enumerate(shard.read_lines()):
        yield line
        num_bytes += line.size
        if index % _PROGRESS_LINES == _PROGRESS_LINES - 1:
            on_bytes(num_bytes)
            num_bytes = 0
    on_bytes(num_bytes)


# -- encode words --------------------------------------------------------------------------------------------------


def encode_file(
    path: Path,
    ids_path: Path,
    vocabulary_path: Path,
    *,
    end_of_line: bool,
    unknown: UnknownPolicy,
    work_folder: Path,
    notify: Notify,
) -> dict[str, int]:
    """Write the ids of a file to `ids_path`, and return how many tokens, words, lines, bytes and unknowns it has."""
    jobs = []
    for index, shard in enumerate(cut_file(path)):
        result_path = work_folder / f"{path.stem}-{index:06}.encoded.json"
        arguments = {
            **shard.arguments,
            "ids_path": str(_shard_ids_path(result_path)),
            "vocabulary_path": str(vocabulary_path),
            "end_of_line": end_of_line,
            "unknown": unknown,
        }
        jobs.append(ShardJob("reefknot.lab.text.shards:encode_words", arguments, result_path, shard.end - shard.start))

    totals: Counter[str] = Counter()
    results = run_shard_jobs(jobs, f"{path.stem}: encoded", notify)
    with ids_path.open("wb") as ids_file:
        for job, shard_totals in zip(jobs, results, strict=True):
            totals.update(shard_totals)
            with _shard_ids_path(job.result_path).open("rb") as shard_file:
                shutil.copyfileobj(shard_file, ids_file, _BLOCK_BYTES)
    return dict(totals)


def _shard_ids_path(result_path: Path) -> Path:
    return result_path.with_suffix(".ids")


def encode_words(
    on_bytes: OnBytes,
    *,
    path: str,
    start: int,
    end: int,
    first_line: int,
    ids_path: str,
    vocabulary_path: str,
    end_of_line: bool,
    unknown: UnknownPolicy,
) -> dict[str, int]:
    """Write the ids of a shard as little-endian 32-bit numbers, and return its sizes. This is a job."""
    word_ids = _open_word_ids(vocabulary_path, unknown)
    eos = word_ids[END_OF_LINE] if end_of_line else ()
    ids: list[int] = []
    num_words = num_lines = num_bytes = 0
    for line in _report_bytes(Shard(Path(path), start, end, first_line), on_bytes):
        try:
            ids.extend(chain.from_iterable(map(word_ids.__getitem__, line.words)))
        except DataError as error:
            raise DataError(f"{path}, line {line.number}: {error}") from None
        ids.extend(eos)
        num_words += len(line.words)
        num_lines += 1
        num_bytes += line.size
    array = np.array(ids, dtype="<i4")
    durable.write_bytes(Path(ids_path), array.tobytes())
    num_unknown = word_ids.vocabulary.count_unknown(array)
    return {"tokens": len(ids), "words": num_words, "lines": num_lines, "bytes": num_bytes, "unknown": num_unknown}


@lru_cache(maxsize=1)
def _open_word_ids(vocabulary_path: str, unknown: UnknownPolicy) -> _WordIds:
    """Open a vocabulary. A worker encodes many shards with the same one."""
    return _WordIds(Vocabulary.load(Path(vocabulary_path)), unknown)


class _WordIds(dict[str, tuple[int, ...]]):
    """The ids of words. They are computed when a word occurs for the first time."""

    def __init__(self, vocabulary: Vocabulary, unknown: UnknownPolicy) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self._unknown: UnknownPolicy = unknown

    def __missing__(self, word: str) -> tuple[int, ...]:
        if len(self) >= _MAX_CACHED_WORDS:
            self.clear()
        ids = self[word] = tuple(self.vocabulary.encode([word], self._unknown))
        return ids
