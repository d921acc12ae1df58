"""Skip-gram training: metrics, checkpoints, resuming and stopping."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from reefknot.errors import DataError, NonFiniteError, SettingsError, Stopped
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks.skip_gram import SkipGramSettings
from reefknot.lab.training import skip_gram
from reefknot.lab.training.skip_gram import SkipGramTrainer, SkipGramTraining
from reefknot.lab.training.state import Progress
from reefknot.storage import manifest

WORDS, VOCABULARY, EOS = 2_000, 30, 0
SETTINGS = SkipGramSettings(dim=8, window=3, negatives=3, sample=1e-2)
TRAINING = SkipGramTraining(epochs=2, log_every=450, save_every=900, seed=5, learning_rate=0.05)
STEPS = 5
"""Number of stretches in an epoch: four of 450 words and one of 200."""
Outcome = tuple[Progress, dict[str, torch.Tensor], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def ids() -> NDArray[np.int32]:
    """A text with two groups of ten words that occur together. Every tenth word ends a line."""
    generator = np.random.default_rng(0)
    lines = [
        np.append(1 + 10 * generator.integers(2) + generator.integers(10, size=9), EOS) for _ in range(WORDS // 10)
    ]
    return np.concatenate(lines).astype(np.int32)


def make_trainer(
    run: RunFolder, ids: NDArray[np.int32], training: SkipGramTraining = TRAINING, tied: bool = False, **options: Any
) -> SkipGramTrainer:
    torch.manual_seed(training.seed)
    settings = SETTINGS.model_copy(update={"tied": tied})
    model = settings.build(VOCABULARY)
    counts = np.bincount(ids, minlength=VOCABULARY)
    sampler = settings.build_sampler(counts, eos=EOS, unknown=None, seed=training.seed)
    return SkipGramTrainer(model, ids, sampler, training, run, name="words", **options)


def train(out: Path, ids: NDArray[np.int32], training: SkipGramTraining = TRAINING, **options: Any) -> Outcome:
    with RunFolder.open_for_training(out, {"settings": training.model_dump()}) as run:
        trainer = make_trainer(run, ids, training, **options)
        progress = trainer.train()
        weights = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        metrics = [{key: value for key, value in line.items() if key != "wall"} for line in run.metrics.read()]
        return progress, weights, metrics


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_metrics_and_checkpoints_are_complete(tmp_path: Path, ids: NDArray[np.int32], tied: bool, display: Any) -> None:
    tracked: list[dict[str, Any]] = []
    progress, weights, metrics = train(tmp_path, ids, tied=tied, display=display, trackers=[tracked.append])
    assert (progress.step, progress.epoch, progress.window, progress.tokens) == (2 * STEPS, 3, 0, 2 * WORDS)
    assert progress.seconds > 0
    assert [line["step"] for line in metrics] == list(range(1, 2 * STEPS + 1))
    assert [line["tokens"] for line in metrics][:STEPS] == [450, 900, 1350, 1800, 2000]
    assert metrics[0]["learning_rate"] == pytest.approx(0.05 * (1 - 450 / 4000))
    assert metrics[-1]["learning_rate"] == 2.5e-6
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert len(tracked) == 2 * STEPS
    assert all(line["wall"]["tokens_per_second"] > 0 for line in tracked)
    checkpoints = RunFolder.open(tmp_path).checkpoints
    best = checkpoints.best_path()
    assert best is not None
    saved = checkpoints.load(best)
    assert saved.step == 2 * STEPS
    assert saved.weights.keys() == weights.keys()
    assert len(weights) == (1 if tied else 2)
    assert all(torch.equal(saved.weights[name], weights[name]) for name in weights)
    assert [path.name for path in sorted(checkpoints.folder.iterdir())] == ["step_00000009", "step_00000010"]


def test_related_words_get_similar_vectors(tmp_path: Path, ids: NDArray[np.int32]) -> None:
    _, weights, _ = train(tmp_path, ids, TRAINING.model_copy(update={"epochs": 20}))
    unit = torch.nn.functional.normalize(weights["input.weight"][1:21], dim=1)
    cosines = unit @ unit.T
    assert float(cosines[:10, :10].mean()) > float(cosines[:10, 10:].mean()) + 0.5


@pytest.fixture
def signal_in_stretch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that makes this process receive SIGTERM in its n-th stretch from now."""
    real = skip_gram.train_range

    def arm(number: int) -> None:
        count = 0

        def stretch(*arguments: Any, **options: Any) -> None:
            nonlocal count
            count += 1
            if count == number:
                signal.raise_signal(signal.SIGTERM)
            real(*arguments, **options)

        monkeypatch.setattr(skip_gram, "train_range", stretch)

    return arm


@pytest.mark.parametrize("at", [1, 3, STEPS, STEPS + 2])
def test_stopped_run_resumes_bit_for_bit(
    tmp_path: Path, ids: NDArray[np.int32], at: int, signal_in_stretch: Callable[[int], None], display: Any
) -> None:
    _, whole, metrics = train(tmp_path / "whole", ids)
    signal_in_stretch(at)
    with pytest.raises(Stopped, match="saved; the same command resumes") as caught:
        train(tmp_path / "parts", ids)
    assert caught.value.exit_code == 75
    progress, parts, continued = train(tmp_path / "parts", ids, display=display)
    assert progress.tokens == 2 * WORDS
    assert continued == metrics
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert "resumed at epoch" in display.lines[0]


def test_finished_run_is_not_trained_again(tmp_path: Path, ids: NDArray[np.int32]) -> None:
    first, weights, metrics = train(tmp_path, ids)
    progress_again, weights_again, metrics_again = train(tmp_path, ids)
    assert progress_again == first
    assert metrics_again == metrics
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_nonfinite_table_stops_training(tmp_path: Path, ids: NDArray[np.int32], tied: bool, value: float) -> None:
    with RunFolder.open_for_training(tmp_path, {}) as run:
        trainer = make_trainer(run, ids, tied=tied)
        with torch.no_grad():
            trainer.model.input.weight[3, 0] = value
        with pytest.raises(NonFiniteError, match="a weight is NaN or infinite after step 1") as caught:
            trainer.train()
        assert "training.learning_rate" in str(caught.value)
    assert json.loads((tmp_path / "nonfinite.json").read_text()) == {"step": 1, "window": 0, "epoch": 1, "seed": 5}
    assert not (tmp_path / "checkpoints").exists()


def test_loss_depends_on_the_seed_and_hardly_on_the_workers(tmp_path: Path, ids: NDArray[np.int32]) -> None:
    outcomes = {}
    many_workers = 16 * (os.cpu_count() or 1)
    for seed, workers in ((5, 1), (6, 1), (5, 2), (5, many_workers)):
        training = TRAINING.model_copy(update={"seed": seed, "workers": workers})
        outcomes[seed, workers] = train(tmp_path / f"{seed}-{workers}", ids, training)[2][-1]["loss"]
    assert outcomes[5, 1] != outcomes[6, 1]
    for workers in (2, many_workers):
        assert outcomes[5, workers] == pytest.approx(outcomes[5, 1], rel=0.1)


def test_checkpoint_with_other_settings_is_rejected(tmp_path: Path, ids: NDArray[np.int32]) -> None:
    train(tmp_path, ids)
    manifest.write_bytes(tmp_path / "config.json", b'{"settings": {}}')
    with (
        RunFolder.open_for_training(tmp_path, {"settings": {}}) as run,
        pytest.raises(DataError, match="a run whose settings differ"),
    ):
        make_trainer(run, ids).train()


def test_text_and_vocabulary_must_match_the_model(tmp_path: Path, ids: NDArray[np.int32]) -> None:
    model = SETTINGS.build(VOCABULARY)
    with RunFolder.open_for_training(tmp_path, {}) as run:

        def make(ids: NDArray[np.int32], words: int) -> SkipGramTrainer:
            sampler = SETTINGS.build_sampler([1] * words, eos=None, unknown=None, seed=0)
            return SkipGramTrainer(model, ids, sampler, TRAINING, run)

        with pytest.raises(SettingsError, match="29 words, but the model has 30"):
            make(ids, 29)
        with pytest.raises(DataError, match="is empty"):
            make(ids[:0], VOCABULARY)
        with pytest.raises(DataError, match="outside the vocabulary, 0 to 29"):
            make(np.array([3, 30], np.int32), VOCABULARY)
    with pytest.raises(ValidationError, match="is above learning_rate"):
        SkipGramTraining(lowest_rate=0.1)
