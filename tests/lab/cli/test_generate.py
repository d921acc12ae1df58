"""`reefknot generate` with a transformer: a text longer than the windows of its training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny import encoder

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def run(cli: Cli, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on windows of 10 tokens."""
    folder = tmp_path_factory.mktemp("attentive") / "run"
    changes = (encoder("transformer"), "training.epochs=1", "training.optimiser.learning_rate=0.1")
    outcome = cli("train", recipe, *changes, "--row", "tied", "--out", folder, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    return folder


@pytest.mark.parametrize(("length", "full"), [(8, False), (9, True), (40, True)])
def test_a_full_window_is_told_once(cli: Cli, run: Path, length: int, full: bool) -> None:
    """<eos> and two words are read, and every word that is written but the last."""
    outcome = cli("generate", run, "--prompt", "green river", "--length", length, "--json")
    assert len(outcome.json()["tokens"]) == length
    sentence = "longer than the 10 tokens of training: each time, it went on from the last 5"
    assert outcome.err.count(sentence) == full


def test_sentences_are_scored_afresh(cli: Cli, run: Path) -> None:
    alone, after = (cli("score", run, *each, "--json").json() for each in (["green river"], ["house", "green river"]))
    assert alone[-1] == after[-1]
    assert sum(word["log_prob"] for word in alone[0]["words"]) == pytest.approx(alone[0]["log_prob"])
