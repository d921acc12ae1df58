"""`reefknot bench skip-gram`: printed tables, JSON records, and messages about mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import scipy.stats

from skip_gram_recipe import write_judgements

from .conftest import Outcome

Cli = Callable[..., Outcome]


def test_table_is_printed_and_record_is_written(cli: Cli, made_text: Callable[[int], Path], tmp_path: Path) -> None:
    pytest.importorskip("gensim")
    path = tmp_path / "record.json"
    text = made_text(600)
    outcome = cli("bench", "skip-gram", text, "--workers", "1", "--epochs", "2", "--device", "cpu", "--json", path)
    assert outcome.code == 0, outcome.err
    assert "workers: 1" in outcome.out
    assert all(title in outcome.out for title in ("competitor", "words/s", "x gensim", "reefknot, torch"))
    record = json.loads(path.read_text())
    assert record["bench"] == "skip-gram"
    assert record["settings"]["epochs"] == 2
    assert {"device", "torch", "numba", "gensim"} <= set(record["machine"])
    assert [row["competitor"] for row in record["rows"]][-1] == "gensim"
    assert all(row["over_gensim"] > 0 for row in record["rows"])


def test_several_seeds_give_intervals(cli: Cli, made_text: Callable[[int], Path], tmp_path: Path) -> None:
    pytest.importorskip("gensim")
    path, data = tmp_path / "record.json", write_judgements(tmp_path)
    # The verb uses five benchmarks; RG-65 is not one of them.
    pairs = "".join(f"w{n % 10}\tw{n % 7 + 10}\t{n}\n" for n in range(65))
    (data / "word-similarity" / "EN-RG-65.txt").write_text(pairs, encoding="utf-8")
    options = ("--seeds", "3", "--data", data, "--device", "cpu", "--json", path)
    outcome = cli("bench", "skip-gram", made_text(600), *options)
    assert outcome.code == 0, outcome.err
    titles = ("slowest", "fastest", "mean rho", "minus gensim's", "pairs whose words are known: SimLex-999")
    assert all(title in outcome.out for title in titles)
    assert "RG-65" not in outcome.out
    record = json.loads(path.read_text())
    assert record["seeds"] == 3
    assert record["pairs"]["SimLex-999"][1] == 999
    *reefknot, gensim = record["rows"]
    for row in record["rows"]:
        assert [trial["seed"] for trial in row["trials"]] == [0, 1, 2]
        assert row["slowest"] <= row["words_per_second"] <= row["fastest"]
        rhos = [trial["rhos"]["SimLex-999"] for trial in row["trials"]]
        expected = scipy.stats.ttest_1samp(rhos, 0).confidence_interval(0.95)
        assert row["mean_rho"]["runs"] == 3
        assert row["mean_rho"]["low"] == pytest.approx(expected.low)
        assert row["mean_rho"]["high"] == pytest.approx(expected.high)
    for row in reefknot:
        rhos = [[trial["rhos"]["SimLex-999"] for trial in system["trials"]] for system in (row, gensim)]
        expected = scipy.stats.ttest_ind(*rhos, equal_var=False).confidence_interval(0.95)
        assert row["less_gensim"]["low"] == pytest.approx(expected.low)
        assert row["less_gensim"]["high"] == pytest.approx(expected.high)
    assert "less_gensim" not in gensim


def test_one_seed_has_no_interval(cli: Cli, made_text: Callable[[int], Path], tmp_path: Path) -> None:
    path, data = tmp_path / "record.json", write_judgements(tmp_path)
    outcome = cli("bench", "skip-gram", made_text(600), "--data", data, "--device", "cpu", "--json", path)
    assert outcome.code == 0, outcome.err
    assert "slowest" not in outcome.out
    mean = json.loads(path.read_text())["rows"][0]["mean_rho"]
    assert (mean["low"], mean["high"], mean["runs"]) == (None, None, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workers", "1;2"), "--workers 1;2: must be numbers of threads"),
        (("--workers", "0"), "--workers 0: must be numbers of threads"),
        (("multi30k",), "multi30k is parallel text"),
        (("ptb", "dim=3"), "(dim=3)"),
        (("--graph",), "No such option: --graph"),
        (("--seconds", "3"), "No such option: --seconds"),
    ],
)
def test_mistakes_exit_with_2_and_a_message(cli: Cli, words: tuple[str, ...], message: str) -> None:
    outcome = cli("bench", "skip-gram", *words, "--device", "cpu")
    assert outcome.code == 2
    assert message.lower() in outcome.err.lower()
    assert "Traceback" not in outcome.err
