"""`reefknot vectors similarity`: tables of runs and files, compared with benchmarks and with each other."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from reefknot.lab.cli.vectors.similarity import similarity
from reefknot.lab.evaluation.pairwise_similarity import EXACT_BELOW, SAMPLES
from reefknot.lab.tasks.word_vectors import open_vectors
from reefknot.vectors.files import write_vectors
from reefknot.vectors.word_vectors import WordVectors

from .conftest import WORDS, Outcome, Runs

Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with two benchmarks. A third of their pairs have a word that the runs do not know."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "word-similarity").mkdir()
    rng = np.random.default_rng(0)
    for name, count in (("EN-MC-30.txt", 30), ("EN-RG-65.txt", 65)):
        lines = []
        for index in range(count):
            first, second = rng.choice(WORDS[:9], 2, replace=False)
            lines.append(f"{'zebra' if index % 3 == 0 else first.title()}\t{second}\t{rng.integers(9) / 2}")
        (folder / "word-similarity" / name).write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("vectors") / "mine.vec"
    write_vectors(WordVectors(tuple(WORDS), rng.standard_normal((10, 4)).astype(np.float32)), path, "word2vec")
    return path


def test_every_table_is_compared_with_every_benchmark(cli: Cli, runs: Runs, data: Path, file: Path) -> None:
    records = cli("vectors", "similarity", runs.untied, runs.tied, file, "--data", data, "--json").json()
    tables = [(runs.untied, "input"), (runs.untied, "output"), (runs.tied, "tied"), (file, "vectors")]
    assert [(record["source"], record["table"]) for record in records] == [(str(path), name) for path, name in tables]
    for record in records:
        scores = record["judgements"]
        assert [score["name"] for score in scores] == ["RG-65", "MC-30"]
        assert [(score["pairs"], score["of"]) for score in scores] == [(43, 65), (20, 30)]
        assert all(-1 <= score["low"] <= score["rho"] <= score["high"] <= 1 for score in scores)
    vectors = open_vectors(runs.untied)["output"]
    lines = (data / "word-similarity" / "EN-RG-65.txt").read_text().splitlines()
    pairs = [line.lower().split("\t") for line in lines if "zebra" not in line]
    v = {word: row.astype(np.float64) for word, row in zip(vectors.words, vectors.vectors_VD, strict=True)}
    cosines = [v[a] @ v[b] / np.linalg.norm(v[a]) / np.linalg.norm(v[b]) for a, b, _ in pairs]
    expected = spearmanr(np.round(cosines, 12), [float(score) for *_, score in pairs]).statistic
    assert records[1]["judgements"][0]["rho"] == pytest.approx(expected, abs=1e-12)


def test_coverage_is_printed(cli: Cli, runs: Runs, data: Path) -> None:
    output = cli("vectors", "similarity", runs.tied, "--data", data).out.splitlines()
    assert output[0] == f"{runs.tied}, tied: 12 words"
    assert output[1].startswith("  RG-65  ")
    assert output[1].endswith(", 43 of 65 pairs")
    assert len(output) == 3


def test_benchmarks_are_named_in_any_case_or_by_file(cli: Cli, runs: Runs, data: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.tsv"
    mine.write_text("green\triver\t1\ngreen\thouse\t1\n", encoding="utf-8")
    sets = ("--set", "mc-30", "--set", mine, "--set", "MC-30", "--set", mine)
    records = cli("vectors", "similarity", runs.tied, *sets, "--data", data, "--json").json()
    assert [score["name"] for score in records[0]["judgements"]] == ["MC-30", "mine"]
    assert records[0]["judgements"][1] == {"name": "mine", "rho": None, "low": None, "high": None, "pairs": 2, "of": 2}
    output = cli("vectors", "similarity", runs.tied, "--set", mine).out
    assert "mine  undefined: fewer than 3 pairs (2 of 2 pairs)" in output
    mine.write_text("green\triver\t1\ngreen\thouse\t1\nbird\ttree\t1\n", encoding="utf-8")
    outcome = cli("vectors", "similarity", runs.tied, "--set", mine)
    assert "undefined: all scores or all cosines are equal (3 of 3 pairs)" in outcome.out
    assert "nan" not in outcome.out.lower()


def test_few_pairs_and_a_perfect_order_have_no_interval(cli: Cli, tmp_path: Path) -> None:
    words = ("a", *(f"w{index}" for index in range(12)))
    angles = np.linspace(0, 1, len(words))
    rows = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    write_vectors(WordVectors(words, rows), tmp_path / "v.txt", "glove")
    mine = tmp_path / "mine.tsv"
    for pairs, reason in ((3, "fewer than 10 pairs"), (12, "the two orders agree perfectly, even in every resample")):
        mine.write_text("".join(f"a\tw{index}\t{-index}\n" for index in range(pairs)), encoding="utf-8")
        output = cli("vectors", "similarity", tmp_path / "v.txt", "--set", mine).out
        assert f"mine   1.000  (no interval: {reason}), {pairs} of {pairs} pairs\n" in output
        (record,) = cli("vectors", "similarity", tmp_path / "v.txt", "--set", mine, "--json").json()
        assert (record["judgements"][0]["low"], record["judgements"][0]["high"]) == (None, None)


def test_between_compares_every_two_tables(cli: Cli, runs: Runs, file: Path) -> None:
    records = cli("vectors", "similarity", "--between", runs.untied, runs.tied, "--json").json()
    sides = [(record["a"]["table"], record["b"]["table"]) for record in records]
    assert sides == [("input", "output"), ("input", "tied"), ("output", "tied")]
    assert all(record["exact"] and record["pairs"] == 66 and record["low"] is None for record in records)
    (record,) = cli("vectors", "similarity", file, runs.tied, "--between", "--json").json()
    assert record["pairs"] == 45  # only the run has the symbols
    output = cli("vectors", "similarity", "--between", runs.untied).out
    assert output.startswith(f"{runs.untied}, input and {runs.untied}, output: ")
    assert output.endswith(", over all 66 pairs\n")


def test_between_samples_pairs_of_large_vocabularies(cli: Cli, tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    words = tuple(f"w{index}" for index in range(60))
    for name in ("one", "other"):
        write_vectors(WordVectors(words, rng.standard_normal((60, 4)).astype(np.float32)), tmp_path / name, "word2vec")
    tables = (tmp_path / "one", tmp_path / "other")
    command = ("vectors", "similarity", "--between", *tables, "--exact-below", 50, "--samples", 500)
    output = cli(*command).out
    assert " to " in output
    assert output.endswith("over 500 randomly drawn pairs\n")
    (first,), (repeated,), (other_seed,) = (cli(*command, "--seed", seed, "--json").json() for seed in (1, 1, 2))
    assert first == repeated != other_seed
    assert not first["exact"]
    assert first["low"] < first["rho"] < first["high"]


def test_defaults_equal_those_of_the_library() -> None:
    options = inspect.signature(similarity).parameters
    assert (options["exact_below"].default, options["samples"].default) == (EXACT_BELOW, SAMPLES)


def test_unfinished_run_prints_a_warning(cli: Cli, runs: Runs, data: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(runs.tied, unfinished, symlinks=True, ignore=shutil.ignore_patterns("result.json"))
    outcome = cli("vectors", "similarity", unfinished, "--data", data, "--json")
    assert json.loads(outcome.out)
    assert outcome.err == f"{unfinished}: training is not finished; these are its best weights so far\n"


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("vectors similarity", 2, "RUN|FILE"),
        ("vectors similarity {tied}", 3, "word-similarity benchmarks not found: expected DIR/"),
        ("vectors similarity {tied} --data {empty}", 3, "word-similarity benchmarks not found in "),
        ("vectors similarity {tied} --set SimLex --data {data}", 2, "did you mean SimLex-999?"),
        (
            "vectors similarity {tied} --set zzz --data {data}",
            2,
            "neither a benchmark nor a file; the benchmarks are SimLex-999, Verb-143",
        ),
        ("vectors similarity {tied} --set MEN --data {data}", 3, "MEN not found: expected EN-MEN-TR-3k.txt"),
        ("vectors similarity {tied} --set {file}", 3, "line 1: "),
        ("vectors similarity nowhere --data {data}", 3, "nowhere"),
        ("vectors similarity {empty} --data {data}", 3, "is not a run folder"),
        ("vectors similarity --between {tied}", 2, "--between needs at least two tables"),
        ("vectors similarity --between {untied} --set MEN", 2, "--set has no effect with --between"),
        ("vectors similarity {untied} --samples 500", 2, "--samples has no effect without --between; add --between or"),
        ("vectors similarity --between {untied} --samples 5", 2, "--samples"),
        ("vectors similarity --between {untied} --samples 500", 2, "--samples has no effect, because the tables share"),
        ("vectors similarity --between {untied} --seed 3", 2, "--seed has no effect, because the tables share"),
        ("vectors similarity --between {untied} --exact-below 5 --seed 3", 2, "--seed has no effect"),
        ("vectors similarity {tied} --set {file} --data {data}", 2, "--data has no effect, because every --set"),
    ],
)
def test_mistakes_print_a_message(
    cli: Cli,
    runs: Runs,
    data: Path,
    file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.delenv("REEFKNOT_DATA", raising=False)
    arguments = {"tied": runs.tied, "untied": runs.untied, "data": data, "file": file, "empty": tmp_path}
    outcome = cli(*(word.format(**arguments) for word in command.split()))
    assert (outcome.code, outcome.out) == (code, "")
    assert message in outcome.err
