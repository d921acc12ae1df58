"""`reefknot generate`: texts longer than a window of a transformer, and options without effect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny import encoder

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def run(cli: Cli, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer that is trained on windows of 10 tokens."""
    folder = tmp_path_factory.mktemp("attentive") / "run"
    changes = (encoder("transformer"), "training.epochs=1", "training.optimiser.learning_rate=0.1")
    outcome = cli("train", recipe, *changes, "--row", "tied", "--out", folder, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    return folder


@pytest.mark.parametrize(("length", "full"), [(8, False), (9, True), (40, True)])
def test_a_text_longer_than_the_window_is_noted_once(cli: Cli, run: Path, length: int, full: bool) -> None:
    """The model reads <eos>, two words of the prompt, and every word that it writes except the last."""
    outcome = cli("generate", run, "--prompt", "green river", "--length", length, "--json")
    assert len(outcome.json()["tokens"]) == length
    assert outcome.err.count("longer than the 10 tokens of a training window") == full
    assert outcome.err.count("continued from the last 5 tokens") == full


def test_sentences_are_scored_independently(cli: Cli, run: Path) -> None:
    alone, after = (cli("score", run, *lines, "--json").json() for lines in (["green river"], ["house", "green river"]))
    assert alone[-1] == after[-1]
    assert sum(word["log_prob"] for word in alone[0]["words"]) == pytest.approx(alone[0]["log_prob"])


@pytest.mark.parametrize("option", [("--seed", 0), ("--top-k", 3), ("--top-p", 0.9)], ids=lambda option: option[0])
def test_options_of_sampling_are_rejected_at_temperature_0(cli: Cli, run: Path, option: tuple[str, float]) -> None:
    outcome = cli("generate", run, "--temperature", 0, *option)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{option[0]} has no effect at temperature 0" in outcome.err
    assert cli("generate", run, "--temperature", 0, "--length", 3).code == 0


def test_unknown_is_rejected_for_a_vocabulary_without_unk(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    settings = ("vocabulary.unknown=refuse", "training.epochs=1", "--row", "tied", "--device", "cpu")
    assert cli("train", recipe, *settings, "--out", tmp_path / "run").code == 0
    outcome = cli("generate", tmp_path / "run", "--unknown")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--unknown has no effect" in outcome.err
    assert cli("generate", tmp_path / "run", "--length", 3).code == 0
