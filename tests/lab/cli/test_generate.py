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
    """A Transformer that was trained on windows of 10 tokens."""
    folder = tmp_path_factory.mktemp("transformer") / "run"
    changes = (encoder("transformer"), "training.epochs=1", "training.optimiser.learning_rate=0.1")
    outcome = cli("train", recipe, *changes, "--row", "tied", "--out", folder, "--device", "cpu")
    assert outcome.code == 0, outcome.err
    return folder


@pytest.mark.parametrize(("length", "is_full"), [(8, False), (9, True), (40, True)])
def test_text_longer_than_the_window_prints_one_warning(cli: Cli, run: Path, length: int, is_full: bool) -> None:
    """The model reads <eos>, two words of the prompt, and every word that it generates except the last."""
    outcome = cli("generate", run, "--prompt", "green river", "--length", length, "--json")
    assert len(outcome.json()["tokens"]) == length
    assert outcome.err.count("longer than the 10 tokens of a training window") == is_full
    assert outcome.err.count("continued from the last 5 tokens") == is_full


def test_sentences_are_scored_independently(cli: Cli, run: Path) -> None:
    (single,) = cli("score", run, "green river", "--json").json()
    _, second = cli("score", run, "house", "green river", "--json").json()
    assert single == second
    assert sum(word["log_prob"] for word in single["words"]) == pytest.approx(single["log_prob"])


def test_name_of_a_file_is_scored_with_a_hint(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.txt").write_text("green\n", encoding="utf-8")
    outcome = cli("score", run, "s.txt", "green", "house " * 99, "--json")
    assert [record["sentence"] for record in outcome.json()] == ["s.txt", "green", "house " * 99]
    assert outcome.err == "s.txt is scored as a sentence; --text s.txt scores the file\n"


@pytest.mark.parametrize("option", [("--seed", 0), ("--top-k", 3), ("--top-p", 0.9)], ids=lambda option: option[0])
def test_sampling_options_are_rejected_at_temperature_0(cli: Cli, run: Path, option: tuple[str, float]) -> None:
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
