"""Gradient accumulation: micro-batches give the update of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from reefknot.errors import SettingsError
from reefknot.kernels.scores import IGNORE
from reefknot.lab import experiment as experiments
from reefknot.lab.config.parts import OPTIMISERS
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.tasks import build_model
from reefknot.lab.text.sentence_batches import Sentences
from reefknot.lab.training.display import SilentDisplay
from reefknot.lab.training.distributed import World
from reefknot.lab.training.state import Progress, TrainState
from reefknot.lab.training.update import TARGET_BUCKETS, MicroBatch, Updater
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

Metrics = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def last_weights(tiny_recipe: Callable[..., Path]) -> Callable[..., dict[str, torch.Tensor]]:
    """A function that trains with 32 streams and without dropout and returns the last weights.

    The last window of an epoch is shorter than the others.
    """

    def train(out: Path, *overrides: str, classifier: str = "projected") -> dict[str, torch.Tensor]:
        recipe = str(tiny_recipe(tokens=400, classifier=classifier))
        fixed = ("training.batch=32", "encoder.dropout=0.0", "training.log_every=1", *overrides)
        loaded = load_recipe(recipe, fixed)
        result = experiments.train(loaded, loaded.row("tied"), out, world=World(), display=SilentDisplay())
        assert result is not None
        assert result.training.tokens == 2 * 32 * 11  # windows of 5, 5 and 1
        return load_file(max((out / "checkpoints").iterdir()) / "model.safetensors")

    return train


@pytest.mark.parametrize("divisor", ["tokens", "batch"])
@pytest.mark.parametrize("classifier", ["plain", "projected", "drill"])
def test_eight_micro_batches_equal_one_batch(
    tmp_path: Path,
    last_weights: Callable[..., dict[str, torch.Tensor]],
    metrics: Metrics,
    divisor: str,
    classifier: str,
) -> None:
    whole = last_weights(tmp_path / "whole", f"training.divisor={divisor}", classifier=classifier)
    micro_batches = last_weights(
        tmp_path / "micro_batches", f"training.divisor={divisor}", "training.accumulate=8", classifier=classifier
    )
    assert whole.keys() == micro_batches.keys()
    for name in whole:
        torch.testing.assert_close(micro_batches[name], whole[name], rtol=0, atol=1e-6)
    for expected, line in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "micro_batches"), strict=True):
        assert line["step"] == expected["step"]
        assert line["nll"] == pytest.approx(expected["nll"], abs=1e-6)
        if line["kind"] == "train":
            assert line["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-5)
            assert line["penalties"] == pytest.approx(expected["penalties"], rel=1e-5)
            assert bool(line["penalties"]) == (classifier == "projected")


def test_accumulate_must_divide_the_streams(
    tmp_path: Path, last_weights: Callable[..., dict[str, torch.Tensor]]
) -> None:
    with pytest.raises(SettingsError, match=r"training: accumulate = 5 does not divide batch = 32"):
        last_weights(tmp_path / "run", "training.accumulate=5")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("encoder", ["lstm", "transformer"])
def test_micro_batches_of_sentences_of_different_lengths(tiny_recipe: Callable[..., Path], encoder: str) -> None:
    """Three micro-batches of batches with padding, in float64. One batch has only five rows."""
    sizes = {"lstm": "hidden_dim = 8", "transformer": "layers = 2, heads = 2, ffn_dim = 8"}
    overrides = [f"encoder={{kind = '{encoder}', {sizes[encoder]}}}", "training.divisor=tokens"]
    overrides += ["training.batching=sentences", "training.batch=6", "training.steps=5"]
    ids = np.random.default_rng(3).integers(0, 9, 60).astype(np.int32)
    batches = Sentences(ids, 6, 5, eos=0)
    outcomes = []
    for accumulate in (1, 3):
        recipe = load_recipe(str(tiny_recipe()), [*overrides, f"training.accumulate={accumulate}"], "tied")
        settings = recipe.experiments["tied"].training
        torch.manual_seed(2)
        model = build_model(recipe.experiments["tied"], 9).double()
        parallel = World().wrap_model(model)
        optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": list(model.parameters())})
        state = TrainState(parallel, optimiser, {}, Progress())
        updater = Updater(model, state, World(), settings)
        for index in range(batches.num_windows):
            updater(*batches.window(index), 0.5, batches.count_targets(index))
        report = updater.stats.report()
        assert report.tokens == len(ids)
        outcomes.append((dict(model.named_parameters()), report))
    assert any((batches.window(index)[1] == IGNORE).any() for index in range(batches.num_windows))
    (whole, expected), (micro_batches, report) = outcomes
    for name, weight in whole.items():
        torch.testing.assert_close(micro_batches[name], weight, rtol=0, atol=1e-12)
    assert report.sums == pytest.approx(expected.sums, abs=1e-10)
    assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-10)


def test_loss_is_divided_by_the_targets_of_all_processes(tiny_recipe: Callable[..., Path]) -> None:
    """If all processes together have twice as many targets as this one, its step is half as long."""
    recipe = load_recipe(str(tiny_recipe()), ["training.divisor=tokens", "training.clip=default"], "tied")
    settings = recipe.experiments["tied"].training
    inputs_BT = torch.tensor([[1, 2, 3], [4, 5, 6]])
    moved = []
    for count in (6, 12):
        torch.manual_seed(2)
        model = build_model(recipe.experiments["tied"], 9).double().eval()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": list(model.parameters())})
        state = TrainState(World().wrap_model(model), optimiser, model.initial_state(2), Progress())
        Updater(model, state, World(), settings)(inputs_BT, inputs_BT, 1.0, count)
        moved.append([new.detach() - old for new, old in zip(model.parameters(), before, strict=True)])
    for whole, half in zip(*moved, strict=True):
        torch.testing.assert_close(half, whole / 2)
        assert whole.count_nonzero() > 0


def test_few_shapes_over_many_updates_in_four_micro_batches() -> None:
    """Graphs are captured by the shapes of all micro-batches. Rare words come in clumps, as they do in text."""
    bands = BandedTable(30, 4, sizes=[10, 10], factor=2)
    output, draw = AdaptiveSoftmax(bands, BandProjections(bands, 4, head=False)), torch.Generator().manual_seed(0)
    keys = set()
    for _ in range(200):
        share_B1, pick_BT = 0.1 * torch.rand(32, 1, generator=draw), torch.rand(32, 512, generator=draw)
        targets_BT = torch.where(pick_BT < 1.4 * share_B1, 10, torch.where(pick_BT > 1 - 0.6 * share_B1, 20, 0))
        keys.add(tuple(batch.shape_key() for batch in MicroBatch.split(targets_BT, targets_BT, 4, output)))
    assert 1 < len(keys) <= 40


def test_few_shapes_for_lines_of_any_length() -> None:
    """Positions without a target pad those with one. Every target appears exactly once."""
    output = Softmax(Plain(WordTable(30, 4)))
    keys, draw = set(), torch.Generator().manual_seed(0)
    for _ in range(200):
        lengths_B1 = torch.randint(5, 9, (64, 1), generator=draw)
        targets_BT = torch.where(torch.arange(8) < lengths_B1, torch.randint(30, (64, 8), generator=draw), IGNORE)
        (batch,) = MicroBatch.split(targets_BT, targets_BT, 1, output)
        assert batch.positions is not None
        targets = (targets_BT.reshape(-1) != IGNORE).nonzero()[:, 0]
        assert torch.equal(batch.positions[: len(targets)], targets)
        assert len(batch.positions) - len(targets) < targets_BT.numel() / TARGET_BUCKETS
        assert (targets_BT.reshape(-1)[batch.positions[len(targets) :]] == IGNORE).all()
        assert batch.plan.count == len(targets)
        keys.add(batch.shape_key())
    assert 1 < len(keys) <= 4


@pytest.mark.parametrize("targets", [8, 0])
def test_windows_with_only_targets_and_without_targets(targets: int) -> None:
    targets_BT = torch.where(torch.arange(8) < targets, torch.zeros(4, 8, dtype=torch.int64), IGNORE)
    (batch,) = MicroBatch.split(targets_BT, targets_BT, 1, Softmax(Plain(WordTable(30, 4))))
    reached = targets_BT.numel() if batch.positions is None else len(batch.positions)
    assert reached == batch.plan.count == 4 * targets


def test_plan_counts_targets_and_not_padding() -> None:
    """With little padding, all positions reach the output end, but the plan counts only the targets."""
    targets_BT = torch.zeros(2, 8, dtype=torch.int64)
    targets_BT[1, -1] = IGNORE
    (batch,) = MicroBatch.split(targets_BT, targets_BT, 1, Softmax(Plain(WordTable(30, 4))))
    assert batch.positions is not None
    assert (len(batch.positions), batch.plan.count) == (15, 15)
    wide_BT = torch.zeros(4, 8, dtype=torch.int64)
    wide_BT[3, -1] = IGNORE
    (batch,) = MicroBatch.split(wide_BT, wide_BT, 1, Softmax(Plain(WordTable(30, 4))))
    assert batch.positions is not None
    assert (len(batch.positions), batch.plan.count) == (32, 31)
