"""Large texts: shards in several processes give the same dataset as one process, also after a kill."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from reefknot.errors import DataError, ResourceError
from reefknot.lab.text import encoding, shards, splitting, workers
from reefknot.lab.text.corpus import CorpusSettings
from reefknot.lab.text.dataset import Dataset, open_dataset
from reefknot.lab.text.shards import cut_file
from reefknot.lab.text.vocabulary_settings import VocabularySettings
from reefknot.lab.text.workers import ShardJob, run_shard_jobs


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch):
    """Cut texts of a few kilobytes into many shards, and start workers for them."""
    monkeypatch.setattr(workers, "SEQUENTIAL_BYTES", 1000)
    monkeypatch.setattr(encoding, "SEQUENTIAL_BYTES", 1000)
    monkeypatch.setattr(splitting, "_GROUP_BYTES", 3000)
    monkeypatch.setattr(shards.cut_file, "__defaults__", (2000,))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    rng = random.Random(1)
    words = [f"{rng.choice('abcdefgh')}{number}é" for number in range(200)]
    for index in range(6):
        lines = [" ".join(rng.choices(words, k=rng.randrange(1, 12))) for _ in range(60)]
        (folder / f"{index}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def prepare(texts: Path, cache: Path, num_workers: int, messages: list[str] | None = None, **vocabulary) -> Dataset:
    corpus = CorpusSettings.model_validate({"name": str(texts), "text": {"split": "lines", "block": 3}})
    settings = VocabularySettings.model_validate(vocabulary)
    workers.set_num_workers(num_workers)
    try:
        return open_dataset(corpus, settings, cache=cache, notify=(messages if messages is not None else []).append)
    finally:
        workers.set_num_workers(None)


def contents(dataset: Dataset) -> list[object]:
    values: list[object] = [dataset.fingerprint, dataset.vocabulary.words, dataset.vocabulary.counts]
    for split in dataset.splits.values():
        values += [split.ids.tolist(), split.words, split.lines, split.bytes, split.unknown]
    return values


@pytest.mark.parametrize("vocabulary", [{"bpe": {"merges": 50}}, {"min_count": 3, "end_of_line": False}])
def test_workers_shards_and_one_pass_give_the_same_dataset(texts, tmp_path, monkeypatch, vocabulary):
    parallel = prepare(texts, tmp_path / "parallel", 2, **vocabulary)
    sequential = prepare(texts, tmp_path / "sequential", 1, **vocabulary)
    monkeypatch.setattr(encoding, "SEQUENTIAL_BYTES", 1 << 30)
    unsharded = prepare(texts, tmp_path / "unsharded", 1, **vocabulary)
    assert contents(parallel) == contents(sequential) == contents(unsharded)
    assert not list((tmp_path / "parallel" / "work").glob("*/*"))


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 10**6])
def test_shards_cover_the_file_at_line_ends(tmp_path, size):
    lines = [b"x" * (index % 9) + b"\n" for index in range(50)] + [b"no end"]
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join(lines))
    pieces = cut_file(path, size)
    assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
    assert pieces[-1].end == path.stat().st_size
    read = [(line.number, line.size) for piece in pieces for line in piece.read_lines()]
    assert read == [(number, len(line)) for number, line in enumerate(lines, start=1)]


def test_a_stopped_preparation_keeps_its_finished_shards(texts, tmp_path, monkeypatch):
    whole = contents(prepare(texts, tmp_path / "whole", 1, bpe={"merges": 50}))
    run_job = workers._run_job
    finished: list[Path] = []

    def stop_after(limit: int):
        def run(function, arguments, result_path, on_bytes):
            if len(finished) == limit:
                raise KeyboardInterrupt
            run_job(function, arguments, result_path, on_bytes)
            finished.append(result_path)

        return run

    for limit in (3, 7, 14):
        monkeypatch.setattr(workers, "_run_job", stop_after(limit))
        with pytest.raises(KeyboardInterrupt):
            prepare(texts, tmp_path / "cache", 1, bpe={"merges": 50})
    monkeypatch.setattr(workers, "_run_job", stop_after(1000))
    assert contents(prepare(texts, tmp_path / "cache", 1, bpe={"merges": 50})) == whole
    assert len(finished) == len(set(finished))  # nothing was computed twice
    assert not list((tmp_path / "cache" / "work").glob("*/*"))


def test_errors_of_workers_name_the_file_and_the_line(texts, tmp_path):
    (texts / "3.txt").write_bytes(b"fine\n" * 20 + b"bad \xff\n")
    with pytest.raises(DataError, match=r"3\.txt, line 21: byte 0xff is not valid UTF-8"):
        prepare(texts, tmp_path / "cache", 2)
    (texts / "3.txt").write_bytes(b"mended\n")
    assert prepare(texts, tmp_path / "cache", 2).splits["train"].words


def test_unknown_words_are_rejected_with_their_line(texts, tmp_path):
    folder = tmp_path / "named"
    folder.mkdir()
    for split, lines in (
        ("train", ["old"] * 400),
        ("valid", ["old"]),
        ("test", ["old"] * 300 + ["new"] + ["old"] * 300),
    ):
        (folder / f"{split}.txt").write_text("\n".join(lines), encoding="utf-8")
    corpus = CorpusSettings.model_validate({"name": str(folder), "text": {"split": "names"}})
    with pytest.raises(DataError, match=r"test\.txt, line 301: 'new' is not in the vocabulary"):
        open_dataset(corpus, VocabularySettings(unknown="refuse"), cache=tmp_path / "cache")


def test_a_killed_worker_is_reported(tmp_path):
    jobs = [ShardJob("os:_exit", {}, tmp_path / f"{index}.json", 10_000) for index in range(2)]
    workers.set_num_workers(2)
    try:
        with pytest.raises(ResourceError, match=r"ended with code .* run the same command again"):
            list(run_shard_jobs(jobs, "killed", lambda _message: None))
    finally:
        workers.set_num_workers(None)


def test_rare_words_are_dropped_beyond_the_maximum(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_TYPES", 20)
    path = tmp_path / "train.txt"
    path.write_text("".join(f"often\nrare{index} twice{index % 5}\n" for index in range(300)), encoding="utf-8")
    messages: list[str] = []
    counts = shards.count_file(path, end_of_line=True, work_folder=tmp_path, notify=messages.append)
    assert counts["often"] == 300
    assert counts["<eos>"] == 600
    assert counts.total() == 1500
    assert len(counts) <= 20
    assert any("are dropped" in message for message in messages)


def test_progress_has_a_rate_and_the_time_left(monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(workers, "_PROGRESS_SECONDS", 0.0)
    progress = workers._Progress("train: encoded", 4_000_000, messages.append)
    progress.add(1_000_000)
    assert messages[0].startswith("train: encoded: 1.0 of 4.0 MB, ")
    assert messages[0].endswith("s left")
    assert " MB/s, " in messages[0]


def test_workers_end_with_their_parent():
    process = subprocess.run(
        [sys.executable, "-m", "reefknot.lab.text.workers"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, b"", b"")


def test_equal_documents_are_in_the_same_split(tmp_path):
    rows = [f'{{"text": "document {index % 300} line one\\nline two of {index % 300}"}}\n' for index in range(900)]
    (tmp_path / "a.jsonl").write_text("".join(rows), encoding="utf-8")
    settings = {"name": str(tmp_path / "a.jsonl"), "text": {"split": "documents", "valid": 0.2, "test": 0.2}}
    dataset = open_dataset(CorpusSettings.model_validate(settings), VocabularySettings(), cache=tmp_path / "cache")
    texts = [dataset.vocabulary.decode_text(split.ids.tolist()).splitlines() for split in dataset.splits.values()]
    lines = [set(text) for text in texts]
    assert not lines[0] & lines[1]
    assert not lines[0] & lines[2]
    assert sum(map(len, texts)) == 1800
    assert 0.1 < len(texts[1]) / 1800 < 0.3
