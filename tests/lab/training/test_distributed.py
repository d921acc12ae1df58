"""Two processes under torchrun on the CPU: losses do not depend on the number of processes. Dropout is off."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reefknot.errors import SettingsError
from reefknot.lab import experiment as experiments
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.training.display import SilentDisplay
from reefknot.lab.training.distributed import World
from tiny import PATIENCE

SETTINGS = ("encoder.dropout=0.0", "training.log_every=1", "training.keep=10", "training.accumulate=2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "reefknot")

Metrics = Callable[[Path], list[dict[str, Any]]]


def two_processes(recipe: Path, out: Path, *overrides: str) -> list[str]:
    return [*TORCHRUN, "train", str(recipe), "--row", "tied", "--out", str(out), *SETTINGS, *overrides]


def one_process(recipe: Path, out: Path) -> None:
    loaded = load_recipe(str(recipe), SETTINGS)
    experiments.train(loaded, loaded.row("tied"), out, world=World(), display=SilentDisplay())


def rewind(run: Path, out: Path, step: int) -> Path:
    """Copy a finished run and remove everything after a step."""
    shutil.copytree(run, out, symlinks=True)
    (out / "result.json").unlink()
    for path in (out / "checkpoints").iterdir():
        if path.name > f"step_{step:08d}":
            shutil.rmtree(path)
    return out


def assert_equal_losses(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [(line["kind"], line["step"], line["epoch"]) for line in lines] == [
        (line["kind"], line["step"], line["epoch"]) for line in expected
    ]
    assert [line["nll"] for line in lines] == pytest.approx([line["nll"] for line in expected], abs=1e-6)
    norms = [line.get("gradient_norm", 0.0) for line in lines]
    assert norms == pytest.approx([line.get("gradient_norm", 0.0) for line in expected], rel=1e-4)


@pytest.mark.slow
def test_two_processes_equal_one_and_can_resume_its_run(
    tmp_path: Path, tiny_recipe: Callable[..., Path], metrics: Metrics
) -> None:
    recipe = tiny_recipe()
    one_process(recipe, tmp_path / "one")
    subprocess.run(two_processes(recipe, tmp_path / "two"), check=True, capture_output=True, timeout=PATIENCE)
    expected = metrics(tmp_path / "one")
    assert len(expected) == 14
    assert_equal_losses(metrics(tmp_path / "two"), expected)
    result = json.loads((tmp_path / "two" / "result.json").read_text(encoding="utf-8"))
    assert result["training"]["processes"] == 2
    assert result["training"]["tokens"] == 2 * 4 * 29
    single = json.loads((tmp_path / "one" / "result.json").read_text(encoding="utf-8"))
    assert result["test"]["nll"] == pytest.approx(single["test"]["nll"], abs=1e-6)

    one_process(recipe, rewind(tmp_path / "two", tmp_path / "two then one", 9))
    assert_equal_losses(metrics(tmp_path / "two then one"), expected)
    resumed = two_processes(recipe, rewind(tmp_path / "one", tmp_path / "one then two", 3), "training.shard=true")
    completed = subprocess.run(resumed, check=True, capture_output=True, text=True, timeout=PATIENCE)
    assert completed.stdout.count("resumed at step 3, epoch 1") == 1
    assert_equal_losses(metrics(tmp_path / "one then two"), expected)
    result = json.loads((tmp_path / "one then two" / "result.json").read_text(encoding="utf-8"))
    assert result["test"]["nll"] == pytest.approx(single["test"]["nll"], abs=1e-6)


def test_label_encoder_gradients_are_exchanged_once_per_update(
    tmp_path: Path, tiny_recipe: Callable[..., Path], metrics: Metrics
) -> None:
    """Each process has two micro-batches. The first one accumulates gradients, which the last one exchanges."""
    recipe = tiny_recipe(tokens=80, classifier="drill")
    loaded = load_recipe(str(recipe), (*SETTINGS, "training.accumulate=1"))
    experiments.train(loaded, loaded.row("tied"), tmp_path / "one", world=World(), display=SilentDisplay())
    subprocess.run(two_processes(recipe, tmp_path / "two"), check=True, capture_output=True, timeout=PATIENCE)
    assert_equal_losses(metrics(tmp_path / "two"), metrics(tmp_path / "one"))


def test_signal_to_torchrun_saves_a_checkpoint(
    tmp_path: Path,
    tiny_recipe: Callable[..., Path],
    start: Callable[[list[str]], subprocess.Popen[str]],
    wait_for: Callable[[Callable[[], object]], None],
) -> None:
    out = tmp_path / "run"
    process = start(two_processes(tiny_recipe(2000), out, "training.epochs=100000", "training.save_every=1000000"))
    wait_for(lambda: (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_bytes()) > 1000)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    run = RunFolder.open(out)
    checkpoint = run.checkpoints.load_latest(pytest.fail)
    assert checkpoint is not None
    assert checkpoint.state_values["processes"] == 2
    assert checkpoint.step == checkpoint.state_values["progress"]["step"] > 3
    assert checkpoint.state_values["progress"]["metrics_lines"] == run.metrics.lines
    assert {name for name in checkpoint.state_tensors if name.endswith(".torch")} == {
        "generator.0.torch",
        "generator.1.torch",
    }


def test_streams_must_divide_among_the_processes(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> None:
    loaded = load_recipe(str(tiny_recipe()), ["training.batch=5"])
    with pytest.raises(SettingsError, match="batch = 5 is not a multiple of 2"):
        experiments.train(loaded, loaded.row("tied"), tmp_path / "run", world=World(size=2), display=SilentDisplay())
    assert not (tmp_path / "run").exists()


def test_two_processes_share_random_windows_and_averaging(
    tmp_path: Path, tiny_recipe: Callable[..., Path], metrics: Metrics
) -> None:
    """The validation losses rise soon on such a small text, so averaging starts during the run."""
    recipe = tiny_recipe()
    change = (
        "training.epochs=5",
        "training.optimiser.learning_rate=0.25",
        "training.schedule={kind = 'constant'}",
        "training.random_steps={probability = 0.5, deviation = 2.0, least = 2}",
        "training.averaging={start = 'nonmonotone', interval = 1}",
    )
    loaded = load_recipe(str(recipe), (*SETTINGS, *change))
    single = experiments.train(loaded, loaded.row("tied"), tmp_path / "one", world=World(), display=SilentDisplay())
    assert single is not None
    assert single.training.averaged_from_epoch == 4
    subprocess.run(two_processes(recipe, tmp_path / "two", *change), check=True, capture_output=True, timeout=PATIENCE)
    assert_equal_losses(metrics(tmp_path / "two"), metrics(tmp_path / "one"))
