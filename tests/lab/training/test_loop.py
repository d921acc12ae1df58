"""The training loop: length in epochs or updates, validations, stopping and resuming."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from reefknot.errors import Stopped
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import build_model
from reefknot.lab.text.batches import build_batches
from reefknot.lab.text.samples import TextSamples
from reefknot.lab.training.loop import Trainer

UPDATES = ("training.epochs=default", "training.updates=8")
"""An epoch has 6 updates."""
Metrics = Callable[[Path], list[dict[str, Any]]]
Outcome = Callable[[Path], dict[str, Any]]


def validations(lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(line["step"], line["epoch"]) for line in lines if line["kind"] == "valid"]


def test_training_validates_and_logs_after_its_last_update(
    tmp_path: Path, train: Any, metrics: Metrics, display: Any
) -> None:
    result = train(tmp_path / "run", *UPDATES)
    lines = metrics(tmp_path / "run")
    assert result["training"]["steps"] == 8
    assert validations(lines) == [(6, 1), (8, 1 + 2 / 6)]
    assert (lines[-2]["kind"], lines[-2]["step"]) == ("train", 8)
    assert sum(line["tokens"] for line in lines if line["kind"] == "train") == result["training"]["tokens"]
    assert any("update 8/8  valid perplexity" in line for line in display.lines)
    best = min((line for line in lines if line["kind"] == "valid"), key=lambda line: line["nll"])
    assert result["best"] == {"step": best["step"], "epoch": best["epoch"]}
    assert (tmp_path / "run" / "best").readlink().name == f"step_{best['step']:08d}"


def test_epochs_and_the_same_number_of_updates_agree(tmp_path: Path, train: Any, outcome: Outcome) -> None:
    train(tmp_path / "epochs")
    train(tmp_path / "updates", "training.epochs=default", "training.updates=12")
    assert outcome(tmp_path / "updates") == outcome(tmp_path / "epochs")


def test_validate_every_counts_updates(tmp_path: Path, train: Any, metrics: Metrics) -> None:
    train(tmp_path / "run", "training.validate_every=4")
    assert validations(metrics(tmp_path / "run")) == [(4, 4 / 6), (8, 1 + 2 / 6), (12, 2)]


def test_rules_count_validations_and_not_epochs(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> None:
    """The fourth loss is worse than the second, which starts averaging; the sixth is no better than the fifth."""
    rules = (
        "training.averaging={start = 'nonmonotone', interval = 1}",
        "training.stop={rule = 'patience', interval = 1}",
    )
    recipe = load_recipe(
        str(tiny_recipe()), ("training.validate_every=2", *UPDATES, "training.updates=20", *rules), "tied"
    )
    experiment, losses = recipe.experiments["tied"], iter([2.0, 1.9, 1.85, 1.95, 1.8, 1.8])
    ids = np.arange(120, dtype=np.int32) % 11
    model = build_model(experiment, 11)
    with RunFolder.open_for_training(tmp_path / "run", {}) as folder:
        batches = build_batches(experiment.training, ids)
        progress = Trainer(model, batches, lambda: next(losses), experiment.training, folder).train()
    assert progress.step == 12
    assert "after update 12 by patience" in progress.stopped
    assert progress.averaged_from == 2  # from the middle of the second epoch
    assert (progress.best_step, progress.best_epoch) == (10, 1 + 4 / 6)


def test_weights_do_not_depend_on_the_number_of_validations(tmp_path: Path, train: Any, outcome: Outcome) -> None:
    train(tmp_path / "seldom", "training.keep=20")
    train(tmp_path / "often", "training.keep=20", "training.validate_every=1")
    seldom, often = (outcome(tmp_path / name)["weights"] for name in ("seldom", "often"))
    assert seldom.items() <= often.items()
    assert len(often) > len(seldom)


def test_run_counted_in_updates_resumes_bit_for_bit(
    tmp_path: Path, train: Any, outcome: Outcome, signal_in_step: Callable[[int], None]
) -> None:
    settings = (
        *UPDATES,
        "training.validate_every=5",
        "training.schedule={kind = 'cosine', period = 4, warmup = 2}",
        "training.optimiser={kind = 'sgd', learning_rate = 0.5, momentum = 0.9, nesterov = true}",
    )
    train(tmp_path / "unbroken", *settings)
    unbroken = outcome(tmp_path / "unbroken")
    last = max(unbroken["weights"])
    # A stopped run has one more checkpoint, and therefore keeps fewer of the others.
    weights = unbroken.pop("weights")[last]
    for step in range(1, 9):
        out = tmp_path / f"stopped at {step}"
        signal_in_step(step)
        with pytest.raises(Stopped, match=f"stopped at step {step} and saved"):
            train(out, *settings)
        train(out, *settings)
        resumed = outcome(out)
        assert resumed.pop("weights")[last] == weights
        assert resumed == unbroken


@pytest.mark.parametrize(
    ("batching", "encoder"),
    [
        ("sentences", "kind = 'lstm', hidden_dim = 8, dropout = 0.3"),
        ("blocks", "kind = 'transformer', layers = 1, heads = 2, ffn_dim = 8, dropout = 0.3"),
    ],
)
def test_windows_without_carried_state_resume_bit_for_bit(
    tmp_path: Path, train: Any, outcome: Outcome, monkeypatch: pytest.MonkeyPatch, batching: str, encoder: str
) -> None:
    """Each window starts from the initial state, so there is no hidden state to save."""
    optimiser = "training.optimiser={kind = 'adamw', learning_rate = 0.01}"
    settings = (*UPDATES, f"training.batching={batching}", "training.divisor=tokens", f"encoder={{{encoder}}}")
    settings += ("training.accumulate=3", optimiser)
    train(tmp_path / "unbroken", *settings)
    saved = RunFolder.open(tmp_path / "unbroken").checkpoints.load_latest(lambda _: None)
    assert saved is not None
    assert not any(name.startswith("hidden") for name in saved.state_tensors)
    read, count = TextSamples.window, 0

    def window(self: TextSamples, index: int) -> tuple[Tensor, Tensor]:
        nonlocal count
        count += 1
        if count == 4:
            signal.raise_signal(signal.SIGTERM)
        return read(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(TextSamples, "window", window)
        with pytest.raises(Stopped, match="at step 4"):
            train(tmp_path / "broken", *settings)
    train(tmp_path / "broken", *settings)
    unbroken, resumed = outcome(tmp_path / "unbroken"), outcome(tmp_path / "broken")
    last = max(unbroken["weights"])
    assert resumed.pop("weights")[last] == unbroken.pop("weights")[last]
    assert resumed == unbroken
