"""Replicated and sharded models: several processes train like one, and can resume the runs of one another.

The rows are those of `together.toml`.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import run_command
from safetensors.torch import load_file
from train_together import train

from reefknot.errors import SettingsError
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import build_model
from reefknot.lab.training.distributed import ParallelModel, World

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).with_name("together.toml")
ROWS = (
    "blocks",
    "one-block",
    "blocks-in-micro-batches",
    "float16",
    "sentences",
    "sentences-in-micro-batches",
    "streams-in-micro-batches",
    "frozen",
    "softmax",
    "augmented",
)
RESUMED = ("blocks-in-micro-batches", "sentences-in-micro-batches", "streams-in-micro-batches", "frozen")
"""Rows with several optimiser tensors per parameter, averages, a hidden state, and a frozen table."""
MODES = ("copies", "shards", "words")
"""Every process has the whole model, a shard of it, or a shard of its vocabulary."""
WHOLE_TABLE = "streams-in-micro-batches"
"""A row with DRILL, whose vocabulary cannot be divided."""


def pairs(rows: Sequence[str]) -> list[tuple[str, str]]:
    """Return the modes and rows that fit together."""
    return [(mode, row) for mode in MODES for row in rows if (mode, row) != ("words", WHOLE_TABLE)]


LAST, EARLIER = "step_00000004", "step_00000002"

Metrics = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The override for a text of 24 words in lines of 1 to 12 words. Half of the lines have only frequent words."""
    folder = tmp_path_factory.mktemp("text")
    generator = random.Random(0)
    words = [first + last for first in ("ko", "mi", "ru", "se") for last in ("ba", "du", "fi", "le", "no", "ra")]
    for name, lines in (("train", 30), ("valid", 6), ("test", 6)):
        choices = [words[:6] if line % 2 else words for line in range(lines)]
        written = [" ".join(generator.choices(choice, k=generator.randint(1, 12))) + "\n" for choice in choices]
        (folder / f"{name}.txt").write_text("".join(written), encoding="utf-8")
    return f"corpus.name={folder}"


def train_alone(text: str, row: str, out: Path) -> Path:
    recipe = load_recipe(str(RECIPE), [text])
    train(recipe, next(candidate for candidate in recipe.rows if candidate.slug == row), out, World())
    return out


def train_together(processes: int, folder: Path, text: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = Path(__file__).with_name("train_together.py")
    command = [*torchrun, str(script), str(RECIPE), str(folder), text]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert completed.returncode == 0, completed.stderr


def rewind(run: Path, out: Path) -> Path:
    """Copy a finished run and remove everything after its second update."""
    shutil.copytree(run, out, symlinks=True)
    (out / "best").unlink()
    for path in (out / "checkpoints").iterdir():
        if path.name > EARLIER:
            shutil.rmtree(path)
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    """All rows trained by one process."""
    folder = tmp_path_factory.mktemp("alone")
    for row in ROWS:
        train_alone(text, row, folder / row)
    return folder


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, text: str, alone: Path) -> Path:
    """All rows trained by two processes in both modes, and resumed from runs of one process in both modes."""
    folder = tmp_path_factory.mktemp("together")
    for mode in MODES:
        (folder / mode).mkdir()
    for mode, row in pairs(RESUMED):
        rewind(alone / row, folder / f"{mode} resumed" / row)
    train_together(2, folder, text)
    return folder


def assert_equal_runs(run: Path, expected: Path, metrics: Metrics) -> None:
    assert RunFolder.open(run).config == RunFolder.open(expected).config
    lines, expected_lines = metrics(run), metrics(expected)
    assert [line["step"] for line in expected_lines if line["kind"] == "train"] == (
        [1, 4] if run.name == "float16" else [1, 2, 3, 4]
    )
    for line, expected_line in zip(lines, expected_lines, strict=True):
        for key in ("kind", "step", "epoch", "tokens", "skipped"):
            assert line.get(key) == expected_line.get(key)
        assert line["nll"] == pytest.approx(expected_line["nll"], rel=1e-6 if line["kind"] == "valid" else 1e-12)
        assert line.get("gradient_norm", 0.0) == pytest.approx(expected_line.get("gradient_norm", 0.0), rel=1e-10)
    for name in ("model.safetensors", "state.safetensors"):
        tensors, expected_tensors = (load_file(folder / "checkpoints" / LAST / name) for folder in (run, expected))
        names = {key for key in expected_tensors if not key.startswith("generator.")}
        assert {key for key in tensors if not key.startswith("generator.")} == names
        for key in names:
            torch.testing.assert_close(tensors[key], expected_tensors[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize(("mode", "row"), pairs(ROWS))
def test_two_processes_equal_one_process(mode: str, row: str, together: Path, alone: Path, metrics: Metrics) -> None:
    assert_equal_runs(together / mode / row, alone / row, metrics)
    norms = [line["gradient_norm"] for line in metrics(alone / row) if line["kind"] == "train"]
    assert max(norms) > 0.25  # some of them were clipped


@pytest.mark.parametrize(("mode", "row"), pairs(RESUMED))
def test_two_processes_resume_the_run_of_one(
    mode: str, row: str, together: Path, alone: Path, metrics: Metrics
) -> None:
    assert_equal_runs(together / f"{mode} resumed" / row, alone / row, metrics)


def test_four_processes_resume_the_run_of_one(tmp_path: Path, text: str, alone: Path, metrics: Metrics) -> None:
    """Some parameters have fewer than four rows, so some shards are empty."""
    for row in RESUMED:
        rewind(alone / row, tmp_path / "shards" / row)
    train_together(4, tmp_path, text)
    for row in RESUMED:
        assert_equal_runs(tmp_path / "shards" / row, alone / row, metrics)


@pytest.mark.parametrize(("mode", "row"), [*(("shards", row) for row in RESUMED), ("words", RESUMED[0])])
def test_one_process_resumes_the_run_of_two(
    tmp_path: Path, mode: str, row: str, text: str, together: Path, alone: Path, metrics: Metrics
) -> None:
    run = rewind(together / mode / row, tmp_path / "run")
    assert_equal_runs(train_alone(text, row, run), alone / row, metrics)


def test_single_process_is_not_sharded() -> None:
    model: Any = torch.nn.Linear(3, 3)
    assert type(World().wrap_model(model, shard=True)) is ParallelModel


def test_single_process_reports_that_it_does_not_shard(tmp_path: Path, text: str) -> None:
    settings = (text, "training.updates=1", "training.shard=true")
    output = run_command("train", RECIPE, "--row", "blocks", "--out", tmp_path / "run", *settings).out
    assert output.count("training.shard has no effect with one process") == 1


def test_error_if_torch_cannot_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", None)
    monkeypatch.delitem(sys.modules, "reefknot.lab.training.sharding", raising=False)
    model: Any = torch.nn.Linear(3, 3)
    with pytest.raises(SettingsError, match=r"training.shard needs torch 2.6 .* leave training.shard out"):
        World(size=2).wrap_model(model, shard=True)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ('{ kind = "mixture", classifier = { kind = "plain", table = "words" } }', "the words of a MixtureOfSoftmaxes"),
        ('{ kind = "sampled", classifier = { kind = "plain", table = "words" } }', "the words of a SampledSoftmax"),
        ('{ kind = "softmax", classifier = { kind = "drill", table = "words" } }', "the classifier Drill computes"),
    ],
)
def test_other_ends_do_not_divide_their_vocabulary(text: str, output: str, error: str) -> None:
    recipe = load_recipe(str(RECIPE), [text, f"output={output}"])
    model = build_model(recipe.experiments["softmax"], 24)
    with pytest.raises(SettingsError, match=f"training.shard = vocabulary: {error}"):
        World(size=2).wrap_model(model, shard="vocabulary")
