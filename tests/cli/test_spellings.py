"""A run that reads spellings: words outside the vocabulary go in as they are written, and come out as <unk>."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from reefknot.text.vocabulary import Vocabulary

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


def test_a_spelled_word_changes_what_follows(cli: Cli, spelling: Path) -> None:
    spelled = Vocabulary.load(spelling / "vocabulary.json").spelled
    assert len(spelled) == 3
    first, second, never = cli("score", spelling, *(f"{word} stone" for word in (*spelled[:2], "zoo")), "--json").json()
    assert first["words"][0]["unknown"]
    assert first["words"][0]["log_prob"] == second["words"][0]["log_prob"] == never["words"][0]["log_prob"]
    assert len({sentence["words"][1]["log_prob"] for sentence in (first, second, never)}) == 3


def test_prompts_and_neighbours(cli: Cli, spelling: Path) -> None:
    vocabulary = Vocabulary.load(spelling / "vocabulary.json")
    outcome = cli("generate", spelling, "--prompt", f"{vocabulary.spelled[0]} zoo", "--length", 5)
    assert outcome.code == 0
    assert outcome.err == "not in the vocabulary, read as <unk>: zoo\n"
    found = cli("neighbors", spelling, vocabulary.words[3], "-k", 100, "--json").json()
    assert {word for word, _ in found["input"][vocabulary.words[3]]} == set(vocabulary.words) - {vocabulary.words[3]}
