"""`reefknot predict`: phrases, words outside the vocabulary, means over a text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


def test_next_words_are_sorted_by_probability(cli: Cli, runs: Runs) -> None:
    record = cli("predict", runs.tied, "green river", "", "--top", 3, "--json").json()
    assert [phrase["phrase"] for phrase in record["phrases"]] == ["green river", ""]
    for phrase in record["phrases"]:
        values = [value for _, value in phrase["words"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        assert list(phrase["watched"]) == ["<unk>"]  # no articles in this text
    assert cli("predict", runs.tied, "").out.startswith("(start of line)\n")
    text = cli("predict", runs.tied, "green river", "--top", 3).out.splitlines()
    word, value = record["phrases"][0]["words"][0]
    assert text[:2] == ["green river", f"  {value:.4f}  {word}"]
    assert text[-1].startswith("  for comparison, words that are common after any phrase: <unk> 0.")


def test_predicted_probabilities_agree_with_score(cli: Cli, runs: Runs) -> None:
    record = cli("predict", runs.tied, "green river", "--top", 12, "--json").json()
    word, value = next(pair for pair in record["phrases"][0]["words"] if pair[0] == "house")
    (scored,) = cli("score", runs.tied, f"green river {word}", "--json").json()
    assert 2.718281828 ** scored["words"][2]["log_prob"] == pytest.approx(value, rel=1e-4)


def test_unknown_words_print_a_warning(cli: Cli, runs: Runs) -> None:
    outcome = cli("predict", runs.tied, "green zebra", "zebra", "--json")
    assert outcome.code == 0
    assert outcome.err == "not in the vocabulary, read as <unk>: zebra\n"
    unknown = cli("predict", runs.tied, "green <unk>", "--json").json()["phrases"][0]
    assert outcome.json()["phrases"][0]["words"] == unknown["words"]


def test_split_prints_means_over_a_text(cli: Cli, runs: Runs) -> None:
    record = cli("predict", runs.tied, "--split", "test", "--neighbors", 11, "--json").json()
    assert record["phrases"] == []
    text = record["text"]
    # Sixty lines of six words, their ends, thirty empty lines; the first token is context only.
    assert (text["split"], text["contexts"], text["k"]) == ("test", 60 * 7 + 30 - 1, 11)
    assert text["target"] + text["neighbors"] == pytest.approx(1.0, abs=1e-5)
    text = cli("predict", runs.tied, "green", "--split", "valid", "--neighbors", 2).out
    assert "valid text: mean probabilities over 149 contexts (one for each token except the first)" in text
    assert "its 2 nearest neighbours at the input end" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to predict; pass phrases, or a text with --split"),
        (
            ["green", "--neighbors", "3"],
            "--neighbors has no effect without --split; add --split or leave --neighbors out",
        ),
        (
            ["green", "--neighbors", "10"],
            "--neighbors has no effect without --split",
        ),  # even if it is the default value
        (["green", "--data", "texts"], "--data has no effect without --split"),
        (["--split", "test", "--top", "3"], "--top has no effect without phrases"),
        (["--split", "nope"], "--split nope: must be one of train, valid, test"),
        (["--split", "test", "--neighbors", "12"], "12 of 11 other words; choose from 1 to 11"),
    ],
)
def test_options_without_effect_are_rejected(cli: Cli, runs: Runs, words: list[str], message: str) -> None:
    outcome = cli("predict", runs.tied, *words)
    assert outcome.code == 2
    assert message in outcome.err
