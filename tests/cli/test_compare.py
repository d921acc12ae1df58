"""`reefknot compare` on folders of several runs: which are averaged, which are refused, which are left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Outcome, Runs

Cli = Callable[..., Outcome]


def copy_run(run: Path, to: Path, seed: int = 0, corpus: str | None = None, **settings: dict[str, Any]) -> Path:
    """A run as another seed, or with other settings, would have left it."""
    shutil.copytree(run, to, symlinks=True)
    config = json.loads((to / "config.json").read_text(encoding="utf-8"))
    for name, changed in {"training": {"seed": seed}, **settings}.items():
        config["settings"][name] |= changed
    config["corpus"] = corpus or config["corpus"]
    (to / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = json.loads((to / "result.json").read_text(encoding="utf-8"))
    (to / "result.json").write_text(json.dumps(result | {"seed": seed}), encoding="utf-8")
    return to


@pytest.fixture
def seeds(runs: Runs, tmp_path: Path) -> Path:
    """Three seeds of a row, of which the last is not finished."""
    folders = [copy_run(runs.tied, tmp_path / "seeds" / f"seed{seed}", seed=seed) for seed in range(3)]
    (folders[2] / "result.json").unlink()
    return tmp_path / "seeds"


def test_seeds_are_averaged_and_counted(cli: Cli, runs: Runs, seeds: Path) -> None:
    text = cli("compare", seeds, runs.untied).out
    assert f"A = {seeds} (2 of 3 seeds finished)\n" in text
    assert f"B = {runs.untied} (1 seed)\n" in text
    assert "B was trained once" in text
    shutil.rmtree(seeds / "seed2")
    assert f"A = {seeds} (2 seeds)\n" in cli("compare", seeds, runs.untied).out
    (found,) = cli("compare", seeds, runs.untied, "--json").json()
    assert found["seeds"] == [2, 1]


def test_other_settings_are_not_taken_for_seeds(cli: Cli, runs: Runs, seeds: Path) -> None:
    copy_run(runs.tied, seeds / "longer", seed=3, training={"seed": 3, "epochs": 9})
    outcome = cli("compare", runs.untied, seeds)
    assert outcome.code == 2
    assert f"{seeds} holds runs that differ in more than the seed" in outcome.err
    assert "training.epochs=9" in outcome.err


def test_a_seed_counts_once(cli: Cli, runs: Runs, seeds: Path) -> None:
    copy_run(runs.tied, seeds / "again", seed=1)
    outcome = cli("compare", runs.untied, seeds)
    assert outcome.code == 2
    assert "are the same seed, 1, twice; leave one out" in outcome.err


def test_every_run_must_have_scored_the_same_text(cli: Cli, runs: Runs, seeds: Path) -> None:
    copy_run(runs.tied, seeds / "other", seed=3, corpus="another")
    outcome = cli("compare", runs.untied, seeds)
    assert outcome.code == 2
    assert f"{seeds / 'other'} and {runs.untied} were scored on different texts or vocabularies" in outcome.err


def test_every_run_must_have_been_scored_in_the_same_way(cli: Cli, runs: Runs, tmp_path: Path) -> None:
    other = copy_run(runs.tied, tmp_path / "other", evaluation={"streams": 7})
    outcome = cli("compare", runs.untied, other)
    assert outcome.code == 2
    assert f"{other} was scored in 7 streams, {runs.untied} in 1: no fair comparison" in outcome.err


def test_documents_need_the_text_and_no_weights(cli: Cli, runs: Runs, corpus: Path, tmp_path: Path) -> None:
    light = copy_run(runs.tied, tmp_path / "light")
    shutil.rmtree(light / "checkpoints")
    (found,) = cli("compare", light, runs.untied, "--by", "documents", "--json").json()
    assert found["units"] == 30
    changed = tmp_path / "text"
    shutil.copytree(corpus, changed)
    (changed / "test.txt").write_text("other words\n\n" * 50, encoding="utf-8")
    moved = copy_run(runs.tied, tmp_path / "moved")
    config = (moved / "config.json").read_text(encoding="utf-8").replace(str(corpus), str(changed))
    (moved / "config.json").write_text(config, encoding="utf-8")
    outcome = cli("compare", moved, runs.untied, "--by", "documents")
    assert outcome.code == 3
    assert "its text has changed" in outcome.err
