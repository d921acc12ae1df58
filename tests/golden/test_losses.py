"""Thirty losses of tiny models equal stored values. If they change, the mathematics has changed.

pytest tests/golden --freeze        writes losses.json again, after an intended change

The text, the weights and the dropout come from a fixed seed. Processors round sums in different orders, and thirty
steps at a learning rate of 1 may amplify this by a factor of a hundred. In float64, ten digits remain to compare. In
one process, repeated runs are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import build_model, check_experiment
from reefknot.lab.text.streams import Streams
from reefknot.lab.training.generators import seed_everything
from reefknot.lab.training.loop import Trainer

Frozen = Callable[[Path, dict[str, Any]], dict[str, Any]]

WORDS = 50
SETTINGS: dict[str, Any] = {
    "corpus": {},
    "tables": {"words": {"kind": "word", "dim": 16}},
    "input": {"kind": "lookup", "table": "words"},
    "encoder": {"kind": "lstm", "hidden_dim": 16, "layers": 2, "dropout": 0.2},
    "output": {"kind": "softmax", "classifier": {"kind": "plain", "table": "words"}},
    "init": {"uniform": 0.1},
    "training": {
        "epochs": 2,
        "batch": 4,
        "steps": 10,
        "divisor": "batch",
        "clip": 5.0,
        "log_every": 1,
        "optimiser": {"kind": "sgd", "learning_rate": 1.0},
        "schedule": {"kind": "decay", "hold": 1, "factor": 0.5},
    },
}
CLASSES = {"tables": {**SETTINGS["tables"], "classes": {"kind": "word", "dim": 16}}}
AUGMENTED: dict[str, Any] = {"kind": "augmented", "table": "words", "tau": 20.0, "gamma": 0.5}
ROWS: dict[str, dict[str, Any]] = {
    "untied": {**CLASSES, "output": {"kind": "softmax", "classifier": {"kind": "plain", "table": "classes"}}},
    "tied": {},
    "tied + PR": {"output": {"kind": "softmax", "classifier": {"kind": "projected", "table": "words"}}},
    "AL": {**CLASSES, "output": AUGMENTED | {"classifier": {"kind": "plain", "table": "classes"}}},
    "REAL": {"output": AUGMENTED | {"classifier": {"kind": "plain", "table": "words", "bias": False}}},
    "DRILL": {
        "output": {"kind": "softmax", "classifier": {"kind": "drill", "table": "words", "depth": 2, "dropout": 0.2}}
    },
    "adaptive": {
        "tables": {"words": {"kind": "banded", "dim": 16, "sizes": [20, 20], "factor": 2}},
        "projections": {"bands": {"kind": "bands", "table": "words", "dim": 16}},
        "input": {"kind": "adaptive", "table": "words", "projections": "bands"},
        "output": {
            "kind": "adaptive",
            "projections": "bands",
            "tail_dropout": 0.2,
            "classifier": {"kind": "plain", "table": "words", "bias": False},
        },
    },
    "mixture": {"output": {"kind": "mixture", "experts": 2, "classifier": {"kind": "plain", "table": "words"}}},
    "sampled": {"output": {"kind": "sampled", "samples": 20, "classifier": {"kind": "plain", "table": "words"}}},
}
"""Smaller versions of the rows of the demo, and a sampled softmax."""


def text() -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return a text with few successors per word, for 15 windows of 4 streams and 10 steps."""
    ids = [1]
    while len(ids) < 4 * 151:
        ids.append((7 * ids[-1] + len(ids) % 3) % WORDS)
    return np.array(ids, dtype=np.int32)


def train_losses(row: str, folder: Path) -> list[float]:
    """Train a row and return the loss per token of every update."""
    experiment = check_experiment(SETTINGS | ROWS[row], row)
    seed_everything(0)
    model = build_model(experiment, WORDS)
    with RunFolder.open_for_training(folder, {"row": row}) as run:
        streams = Streams(text(), experiment.training.batch, experiment.training.steps)
        Trainer(model, streams, lambda: 1.0, experiment.training, run).train()
        return [line["nll"] for line in run.metrics.read() if line["kind"] == "train"]


@pytest.fixture(autouse=True)
def _float64_and_one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # before the first weights are drawn
    yield
    torch.set_default_dtype(torch.float32)


def test_losses_equal_the_frozen_values(tmp_path: Path, frozen: Frozen) -> None:
    current = {row: train_losses(row, tmp_path / str(number)) for number, row in enumerate(ROWS)}
    stored = frozen(Path(__file__).with_name("losses.json"), current)
    assert list(stored) == list(current)
    for row, values in stored.items():
        assert len(values) == 30
        np.testing.assert_allclose(current[row], values, rtol=1e-10, err_msg=row)


@pytest.mark.parametrize("row", ROWS)
def test_repeated_training_is_bitwise_equal(tmp_path: Path, row: str) -> None:
    first, second = (train_losses(row, tmp_path / name) for name in ("first", "second"))
    assert first == second
    assert first[0] > first[-1]
