"""Fixtures that train the tiny recipe: in this process, in another process, and with a signal at a chosen step."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reefknot.lab import experiment as experiments
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.text.streams import Streams
from reefknot.lab.training.display import SilentDisplay
from reefknot.lab.training.distributed import World
from reefknot.lab.training.update import Updater
from tiny import PATIENCE

Train = Callable[..., Any]


class RecordingDisplay(SilentDisplay):
    """A display that records the printed lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def display() -> RecordingDisplay:
    return RecordingDisplay()


@pytest.fixture
def train(tiny_recipe: Callable[..., Path], display: RecordingDisplay) -> Train:
    """Trains a row of the tiny recipe in this process and returns what result.json holds."""
    recipe = tiny_recipe()

    def run(out: Path, *overrides: str, row: str = "tied", track: tuple[str, ...] = ()) -> Any:
        loaded = load_recipe(str(recipe), overrides)
        result = experiments.train(loaded, loaded.row(row), out, world=World(), display=display, track=track)
        return result and result.record()

    return run


@pytest.fixture
def signal_in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that makes this process receive SIGTERM during its n-th update from now."""
    read = Streams.window

    def arm(step: int) -> None:
        count = 0

        def window(self: Streams, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal count
            count += 1
            if count == step:
                signal.raise_signal(signal.SIGTERM)
            return read(self, index)

        monkeypatch.setattr(Streams, "window", window)

    return arm


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let updates behave as on a GPU: results are read only when due, and the fused optimiser reads `found_inf`."""
    original = Updater.__init__

    def init_as_on_a_gpu(self: Updater, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self.synchronous = False
        optimiser: Any = self.state.optimiser
        optimiser.found_inf = self.stats.found_inf
        for group in optimiser.param_groups:
            group["fused"] = True

    monkeypatch.setattr(Updater, "__init__", init_as_on_a_gpu)


@pytest.fixture
def command() -> Callable[..., list[str]]:
    """A function that returns the command line of another Reefknot process."""

    def words(*arguments: str | Path) -> list[str]:
        return [sys.executable, "-m", "reefknot", *map(str, arguments)]

    return words


@pytest.fixture
def start() -> Callable[[list[str]], subprocess.Popen[str]]:
    """A function that starts a process and captures its output."""

    def popen(words: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return popen


@pytest.fixture
def wait_for() -> Callable[[Callable[[], object]], None]:
    """A function that waits until a condition holds, such as the first line of metrics."""

    def wait(condition: Callable[[], object]) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < until, f"nothing happened for {PATIENCE} seconds"
            time.sleep(0.01)

    return wait


@pytest.fixture
def metrics() -> Callable[[Path], list[dict[str, Any]]]:
    """A function that reads the metrics of a run without the timings."""

    def read(run: Path) -> list[dict[str, Any]]:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [{key: value for key, value in json.loads(line).items() if key != "wall"} for line in lines]

    return read


@pytest.fixture
def outcome(metrics: Callable[[Path], list[dict[str, Any]]]) -> Callable[[Path], dict[str, Any]]:
    """A function that reads all of a finished run that does not depend on timings, bit for bit."""

    def read(run: Path) -> dict[str, Any]:
        steps = sorted((run / "checkpoints").iterdir())
        weights = {path.name: (path / "model.safetensors").read_bytes() for path in steps}
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        scalars = {key: result[key] for key in ("valid", "test", "best", "frequency", "samples", "neighbors")}
        scores = (run / "scores.safetensors").read_bytes()
        return {
            "weights": weights,
            "link": (run / "best").readlink().name,
            "scores": scores,
            "metrics": metrics(run),
            **scalars,
        }

    return read
