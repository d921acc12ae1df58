"""One update against the formulas of the papers, written out in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reefknot.models.initialisation import InitialisationSettings, initialise
from reefknot.models.language_model import LanguageModel
from reefknot.recipe import build_model, load_recipe
from reefknot.runs.folder import RunFolder
from reefknot.text.streams import Streams
from reefknot.training.loop import Trainer

VOCABULARY = 11
BATCH, STEPS = 4, 6
IDS = np.random.default_rng(7).integers(0, VOCABULARY, BATCH * (STEPS + 1)).astype(np.int32)

Update = Callable[..., tuple[LanguageModel, LanguageModel, list[dict[str, Any]]]]


@pytest.fixture
def update(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> Update:
    """Makes exactly one update: an epoch of one window. Returns the model before and after it, and the metrics."""

    def run(*overrides: str, uniform: float = 0.5) -> tuple[LanguageModel, LanguageModel, list[dict[str, Any]]]:
        fixed = ("encoder.dropout=0.0", f"init.uniform={uniform}", "training.epochs=1", f"training.steps={STEPS}")
        recipe = load_recipe(str(tiny_recipe()), (*fixed, "training.log_every=1", *overrides))
        experiment = recipe.experiments["tied"]
        torch.manual_seed(1)
        before = build_model(experiment, VOCABULARY)
        after = copy.deepcopy(before)
        with RunFolder.open_for_training(tmp_path / "run", {}) as folder:
            Trainer(after, Streams(IDS, BATCH, STEPS), lambda: 1.0, experiment.training, folder).train()
            return before, after, folder.metrics.read()

    return run


def unrolled(layer: Any, x_BTD: Tensor) -> Tensor:
    """An LSTM layer by its equations, with one bias per gate."""
    h_BD = c_BD = torch.zeros_like(x_BTD[:, 0])
    states = []
    for x_BD in x_BTD.unbind(1):
        gates = x_BD @ layer.weight_ih_l0.T + h_BD @ layer.weight_hh_l0.T + layer.bias_ih_l0
        i, f, g, o = gates.chunk(4, dim=-1)
        c_BD = f.sigmoid() * c_BD + i.sigmoid() * g.tanh()
        h_BD = o.sigmoid() * c_BD.tanh()
        states.append(h_BD)
    return torch.stack(states, dim=1)


def summed_loss(model: Any) -> Tensor:
    """sum over streams and steps of -log p(next word), spelled out."""
    x_BT, y_BT = Streams(IDS, BATCH, STEPS).window(0)
    h_BTD = model.input.table.weight[x_BT]
    for layer in model.encoder.layers:
        h_BTD = unrolled(layer, h_BTD)
    labels = model.output.labels
    context_BTD = h_BTD @ labels.projection.weight.T + labels.projection.bias
    scores_BTV = context_BTD @ labels.table.weight.T + labels.bias
    return -torch.log_softmax(scores_BTV, -1).gather(-1, y_BT[..., None]).sum()


@pytest.mark.parametrize(("divisor", "by"), [("batch", BATCH), ("tokens", BATCH * STEPS)])
def test_the_penalised_sum_is_divided_once(update: Update, divisor: str, by: int) -> None:
    rate, weight = 0.25, 0.7
    before, after, lines = update(
        f"training.divisor={divisor}",
        "training.clip=1000.0",
        f"training.optimiser.learning_rate={rate}",
        f"output.labels.penalty={weight}",
    )
    exact: Any = copy.deepcopy(before).double()
    projection = exact.output.labels.projection.weight
    penalty = 0.5 * weight * projection.square().sum()
    loss = summed_loss(exact)
    ((loss + penalty) / by).backward()
    moved = dict(after.named_parameters())
    for name, parameter in exact.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(moved[name].double(), parameter - rate * parameter.grad, rtol=0, atol=1e-6)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in exact.parameters() if p.grad is not None))
    assert lines[0]["nll"] == pytest.approx(loss.item() / (BATCH * STEPS), rel=1e-6)
    assert lines[0]["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert lines[0]["penalties"] == pytest.approx({"projection": penalty.item()}, rel=1e-6)


def test_clipping_bounds_the_whole_gradient(update: Update) -> None:
    before, after, lines = update("training.clip=0.125", "training.optimiser.learning_rate=1.0")
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    moved = math.sqrt(sum((a - b).square().sum().item() for b, a in pairs))
    assert lines[0]["gradient_norm"] > 0.125  # as it was before clipping
    assert moved == pytest.approx(0.125, rel=1e-4)


def test_a_small_gradient_is_not_stretched(update: Update) -> None:
    before, after, lines = update("training.clip=1000.0", "training.optimiser.learning_rate=1.0")
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    moved = math.sqrt(sum((a - b).square().sum().item() for b, a in pairs))
    assert moved == pytest.approx(lines[0]["gradient_norm"], rel=1e-4)


def test_uniform_draws_every_parameter_from_its_range(update: Update) -> None:
    before, _, _ = update(uniform=0.3)
    for name, parameter in before.named_parameters():
        assert parameter.abs().max().item() <= 0.3, name
        assert parameter.std().item() > 0.05, name  # biases too: nothing stayed at zero
    values = torch.cat([parameter.flatten() for parameter in before.parameters()])
    assert values.min().item() < -0.29
    assert values.max().item() > 0.29


def test_a_tied_table_is_drawn_once(update: Update) -> None:
    model, _, _ = update()
    assert model.tied
    torch.manual_seed(5)
    initialise(model, InitialisationSettings(uniform=0.2))
    torch.manual_seed(5)
    drawn = [torch.empty_like(parameter).uniform_(-0.2, 0.2) for parameter in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), drawn, strict=True))
    assert sum(parameter.shape == (VOCABULARY, 8) for parameter in model.parameters()) == 1
