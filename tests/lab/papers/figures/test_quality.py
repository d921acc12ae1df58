"""Tables 2 and 3 of Press & Wolf: correlations next to the paper's, and claims with intervals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import DataError, ReefknotError
from reefknot.lab.evaluation.benchmarks import PRESS
from reefknot.lab.papers.figures.quality import LanguageModelQuality, SkipGramQuality

from .conftest import Write


def judgements(*rhos: float | None) -> list[dict[str, Any]]:
    return [
        {"name": name, "rho": rho, "low": rho, "high": rho, "pairs": 90 + n, "of": 999}
        for n, (name, rho) in enumerate(zip(PRESS, rhos, strict=True))
    ]


def language_models(write: Write, corpus: str, seeds: int) -> list[Any]:
    """Write untied and tied runs with correlations that shift with the seed."""
    runs = []
    for seed in range(seeds):
        shift = 0.01 * seed
        ends = {"input": judgements(*[0.1 + shift] * 5), "output": judgements(*[0.3 + 2 * shift] * 5)}
        runs.append(write("press2017/table3", f"Small, {corpus}", seed, corpus=corpus, similarity=ends))
        tied = {"tied": judgements(*[0.32 - shift] * 5)}
        runs.append(write("press2017/table3", f"Small + WT, {corpus}", seed, corpus=corpus, similarity=tied))
    return runs


def test_correlations_over_seeds_are_shown_next_to_the_papers(write: Write) -> None:
    (text,) = LanguageModelQuality().measure(language_models(write, "ptb", 3))["texts"]
    first = text["benchmarks"][0]
    assert (first["name"], first["of"]) == ("SimLex-999", 999)
    assert first["pairs"] == {"input": 90, "output": 90, "tied": 90}
    assert first["ours"]["output"]["mean"] == pytest.approx(0.32)
    assert first["paper"] == {"input": 0.02, "output": 0.13, "tied": 0.14}
    (output, tied) = text["findings"]
    # The differences within the runs are 0.20, 0.21 and 0.22.
    assert output["difference"]["mean"] == pytest.approx(0.21)
    assert output["difference"]["low"] == pytest.approx(0.21 - 4.3027 * 0.01 / 3**0.5, abs=1e-5)
    assert tied["difference"]["mean"] == pytest.approx(0.2)
    lines = LanguageModelQuality().format_lines({"texts": [text]})
    assert lines[0] == "ptb; ours, 95 % interval over seeds / paper"
    assert lines[2].startswith("SimLex-999 (90 of 999)")
    assert " / 0.13" in lines[2]
    assert lines[-1].startswith("The tied table ranks pairs better than the input table: confirmed, 0.200 [")


def test_substitute_corpus_is_named(write: Write) -> None:
    measured = LanguageModelQuality().measure(language_models(write, "enwiki-sample", 1))
    (text,) = measured["texts"]
    assert text["beside"] == "text8"
    assert text["benchmarks"][0]["paper"]["tied"] == 0.28
    lines = LanguageModelQuality().format_lines(measured)
    assert lines[0].startswith("enwiki-sample, in place of text8; ")
    assert lines[-1].endswith("a single run has no interval.")
    svg = LanguageModelQuality().draw(measured).svg
    assert all(text in svg for text in ("enwiki-sample, in place of text8", "the paper's", "MTurk-771"))


def test_skip_gram_has_its_own_claims(write: Write) -> None:
    runs = []
    for seed in (0, 1):
        ends = {"input": judgements(*[0.4 + seed / 50] * 5), "output": judgements(*[0.38] * 5)}
        runs.append(write("press2017/table2", "untied", seed, corpus="text8", similarity=ends))
        runs.append(
            write("press2017/table2", "tied", seed, corpus="text8", similarity={"tied": judgements(*[0.2] * 5)})
        )
    (text,) = SkipGramQuality().measure(runs)["texts"]
    assert [finding["difference"]["mean"] for finding in text["findings"]] == pytest.approx([0.21, 0.18])
    assert text["benchmarks"][2]["paper"] == {"input": 0.66, "output": 0.61, "tied": 0.5}


def test_benchmark_without_known_pairs_is_left_out_for_all_tables(write: Write) -> None:
    ends = {"input": judgements(None, 0.1, 0.1, 0.1, 0.1), "output": judgements(0.9, 0.2, 0.2, 0.2, 0.2)}
    run = write("press2017/table3", "Small, PTB", similarity=ends)
    (text,) = LanguageModelQuality().measure([run])["texts"]
    assert [row["name"] for row in text["benchmarks"]] == list(PRESS[1:])
    assert text["findings"][0]["difference"]["mean"] == pytest.approx(0.1)
    assert [finding["claim"] for finding in text["findings"]] == [
        "The output table ranks pairs better than the input table"
    ]
    none = write("press2017/table3", "Small, text8", similarity={"input": judgements(*[None] * 5)})
    with pytest.raises(DataError, match="none of the five benchmarks"):
        LanguageModelQuality().measure([none])


def test_record_without_judgements_needs_the_benchmarks(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ReefknotError, match="word-similarity benchmarks not found"):
        LanguageModelQuality().measure([write("press2017/table3", "Small, PTB")], data=tmp_path)


def test_runs_with_other_settings_are_not_averaged(write: Write) -> None:
    runs = [
        write("press2017/table3", "Small, PTB", seed, settings={"encoder": {"hidden_dim": dim}}, similarity={"x": []})
        for seed, dim in ((0, 200), (1, 100))
    ]
    with pytest.raises(DataError, match=r"are runs of one row but differ in encoder\.hidden_dim"):
        LanguageModelQuality().measure(runs)


def test_two_rows_on_one_corpus_are_not_averaged(write: Write) -> None:
    ends = {"input": judgements(*[0.1] * 5), "output": judgements(*[0.3] * 5)}
    small = write("press2017/table6", "Small", 0, similarity=ends)
    large = write("press2017/table5", "Large", 1, similarity=ends)
    with pytest.raises(DataError, match=rf"{small.folder} and {large.folder} are runs of different rows"):
        LanguageModelQuality().measure([small, large])
    again = write("press2017/table6", "Small", 1, similarity=ends)
    assert LanguageModelQuality().measure([small, again])["texts"][0]["mean"]["input"]["runs"] == 2
    with pytest.raises(DataError, match="have the same row and seed; pass only one of them"):
        LanguageModelQuality().measure([small, replace(again, seed=0)])


def test_coverage_is_shown_per_table(write: Write) -> None:
    tied = [judgement | {"pairs": 40} for judgement in judgements(*[0.2] * 5)]
    ends = {"input": judgements(*[0.1] * 5), "output": judgements(*[0.3] * 5)}
    runs = [
        write("press2017/table3", row, similarity=similarity)
        for row, similarity in (("a", ends), ("b", {"tied": tied}))
    ]
    lines = LanguageModelQuality().format_lines(LanguageModelQuality().measure(runs))
    assert lines[2].startswith("SimLex-999 (input 90, output 90, tied 40 of 999)")


def test_intervals_of_rho_stay_within_one(write: Write) -> None:
    runs = [
        write("press2017/table3", "Small, PTB", seed, similarity={"input": judgements(*[rho] * 5)})
        for seed, rho in enumerate((0.7, 0.9))
    ]
    (text,) = LanguageModelQuality().measure(runs)["texts"]
    for interval in (text["mean"]["input"], text["benchmarks"][0]["ours"]["input"]):
        assert -1 < interval["low"] < interval["high"] < 1
