"""Rows cut into pieces give the update of the whole batch: losses are sums, divided once."""

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
from reefknot.lab.training.display import Silent
from reefknot.lab.training.distributed import World
from reefknot.lab.training.state import Progress, TrainState
from reefknot.lab.training.update import TARGET_BUCKETS, MicroBatch, Update
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.outputs.adaptive import AdaptiveSoftmax
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import BandedTable, BandProjections, WordTable

Metrics = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture
def last_weights(tiny_recipe: Callable[..., Path]) -> Callable[..., dict[str, torch.Tensor]]:
    """Trains with 32 streams and without dropout; the weights at the end. The text leaves a ragged last window."""

    def train(out: Path, *overrides: str, classifier: str = "projected") -> dict[str, torch.Tensor]:
        recipe = str(tiny_recipe(tokens=400, classifier=classifier))
        fixed = ("training.batch=32", "encoder.dropout=0.0", "training.log_every=1", *overrides)
        loaded = load_recipe(recipe, fixed)
        result = experiments.train(loaded, loaded.row("tied"), out, world=World(), display=Silent())
        assert result is not None
        assert result["training"]["tokens"] == 2 * 32 * 11  # windows of 5, 5 and 1
        return load_file(max((out / "checkpoints").iterdir()) / "model.safetensors")

    return train


@pytest.mark.parametrize("divisor", ["tokens", "batch"])
@pytest.mark.parametrize("classifier", ["plain", "projected", "drill"])
def test_eight_pieces_are_one_batch(
    tmp_path: Path,
    last_weights: Callable[..., dict[str, torch.Tensor]],
    metrics: Metrics,
    divisor: str,
    classifier: str,
) -> None:
    whole = last_weights(tmp_path / "whole", f"training.divisor={divisor}", classifier=classifier)
    pieces = last_weights(
        tmp_path / "pieces", f"training.divisor={divisor}", "training.accumulate=8", classifier=classifier
    )
    assert whole.keys() == pieces.keys()
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=0, atol=1e-6)
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "pieces"), strict=True):
        assert one["step"] == other["step"]
        assert one["nll"] == pytest.approx(other["nll"], abs=1e-6)
        if one["kind"] == "train":
            assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-5)
            assert one["penalties"] == pytest.approx(other["penalties"], rel=1e-5)
            assert bool(one["penalties"]) == (classifier == "projected")


def test_pieces_must_be_equal(tmp_path: Path, last_weights: Callable[..., dict[str, torch.Tensor]]) -> None:
    with pytest.raises(SettingsError, match=r"training: accumulate = 5 does not divide batch = 32"):
        last_weights(tmp_path / "run", "training.accumulate=5")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("encoder", ["lstm", "transformer"])
def test_sentences_of_unlike_lengths_in_pieces(tiny_recipe: Callable[..., Path], encoder: str) -> None:
    """In float64, three pieces of a batch with padding; one of five rows."""
    sizes = {"lstm": "hidden_dim = 8", "transformer": "layers = 2, heads = 2, ffn_dim = 8"}
    overrides = [f"encoder={{kind = '{encoder}', {sizes[encoder]}}}", "training.divisor=tokens"]
    overrides += ["training.batching=sentences", "training.batch=6", "training.steps=5"]
    ids = np.random.default_rng(3).integers(0, 9, 60).astype(np.int32)
    batches = Sentences(ids, 6, 5, eos=0)
    found = []
    for accumulate in (1, 3):
        recipe = load_recipe(str(tiny_recipe()), [*overrides, f"training.accumulate={accumulate}"], "tied")
        settings = recipe.experiments["tied"].training
        torch.manual_seed(2)
        model = build_model(recipe.experiments["tied"], 9).double()
        parallel = World().parallel(model)
        optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": list(model.parameters())})
        update = Update(model, TrainState(parallel, optimiser, {}, Progress()), World(), settings)
        for index in range(batches.windows):
            update(*batches.window(index), 0.5, batches.count(index))
        report = update.tally.report()
        assert report.tokens == len(ids)
        found.append((dict(model.named_parameters()), report))
    assert any((batches.window(index)[1] == IGNORE).any() for index in range(batches.windows))
    (whole, one), (pieces, other) = found
    for name, weight in whole.items():
        torch.testing.assert_close(pieces[name], weight, rtol=0, atol=1e-12)
    assert other.sums == pytest.approx(one.sums, abs=1e-10)
    assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-10)


def test_targets_of_all_processes_are_the_divisor(tiny_recipe: Callable[..., Path]) -> None:
    """Twice as many targets in all as this process has: half the step."""
    recipe = load_recipe(str(tiny_recipe()), ["training.divisor=tokens", "training.clip=default"], "tied")
    settings = recipe.experiments["tied"].training
    x_BT = torch.tensor([[1, 2, 3], [4, 5, 6]])
    moved = []
    for count in (6, 12):
        torch.manual_seed(2)
        model = build_model(recipe.experiments["tied"], 9).double().eval()
        before = [each.detach().clone() for each in model.parameters()]
        optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": list(model.parameters())})
        state = TrainState(World().parallel(model), optimiser, model.initial_state(2), Progress())
        Update(model, state, World(), settings)(x_BT, x_BT, 1.0, count)
        moved.append([new.detach() - old for new, old in zip(model.parameters(), before, strict=True)])
    for whole, half in zip(*moved, strict=True):
        torch.testing.assert_close(half, whole / 2)
        assert whole.count_nonzero() > 0


def test_few_shapes_over_many_updates_in_four_pieces() -> None:
    """What an update is captured by: the shapes of all its pieces. Rare words come in clumps, as they do in text."""
    bands = BandedTable(30, 4, sizes=[10, 10], factor=2)
    output, draw = AdaptiveSoftmax(bands, BandProjections(bands, 4, head=False)), torch.Generator().manual_seed(0)
    keys = set()
    for _ in range(200):
        share_B1, pick_BT = 0.1 * torch.rand(32, 1, generator=draw), torch.rand(32, 512, generator=draw)
        y_BT = torch.where(pick_BT < 1.4 * share_B1, 10, torch.where(pick_BT > 1 - 0.6 * share_B1, 20, 0))
        keys.add(tuple(piece.shapes() for piece in MicroBatch.split(y_BT, y_BT, 4, output)))
    assert 1 < len(keys) <= 40


def test_few_shapes_where_lines_have_any_length() -> None:
    """Places without a target fill up those with one; no target is left out, and none comes twice."""
    output = Softmax(Plain(WordTable(30, 4)))
    keys, draw = set(), torch.Generator().manual_seed(0)
    for _ in range(200):
        lengths_B1 = torch.randint(5, 9, (64, 1), generator=draw)
        y_BT = torch.where(torch.arange(8) < lengths_B1, torch.randint(30, (64, 8), generator=draw), IGNORE)
        (piece,) = MicroBatch.split(y_BT, y_BT, 1, output)
        assert piece.places is not None
        there = (y_BT.reshape(-1) != IGNORE).nonzero()[:, 0]
        assert torch.equal(piece.places[: len(there)], there)
        assert len(piece.places) - len(there) < y_BT.numel() / TARGET_BUCKETS
        assert (y_BT.reshape(-1)[piece.places[len(there) :]] == IGNORE).all()
        assert piece.plan.count == len(there)
        keys.add(piece.shapes())
    assert 1 < len(keys) <= 4


@pytest.mark.parametrize("targets", [8, 0])
def test_windows_of_targets_alone_and_of_none(targets: int) -> None:
    y_BT = torch.where(torch.arange(8) < targets, torch.zeros(4, 8, dtype=torch.int64), IGNORE)
    (piece,) = MicroBatch.split(y_BT, y_BT, 1, Softmax(Plain(WordTable(30, 4))))
    reached = y_BT.numel() if piece.places is None else len(piece.places)
    assert reached == piece.plan.count == 4 * targets


def test_what_is_added_for_activations_knows_padding_however_little_it_is() -> None:
    """Sixteen places, one of them padding: all reach the output end, but one has no activation to speak of."""
    y_BT = torch.zeros(2, 8, dtype=torch.int64)
    y_BT[1, -1] = IGNORE
    (piece,) = MicroBatch.split(y_BT, y_BT, 1, Softmax(Plain(WordTable(30, 4))))
    assert piece.places is not None
    assert (len(piece.places), piece.plan.count) == (15, 15)
    wide_BT = torch.zeros(4, 8, dtype=torch.int64)
    wide_BT[3, -1] = IGNORE
    (piece,) = MicroBatch.split(wide_BT, wide_BT, 1, Softmax(Plain(WordTable(30, 4))))
    assert piece.places is not None
    assert (len(piece.places), piece.plan.count) == (32, 31)
