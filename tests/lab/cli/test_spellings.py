"""A run that reads spellings: words outside the vocabulary go in as they are written, and come out as <unk>."""

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
def spelling(cli: Cli, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("spelling") / "run"
    outcome = cli("train", recipe, "--row", "tied", "--out", out, "--device", "cpu", *SETTINGS)
    assert outcome.code == 0, outcome.err
    return out


def test_any_word_changes_what_follows_by_its_spelling(cli: Cli, spelling: Path) -> None:
    spelled = Vocabulary.load(spelling / "vocabulary.json").spelled
    assert len(spelled) == 3
    read = [*spelled[:2], "zoo", "öl", "<unk>"]
    scored = [each["words"] for each in cli("score", spelling, *(f"{word} stone" for word in read), "--json").json()]
    assert all(words[0]["unknown"] for words in scored)
    assert len({words[0]["log_prob"] for words in scored}) == 1
    assert len({words[1]["log_prob"] for words in scored}) == len(read)


def test_a_score_does_not_depend_on_the_other_sentences(cli: Cli, spelling: Path) -> None:
    alone = cli("score", spelling, "zoo stone", "--json").json()
    among = cli("score", spelling, "ark green", "zoo stone", "zoo ark", "--json").json()
    assert [word["log_prob"] for word in among[1]["words"]] == [word["log_prob"] for word in alone[0]["words"]]


def test_a_prompt_is_read_as_it_is_spelled(cli: Cli, spelling: Path) -> None:
    vocabulary = Vocabulary.load(spelling / "vocabulary.json")
    outcome = cli("generate", spelling, "--prompt", f"{vocabulary.spelled[0]} zoo", "--length", 5, "--json")
    assert outcome.err == ""
    assert set(outcome.json()["tokens"]) <= set(vocabulary.words)


def test_neighbours_are_words_of_the_vocabulary(cli: Cli, spelling: Path) -> None:
    vocabulary = Vocabulary.load(spelling / "vocabulary.json")
    known, spelled = vocabulary.words[3], vocabulary.spelled[0]
    outcome = cli("vectors", "neighbors", spelling, known, spelled, "zoo", "-k", 100, "--json")
    assert outcome.err == f"not in the vocabulary, so these words have neighbours at the input only: {spelled}, zoo\n"
    found = outcome.json()
    assert found["output"].keys() == {known}
    assert {word for word, _ in found["input"][known]} == set(vocabulary.words) - {known}
    for word in (spelled, "zoo"):
        assert {near for near, _ in found["input"][word]} == set(vocabulary.words)
    said = cli("vectors", "neighbors", spelling, "zoo").out
    assert said.startswith("zoo (input): ")
    assert "output" not in said


def test_without_kept_spellings_such_a_word_is_unknown(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    settings = [each for each in SETTINGS if "keep_spellings" not in each]
    trained = cli("train", recipe, "--row", "tied", "--out", tmp_path / "run", "--device", "cpu", *settings)
    assert trained.code == 0, trained.err
    outcome = cli("generate", tmp_path / "run", "--prompt", "zoo", "--length", 5)
    assert outcome.err == "not in the vocabulary, read as <unk>: zoo\n"
    zoo, ark = cli("score", tmp_path / "run", "zoo stone", "ark stone", "--json").json()
    assert zoo["log_prob"] == ark["log_prob"]
    assert cli("vectors", "neighbors", tmp_path / "run", "zoo").code == 3


def test_words_that_come_later_do_not_disturb_each_other(spelling: Path) -> None:
    trained = open_language_model(spelling)
    zoo, ark = trained.with_spellings(["zoo"]), trained.with_spellings(["ark", "green"])
    both = zoo.with_spellings(["ark"])

    def following(run: TrainedLanguageModel, word: str) -> float:
        return score_sentence(run.model, [word, "stone"], run.vocabulary)[1].log_prob

    assert following(zoo, "zoo") == following(both, "zoo") != following(both, "ark") == following(ark, "ark")
    assert following(trained, "zoo") == following(trained, "ark")
    assert following(both, "green") == following(trained, "green")
    assert both.model.input.vocab_size == trained.model.input.vocab_size + 2
    held = dict(trained.model.named_parameters())
    assert all(parameter is held[name] for name, parameter in both.model.named_parameters())
    assert not both.model.training
