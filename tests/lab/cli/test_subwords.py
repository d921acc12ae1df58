"""Verbs on a run with sub-words, and comparison with a run on words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.lab.tasks.word_vectors import open_vectors
from reefknot.lab.text.vocabulary import Vocabulary
from reefknot.vectors.lookup import Lookup

from .conftest import WORDS, Outcome, Runs

Cli = Callable[..., Outcome]


@pytest.fixture(scope="module")
def subword_run(cli: Cli, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied row with sub-words. Some words are a single sub-word; `mountain` is split."""
    out = tmp_path_factory.mktemp("subwords") / "run"
    outcome = cli("train", recipe, "--row", "tied", "--out", out, "--device", "cpu", "vocabulary.bpe.merges=20")
    assert outcome.code == 0, outcome.err
    assert " per word" in outcome.out
    assert re.search(r"epoch 2/2  valid perplexity [\d.]+ per sub-word", outcome.out)
    return out


def test_run_saves_its_tokenizer_and_scores_per_word(subword_run: Path) -> None:
    assert (subword_run / "tokenizer.json").is_file()
    result = json.loads((subword_run / "result.json").read_text(encoding="utf-8"))
    assert result["test"]["words"] == 60 * 6 + 90
    assert result["test"]["tokens"] > result["test"]["words"]
    assert result["test"]["word_perplexity"] > result["test"]["perplexity"]
    assert "</w>" not in result["samples"][0]["text"]


def test_sentence_is_scored_in_subwords(cli: Cli, subword_run: Path) -> None:
    (record,) = cli("score", subword_run, "stone zoo", "--json").json()
    words = [word["word"] for word in record["words"]]
    assert words[-1] == "<eos>"
    assert "".join(words[:-2]) == "stone</w>"
    assert record["words"][-2] | {"log_prob": 0} == {"word": "zoo", "log_prob": 0, "unknown": True}


def test_prompt_is_split_and_generated_text_is_joined(cli: Cli, subword_run: Path) -> None:
    record = cli("generate", subword_run, "--prompt", "stonebird", "--length", 30, "--json").json()
    assert record["text"].startswith("stonebird ")
    assert "</w>" not in record["text"]
    assert any("</w>" in token for token in record["tokens"])


def test_neighbors_need_a_word_that_is_one_subword(cli: Cli, subword_run: Path) -> None:
    subwords = {word: Vocabulary.load(subword_run / "vocabulary.json").split_word(word) for word in WORDS}
    unsplit = next(word for word, parts in subwords.items() if len(parts) == 1)
    assert list(cli("vectors", "neighbors", subword_run, unsplit, "--json").json()["tied"]) == [f"{unsplit}</w>"]
    outcome = cli("vectors", "neighbors", subword_run, "mountain")
    assert outcome.code == 3
    parts = " ".join(subwords["mountain"])
    assert f"mountain does not have its own vector in {subword_run}: it is split into {parts}" in outcome.err


def test_subword_that_does_not_end_a_word_is_rejected(cli: Cli, subword_run: Path) -> None:
    vocabulary = Vocabulary.load(subword_run / "vocabulary.json")
    ((_, table),) = open_vectors(subword_run).items()
    assert table.subwords
    unsplit = [token.removesuffix("</w>") for token in table.words if token.endswith("</w>")]
    assert [table.words[row] for row in Lookup(table).require(unsplit, "x")] == [f"{word}</w>" for word in unsplit]
    inside = (token for token in vocabulary.words if not vocabulary.ends_word(token))
    unknown = next(token for token in inside if f"{token}</w>" not in table)
    outcome = cli("vectors", "analogy", subword_run, unknown, unsplit[0], unsplit[1])
    assert (outcome.code, outcome.out) == (3, "")
    assert f"not in the vocabulary of {subword_run} as a single sub-word: {unknown}" in outcome.err


def test_runs_on_words_and_subwords_are_compared_per_word(cli: Cli, runs: Runs, subword_run: Path) -> None:
    (record,) = cli("compare", runs.tied, subword_run, "--json").json()
    results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in (runs.tied, subword_run)]
    expected = [result["test"]["word_perplexity"] for result in results]
    assert [record["perplexity_a"], record["perplexity_b"]] == pytest.approx(expected)
    assert record["of"] == "word"
    assert "test text: 450 words in" in cli("compare", runs.tied, subword_run).out
    outcome = cli("compare", runs.tied, subword_run, "--by", "documents")
    assert outcome.code == 2
    assert "use --by blocks" in outcome.err


def test_runs_with_different_unknown_words_are_rejected(
    cli: Cli, subword_run: Path, recipe: Path, tmp_path: Path
) -> None:
    settings = ["vocabulary.max_size=9", "training.epochs=1"]
    fewer = cli("train", recipe, "--row", "tied", "--out", tmp_path / "fewer", "--device", "cpu", *settings)
    assert fewer.code == 0, fewer.err
    outcome = cli("compare", subword_run, tmp_path / "fewer")
    assert outcome.code == 2
    assert "one scores 0 unknown words as <unk>, the other " in outcome.err
