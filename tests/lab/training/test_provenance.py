"""A run records its settings, its text, and the code of every session."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import DataError, SettingsError, Stopped
from reefknot.lab import experiment as experiments
from reefknot.lab.experiment import is_done
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.training.display import SilentDisplay
from tiny import PATIENCE

Train = Callable[..., Any]


def test_checkpoint_with_other_settings_is_rejected(tmp_path: Path, train: Train, signal_in_step: Any) -> None:
    train(tmp_path / "other", "training.optimiser.learning_rate=0.5")
    signal_in_step(2)
    with pytest.raises(Stopped):
        train(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "run" / "checkpoints")
    with pytest.raises(DataError, match="a checkpoint of a run whose settings differ"):
        train(tmp_path / "run")


def test_sessions_with_other_code_are_recorded(
    tmp_path: Path, train: Train, display: Any, signal_in_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment_now = experiments.capture_environment()
    monkeypatch.setattr(
        experiments, "capture_environment", lambda: environment_now | {"source_sha256": "of other code"}
    )
    signal_in_step(2)
    with pytest.raises(Stopped):
        train(tmp_path / "run")
    monkeypatch.setattr(experiments, "capture_environment", lambda: dict(environment_now))
    train(tmp_path / "run")
    environment = RunFolder.open(tmp_path / "run").environment or {}
    assert environment["source_sha256"] == environment_now["source_sha256"]
    assert [session["source_sha256"] for session in environment["earlier"]] == ["of other code"]
    assert any("started in another environment (source_sha256)" in line for line in display.lines)


def test_reason_a_session_ends_is_logged(tmp_path: Path, train: Train, signal_in_step: Any) -> None:
    signal_in_step(3)
    with pytest.raises(Stopped):
        train(tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "stopped at step 3 and saved" in log
    assert "types" in log


def test_run_is_done_only_for_its_settings_and_text(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> None:
    recipe = load_recipe(str(tiny_recipe()))
    row, out = recipe.row("tied"), tmp_path / "run"
    experiment = recipe.experiments["tied"]
    dataset = open_dataset(experiment.corpus, experiment.vocabulary)
    assert not is_done(out, recipe, row, 0, dataset)
    train_tied(recipe, out)
    assert is_done(out, recipe, row, 0, dataset)
    assert not is_done(out, recipe, row, 1, dataset)
    text = Path(experiment.corpus.name) / "train.txt"
    text.write_text(text.read_text() + "w1 w2 w3\n")
    changed = open_dataset(experiment.corpus, experiment.vocabulary)
    assert not is_done(out, recipe, row, 0, changed)
    with pytest.raises(SettingsError, match="holds a run with other settings"):
        train_tied(recipe, out)


def train_tied(recipe: Any, out: Path) -> None:
    experiments.train(recipe, recipe.row("tied"), out, world=experiments.World(), display=SilentDisplay())


def test_every_epoch_ends_with_a_line_of_metrics(tmp_path: Path, train: Train) -> None:
    train(tmp_path / "run", "training.log_every=4")
    lines = [line for line in RunFolder.open(tmp_path / "run").metrics.read() if line["kind"] == "train"]
    assert [(line["epoch"], line["step"]) for line in lines] == [(1, 4), (1, 6), (2, 8), (2, 12)]
    assert [line["tokens"] for line in lines] == [80, 36, 40, 76]


def test_sighup_stops_training_unless_nohup_ignores_it(
    tmp_path: Path, tiny_recipe: Callable[..., Path], command: Any, start: Any, wait_for: Any
) -> None:
    endless = ("training.epochs=100000", "training.save_every=1000000", "training.log_every=1")
    recipe = tiny_recipe(2000)
    for prefix, code in (([], 75), (["nohup"], None)):
        out = tmp_path / f"run{len(prefix)}"
        process = start([*prefix, *command("train", recipe, "--row", "tied", "--out", out, *endless)])
        try:
            wait_for((out / "metrics.jsonl").exists)
            process.send_signal(signal.SIGHUP)
            if code is None:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(2)
            else:
                assert process.wait(PATIENCE) == code
        finally:
            process.kill()
            process.communicate()
