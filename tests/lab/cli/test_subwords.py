"""Verbs on a run with sub-words, and its comparison with a run on words."""

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
def pieces(cli: Cli, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied row, its words in pieces: some are one, `mountain` is several."""
    out = tmp_path_factory.mktemp("pieces") / "run"
    outcome = cli("train", recipe, "--row", "tied", "--out", out, "--device", "cpu", "vocabulary.bpe.merges=20")
    assert outcome.code == 0, outcome.err
    assert " per word" in outcome.out
    assert re.search(r"epoch 2/2  valid perplexity [\d.]+ per piece", outcome.out)
    return out


def test_the_run_keeps_how_words_are_cut(pieces: Path) -> None:
    assert (pieces / "tokenizer.json").is_file()
    result = json.loads((pieces / "result.json").read_text(encoding="utf-8"))
    assert result["test"]["words"] == 60 * 6 + 90
    assert result["test"]["tokens"] > result["test"]["words"]
    assert result["test"]["word_perplexity"] > result["test"]["perplexity"]
    assert "</w>" not in result["samples"][0]["text"]


def test_a_sentence_is_scored_in_pieces(cli: Cli, pieces: Path) -> None:
    (found,) = cli("score", pieces, "stone zoo", "--json").json()
    shown = [word["word"] for word in found["words"]]
    assert shown[-1] == "<eos>"
    assert "".join(shown[:-2]) == "stone</w>"
    assert found["words"][-2] | {"log_prob": 0} == {"word": "zoo", "log_prob": 0, "unknown": True}


def test_a_prompt_is_cut_and_the_text_is_joined(cli: Cli, pieces: Path) -> None:
    found = cli("generate", pieces, "--prompt", "stonebird", "--length", 30, "--json").json()
    assert found["text"].startswith("stonebird ")
    assert "</w>" not in found["text"]
    assert any("</w>" in token for token in found["tokens"])


def test_neighbours_are_those_of_one_piece(cli: Cli, pieces: Path) -> None:
    cuts = {word: Vocabulary.load(pieces / "vocabulary.json").cut(word) for word in WORDS}
    whole = next(word for word, cut in cuts.items() if len(cut) == 1)
    assert list(cli("vectors", "neighbors", pieces, whole, "--json").json()["tied"]) == [f"{whole}</w>"]
    outcome = cli("vectors", "neighbors", pieces, "mountain")
    assert outcome.code == 3
    cut = " ".join(cuts["mountain"])
    assert f"mountain has no vector of its own in {pieces}: it is cut into {cut}" in outcome.err


def test_a_piece_inside_of_words_is_no_word(cli: Cli, pieces: Path) -> None:
    vocabulary = Vocabulary.load(pieces / "vocabulary.json")
    ((_, table),) = open_vectors(pieces).items()
    assert table.subwords
    whole = [token.removesuffix("</w>") for token in table.words if token.endswith("</w>")]
    assert [table.words[row] for row in Lookup(table).require(whole, "x")] == [f"{word}</w>" for word in whole]
    inside = (token for token in vocabulary.words if not vocabulary.ends_word(token))
    unknown = next(token for token in inside if f"{token}</w>" not in table)
    outcome = cli("vectors", "analogy", pieces, unknown, whole[0], whole[1])
    assert (outcome.code, outcome.out) == (3, "")
    assert f"not in the vocabulary of {pieces} as a single sub-word: {unknown}" in outcome.err


def test_runs_on_words_and_on_pieces_compare_by_words(cli: Cli, runs: Runs, pieces: Path) -> None:
    (found,) = cli("compare", runs.tied, pieces, "--json").json()
    results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in (runs.tied, pieces)]
    expected = [result["test"]["word_perplexity"] for result in results]
    assert [found["perplexity_a"], found["perplexity_b"]] == pytest.approx(expected)
    assert found["of"] == "word"
    assert "test text: 450 words in" in cli("compare", runs.tied, pieces).out
    outcome = cli("compare", runs.tied, pieces, "--by", "documents")
    assert outcome.code == 2
    assert "use --by blocks" in outcome.err


def test_other_unknown_words_are_no_fair_comparison(cli: Cli, pieces: Path, recipe: Path, tmp_path: Path) -> None:
    settings = ["vocabulary.max_size=9", "training.epochs=1"]
    fewer = cli("train", recipe, "--row", "tied", "--out", tmp_path / "fewer", "--device", "cpu", *settings)
    assert fewer.code == 0, fewer.err
    outcome = cli("compare", pieces, tmp_path / "fewer")
    assert outcome.code == 2
    assert "0 unknown words, scored as <unk>, against " in outcome.err
