"""All input and output ends in training: exact resume, micro-batches, processes, metrics and commands.

The rows are those of `ends.toml`. Two of the four streams, which the second of two processes trains on, have only
frequent words.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import run_command
from safetensors.torch import load_file

from reefknot.errors import Stopped
from reefknot.lab import experiment as experiments
from reefknot.lab.recipes.recipe import Recipe, load_recipe
from reefknot.lab.tasks import build_model
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.text.streams import Streams
from reefknot.lab.training.display import SilentDisplay
from reefknot.lab.training.distributed import World
from reefknot.nn.outputs.adaptive import BandPlan

ENDS = Path(__file__).with_name("ends.toml")
DRAWS: dict[str, tuple[str, ...]] = {
    "AL": ("input.dropout=0.2",),
    "REAL": ("encoder.dropout=0.2",),
    "adaptive": ("input.dropout=0.2", "output.softmax_dropout=0.2", "output.tail_dropout=0.3"),
    "adaptive DRILL": ("input.word_dropout=0.2", "output.classifier.dropout=0.3"),
    "mixture DRILL": ("output.dropout=0.3", "output.classifier.dropout=0.3", "output.classifier.variational=false"),
    "sampled": ("output.samples=6",),
    "spelled": ("input.dropout=0.2",),
    "sub-words": ("input.word_dropout=0.2",),
}
"""Settings that use random numbers in training, by row.

Every process and every micro-batch draws different numbers, so updates equal those of the whole batch only without
these settings. The sampled row then samples the whole vocabulary.
"""
PARTS = {"AL": {"augmented"}, "REAL": {"augmented"}, "sub-words": {"activation", "temporal_activation"}}
STEPS, STOP = 12, 8
"""Number of updates of a row, and the update in the middle of the second epoch after which it is stopped."""
TWO_UPDATES = ("training.epochs=1", "training.steps=30", "training.log_every=1", "training.save_every=1")
"""A single update would not reveal a parameter without gradient in several processes."""

Metrics = Callable[[Path], list[dict[str, Any]]]
Outcome = Callable[[Path], dict[str, Any]]
every_row = pytest.mark.parametrize("row", DRAWS)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training text whose second half has only 6 of its 24 words. Valid and test have words that it lacks."""
    folder = tmp_path_factory.mktemp("text")
    generator = random.Random(0)
    words = [
        first + last for first in ("kola", "mine", "rutu", "sepo") for last in ("ba", "du", "fi", "le", "no", "ru")
    ]
    lines = {"train": [words] * 12 + [words[:6]] * 12, "valid": [[*words, "zebra"]] * 6, "test": [[*words, "yak"]] * 6}
    for name, choices in lines.items():
        written = [" ".join(generator.choices(choice, k=9)) + "\n" for choice in choices]
        (folder / f"{name}.txt").write_text("".join(written), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def load(text: Path) -> Callable[..., Recipe]:
    """A function that loads a row of the recipe with overrides."""

    def read(row: str, *overrides: str) -> Recipe:
        return load_recipe(str(ENDS), (f"corpus.name={text}", *overrides), row)

    return read


@pytest.fixture(scope="module")
def train(load: Callable[..., Recipe]) -> Callable[..., Path]:
    """A function that trains a row in a folder and returns the folder."""

    def run(row: str, out: Path, *overrides: str) -> Path:
        recipe = load(row, *overrides)
        experiments.train(recipe, recipe.row(row), out, world=World(), display=SilentDisplay())
        return out

    return run


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, train: Callable[..., Path]) -> Callable[[str], Path]:
    """A function that returns the finished run of a row with all `DRAWS`. Tests only read it."""
    root = tmp_path_factory.mktemp("unbroken")

    return lambda row: train(row, root / row, *DRAWS[row])


@pytest.fixture(scope="module")
def update_twice(train: Callable[..., Path]) -> Callable[..., Path]:
    """A function that makes two updates of a row without `DRAWS`, in float64, so that rounding does not matter."""

    def run(row: str, out: Path, *overrides: str) -> Path:
        torch.set_default_dtype(torch.float64)
        try:
            return train(row, out, *TWO_UPDATES, *overrides)
        finally:
            torch.set_default_dtype(torch.float32)

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, update_twice: Callable[..., Path]) -> Callable[[str], Path]:
    """A function that makes these updates in one micro-batch and one process."""
    root = tmp_path_factory.mktemp("whole")
    return lambda row: update_twice(row, root / row)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The same updates of every row by two processes."""
    out = tmp_path_factory.mktemp("two")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).with_name("train_rows.py")
    command = [*torchrun, str(script), str(ENDS), str(out), f"corpus.name={text}", *TWO_UPDATES]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert completed.returncode == 0, completed.stderr
    return out


def assert_equal_updates(run: Path, expected: Path, metrics: Metrics) -> None:
    """Check that two runs have equal weights and metrics after each of two updates."""
    for step in ("step_00000001", "step_00000002"):
        weights, expected_weights = (
            load_file(folder / "checkpoints" / step / "model.safetensors") for folder in (run, expected)
        )
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)
    *updates, valid = zip(metrics(run), metrics(expected), strict=True)
    for line, expected_line in updates:
        assert line["step"] == expected_line["step"]
        for name in ("nll", "gradient_norm", "parts", "penalties"):
            assert line[name] == pytest.approx(expected_line[name], rel=1e-10), name
    assert valid[0]["nll"] == pytest.approx(valid[1]["nll"], abs=1e-10)


@every_row
def test_run_stopped_in_mid_epoch_resumes_bit_for_bit(
    tmp_path: Path,
    row: str,
    train: Callable[..., Path],
    unbroken: Callable[[str], Path],
    outcome: Outcome,
    signal_in_step: Callable[[int], None],
) -> None:
    expected = outcome(unbroken(row))
    out = tmp_path / "stopped"
    signal_in_step(STOP)
    with pytest.raises(Stopped, match=f"step {STOP} "):
        train(row, out, *DRAWS[row])
    train(row, out, *DRAWS[row])
    resumed = outcome(out)
    last = f"step_{STEPS:08d}"
    assert resumed["weights"][last] == expected["weights"][last]
    assert {**resumed, "weights": None} == {**expected, "weights": None}


@every_row
def test_two_micro_batches_equal_one_batch(
    tmp_path: Path, row: str, update_twice: Callable[..., Path], whole: Callable[[str], Path], metrics: Metrics
) -> None:
    micro_batches = update_twice(row, tmp_path / "micro_batches", "training.accumulate=2")
    assert_equal_updates(micro_batches, whole(row), metrics)


@every_row
def test_two_processes_equal_one_process(
    row: str, two_processes: Path, whole: Callable[[str], Path], metrics: Metrics
) -> None:
    run = two_processes / load_recipe(str(ENDS)).row(row).slug
    assert json.loads((run / "result.json").read_text(encoding="utf-8"))["training"]["processes"] == 2
    assert_equal_updates(run, whole(row), metrics)


@every_row
def test_every_parameter_gets_a_gradient_from_frequent_words(row: str, load: Callable[..., Recipe]) -> None:
    experiment = load(row).experiments[row]
    dataset = open_dataset(experiment.corpus, experiment.vocabulary)
    model = build_model(experiment, dataset.vocabulary)
    split = dataset.splits["train"]
    inputs_BT, targets_BT = Streams(split.ids, 4, 10, split.inputs).shard(1, 2).window(2)
    plan = model.output.prepare(targets_BT)
    if row.startswith("adaptive"):
        assert isinstance(plan, BandPlan)
        assert [len(rows) for rows, _ in plan.tails] == [0, 0]
    model.loss(inputs_BT, targets_BT, plan=plan).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@every_row
def test_metrics_name_the_parts_of_the_loss(row: str, unbroken: Callable[[str], Path], metrics: Metrics) -> None:
    lines = [line for line in metrics(unbroken(row)) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(2, STEPS + 1, 2))
    for line in lines:
        assert line["parts"].keys() == PARTS.get(row, set())
        assert all(math.isfinite(value) and value > 0 for value in line["parts"].values())


@every_row
def test_commands_work_on_finished_runs(row: str, unbroken: Callable[[str], Path]) -> None:
    run = unbroken(row)
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    assert run_command("evaluate", run, "--json").json()["nll"] == pytest.approx(result["test"]["nll"], abs=1e-6)
    assert len(run_command("generate", run, "--prompt", "kolaba", "--length", 9, "--json").json()["tokens"]) == 9
    top_word, greedy = (
        run_command("generate", run, "--length", 9, "--json", *options).json()["tokens"]
        for options in (("--top-k", 1), ("--temperature", 0))
    )
    assert top_word == greedy
    (scored,) = run_command("score", run, "kolaba yak minedu", "--json").json()
    assert math.isfinite(scored["log_prob"])
    assert scored["words"][-1]["word"] == "<eos>"
    near = run_command("vectors", "neighbors", run, "kolaba", "kolale", "-k", 3, "--json").json()
    assert near.keys() in ({"input", "output"}, {"tied"})
    assert all(len(neighbors) == 3 for words in near.values() for neighbors in words.values())


def test_unknown_words_keep_their_spelling_as_inputs(unbroken: Callable[[str], Path]) -> None:
    run = unbroken("spelled")
    spelled = json.loads((run / "vocabulary.json").read_text(encoding="utf-8"))["spelled"]
    first, second = run_command("score", run, f"{spelled[0]} kolaba", f"{spelled[1]} kolaba", "--json").json()
    assert first["words"][0]["unknown"]
    assert first["words"][0]["log_prob"] == second["words"][0]["log_prob"]  # as targets both are <unk>
    assert first["words"][1]["log_prob"] != second["words"][1]["log_prob"]


def test_one_report_shows_all_runs(tmp_path: Path, unbroken: Callable[[str], Path]) -> None:
    page = tmp_path / "page.html"
    summary = run_command("report", *map(unbroken, DRAWS), "-o", page, "--json").json()
    assert summary["runs"] == len(DRAWS)
    html = page.read_text(encoding="utf-8")
    assert all(row in html for row in DRAWS)


def test_all_rows_are_tested() -> None:
    assert [row.name for row in load_recipe(str(ENDS)).rows] == list(DRAWS)
