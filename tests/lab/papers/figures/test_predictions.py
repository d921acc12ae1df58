"""Table 4 of Inan et al.: probabilities over seeds, and contexts read from the beginning of their line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from reefknot.errors import DataError
from reefknot.lab.evaluation.predictions import Prediction
from reefknot.lab.papers.figures import predictions
from reefknot.lab.papers.figures.predictions import CONTEXTS, NextWords

from .conftest import Write

WORDS = ["<eos>", "the", "complaints", "filed", "in", "federal", "court"]


@pytest.fixture
def contexts_read(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return what the models read; they predict "the" and "federal", depending on the seed."""
    contexts: list[list[str]] = []

    def fake_predict(model: int, words: list[str], vocabulary: Any, k: int) -> Prediction:
        contexts.append(words)
        return Prediction([("the", 0.5 + model / 10), ("federal", 0.4 - model / 10), ("in", 0.1)], {})

    def fake_open(path: Any, device: str) -> Any:
        return SimpleNamespace(model=int(path.name.removeprefix("seed")), vocabulary=WORDS)

    text = [1, 0, 1, 2, 3, 4, 5, 0]  # the / the complaints filed in federal /
    dataset = SimpleNamespace(
        vocabulary=SimpleNamespace(words=WORDS, eos=0), splits={"test": SimpleNamespace(ids=text)}
    )
    monkeypatch.setattr(predictions, "open_language_model", fake_open)
    monkeypatch.setattr(predictions, "predict", fake_predict)
    monkeypatch.setattr(predictions, "open_texts", lambda run, data: dataset)
    return contexts


def test_predictions_are_means_over_seeds_after_the_whole_line(write: Write, contexts_read: list[list[str]]) -> None:
    runs = [write("inan2017/table1", "VD-LSTM large", seed) for seed in (0, 1)]
    measured = NextWords().measure(runs)
    first, second = measured["contexts"][:2]
    assert contexts_read[0] == ["the", "complaints", "filed", "in"]
    assert contexts_read[1] == CONTEXTS[1].end.split()
    assert (first["whole_line"], second["whole_line"]) == (True, False)
    row = first["rows"]["VD-LSTM large"]
    assert [(word, round(value, 6)) for word, value in row["words"]] == [("the", 0.55), ("federal", 0.35), ("in", 0.1)]
    assert (row["rank"], row["probability"]) == (2, pytest.approx(0.35))
    assert second["rows"]["VD-LSTM large"]["rank"] is None  # august is not in this vocabulary
    lines = NextWords().format_lines(measured)
    assert lines[0] == "complaints filed in [federal]   read as its line of the test text"
    assert lines[2].split() == ["0.55", "the", "0.27", "the", "0.22", "federal"]
    assert "federal: rank 2 in VD-LSTM large, probability 0.3500" in lines
    assert "august: no rank in VD-LSTM large, because it is not in the vocabulary" in lines
    svg = NextWords().draw(measured).svg
    assert "paper: VD-LSTM+REAL large" in svg


def test_words_of_several_sub_words_have_no_rank(write: Write, contexts_read: list[list[str]]) -> None:
    run = write("ends", "BPE", settings={"vocabulary": {"bpe": {"merges": 9}}})
    lines = NextWords().format_lines(NextWords().measure([run]))
    assert "august: no rank in BPE, because its tokens are sub-words" in lines
    assert sum(": no rank in BPE" in line for line in lines) == len(CONTEXTS) - 1  # federal is a token here


def test_without_the_corpus_the_printed_words_are_read(
    write: Write, contexts_read: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(run: Any, data: Any) -> Any:
        raise DataError("not here")

    monkeypatch.setattr(predictions, "open_texts", missing)
    measured = NextWords().measure([write("inan2017/table1", "VD-LSTM large")])
    assert contexts_read == [context.end.split() for context in CONTEXTS]
    assert not any(context["whole_line"] for context in measured["contexts"])


def test_paper_lists_ten_words_in_descending_order() -> None:
    for context in CONTEXTS:
        for words in (context.plain, context.real):
            assert len(words) == 10
            assert [value for _, value in words] == sorted((value for _, value in words), reverse=True)
