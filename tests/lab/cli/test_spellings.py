"""A run with a char-CNN reads words outside the vocabulary by their spelling and predicts them as <unk>."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.lab.evaluation.sentences import score_sentence
from reefknot.lab.tasks.language_model import TrainedLanguageModel, open_language_model
from reefknot.lab.text.vocabulary import Vocabulary

from .conftest import Outcome

Cli = Callable[..., Outcome]
SETTINGS = [
    'input={kind="char_cnn", dim=8, filters=[[1, 4], [2, 4]], byte_dim=4}',
    "vocabulary.keep_spellings=true",
    "vocabulary.max_size=9",
    "training.epochs=1",
]


@pytest.fixture(scope="module")
def run(cli: Cli, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("spelling") / "run"
    outcome = cli("train", recipe, "--row", "tied", "--out", out, "--device", "cpu", *SETTINGS)
    assert outcome.code == 0, outcome.err
    return out


def test_spelling_of_an_unknown_word_changes_the_next_score(cli: Cli, run: Path) -> None:
    spelled = Vocabulary.load(run / "vocabulary.json").spelled_words
    assert len(spelled) == 3
    first_words = [*spelled[:2], "zoo", "öl", "<unk>"]
    sentences = cli("score", run, *(f"{word} stone" for word in first_words), "--json").json()
    scored = [sentence["words"] for sentence in sentences]
    assert all(words[0]["unknown"] for words in scored)
    assert len({words[0]["log_prob"] for words in scored}) == 1
    assert len({words[1]["log_prob"] for words in scored}) == len(first_words)


def test_score_does_not_depend_on_other_sentences(cli: Cli, run: Path) -> None:
    single = cli("score", run, "zoo stone", "--json").json()
    together = cli("score", run, "ark green", "zoo stone", "zoo ark", "--json").json()
    assert [word["log_prob"] for word in together[1]["words"]] == [word["log_prob"] for word in single[0]["words"]]


def test_prompt_with_unknown_words_prints_no_warning(cli: Cli, run: Path) -> None:
    vocabulary = Vocabulary.load(run / "vocabulary.json")
    outcome = cli("generate", run, "--prompt", f"{vocabulary.spelled_words[0]} zoo", "--length", 5, "--json")
    assert outcome.err == ""
    assert set(outcome.json()["tokens"]) <= set(vocabulary.words)


def test_neighbors_of_any_spelling_are_words_of_the_vocabulary(cli: Cli, run: Path) -> None:
    vocabulary = Vocabulary.load(run / "vocabulary.json")
    known, spelled = vocabulary.words[3], vocabulary.spelled_words[0]
    outcome = cli("vectors", "neighbors", run, known, spelled, "zoo", "-k", 100, "--json")
    assert outcome.err == f"not in the vocabulary, so these words have neighbours at the input only: {spelled}, zoo\n"
    neighbors = outcome.json()
    assert neighbors["output"].keys() == {known}
    assert {word for word, _ in neighbors["input"][known]} == set(vocabulary.words) - {known}
    for word in (spelled, "zoo"):
        assert {neighbor for neighbor, _ in neighbors["input"][word]} == set(vocabulary.words)
    text = cli("vectors", "neighbors", run, "zoo").out
    assert text.startswith("zoo (input): ")
    assert "output" not in text


def test_unknown_words_are_read_as_unk_without_keep_spellings(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    settings = [setting for setting in SETTINGS if "keep_spellings" not in setting]
    trained = cli("train", recipe, "--row", "tied", "--out", tmp_path / "run", "--device", "cpu", *settings)
    assert trained.code == 0, trained.err
    outcome = cli("generate", tmp_path / "run", "--prompt", "zoo", "--length", 5)
    assert outcome.err == "not in the vocabulary, read as <unk>: zoo\n"
    zoo, ark = cli("score", tmp_path / "run", "zoo stone", "ark stone", "--json").json()
    assert zoo["log_prob"] == ark["log_prob"]
    assert cli("vectors", "neighbors", tmp_path / "run", "zoo").code == 3


def test_added_spellings_do_not_change_other_scores(run: Path) -> None:
    trained = open_language_model(run)
    zoo, ark = trained.with_spellings(["zoo"]), trained.with_spellings(["ark", "green"])
    both = zoo.with_spellings(["ark"])

    def score_after(model: TrainedLanguageModel, word: str) -> float:
        """Return the log-probability of "stone" after a word."""
        return score_sentence(model.model, [word, "stone"], model.vocabulary)[1].log_prob

    assert score_after(zoo, "zoo") == score_after(both, "zoo") != score_after(both, "ark") == score_after(ark, "ark")
    assert score_after(trained, "zoo") == score_after(trained, "ark")
    assert score_after(both, "green") == score_after(trained, "green")
    assert both.model.input.vocab_size == trained.model.input.vocab_size + 2
    parameters = dict(trained.model.named_parameters())
    assert all(parameter is parameters[name] for name, parameter in both.model.named_parameters())
    assert not both.model.training
