"""One update agrees with the formulas of the papers, written out in float64."""

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

from recorded_graph import RecordedGraph
from reefknot.kernels.choice import using
from reefknot.lab.config.parts import OPTIMISERS
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import build_model
from reefknot.lab.tasks.initialisation import InitialisationSettings, initialise
from reefknot.lab.text.batches import build_batches
from reefknot.lab.text.streams import Streams
from reefknot.lab.training.averaging import WeightAverages
from reefknot.lab.training.distributed import World
from reefknot.lab.training.loop import Trainer
from reefknot.lab.training.optimisers import SGD
from reefknot.lab.training.state import Progress, TrainState
from reefknot.lab.training.update import CapturedUpdates, Updater
from reefknot.nn.classifiers.drill import Drill
from reefknot.nn.models.language_model import LanguageModel

VOCABULARY = 11
BATCH, STEPS = 4, 6
IDS = np.random.default_rng(7).integers(0, VOCABULARY, BATCH * (STEPS + 1)).astype(np.int32)

Update = Callable[..., tuple[LanguageModel, LanguageModel, list[dict[str, Any]]]]


@pytest.fixture
def update(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> Update:
    """A function that makes exactly one update and returns the model before and after it, and the metrics."""

    def run(*overrides: str, uniform: float = 0.5) -> tuple[LanguageModel, LanguageModel, list[dict[str, Any]]]:
        fixed = ("encoder.dropout=0.0", f"init.uniform={uniform}", "training.epochs=1", f"training.steps={STEPS}")
        recipe = load_recipe(str(tiny_recipe()), (*fixed, "training.log_every=1", *overrides), "tied")
        experiment = recipe.experiments["tied"]
        torch.manual_seed(1)
        before = build_model(experiment, VOCABULARY)
        after = copy.deepcopy(before)
        with RunFolder.open_for_training(tmp_path / "run", {}) as folder:
            Trainer(after, Streams(IDS, BATCH, STEPS), lambda: 1.0, experiment.training, folder).train()
            return before, after, folder.metrics.read()

    return run


def lstm_by_equations(layer: Any, inputs_BTD: Tensor) -> Tensor:
    """Compute an LSTM layer by its equations, with one bias per gate."""
    hidden_BD = cell_BD = torch.zeros_like(inputs_BTD[:, 0])
    states = []
    for inputs_BD in inputs_BTD.unbind(1):
        gates = inputs_BD @ layer.weight_ih_l0.T + hidden_BD @ layer.weight_hh_l0.T + layer.bias_ih_l0
        input_gate, forget_gate, candidate, output_gate = gates.chunk(4, dim=-1)
        cell_BD = forget_gate.sigmoid() * cell_BD + input_gate.sigmoid() * candidate.tanh()
        hidden_BD = output_gate.sigmoid() * cell_BD.tanh()
        states.append(hidden_BD)
    return torch.stack(states, dim=1)


def hidden_states(model: Any, inputs_BT: Tensor) -> Tensor:
    hidden_BTD: Tensor = model.input.table.weight[inputs_BT]
    for layer in model.encoder.layers:
        hidden_BTD = lstm_by_equations(layer, hidden_BTD)
    return hidden_BTD


def summed_loss(model: Any) -> Tensor:
    """Compute the sum over streams and steps of -log p(next word)."""
    inputs_BT, targets_BT = Streams(IDS, BATCH, STEPS).window(0)
    hidden_BTD = hidden_states(model, inputs_BT)
    classifier = model.output.classifier
    context_BTD = hidden_BTD @ classifier.projection.weight.T + classifier.projection.bias
    scores_BTV = context_BTD @ classifier.table.weight.T + classifier.bias
    return -torch.log_softmax(scores_BTV, -1).gather(-1, targets_BT[..., None]).sum()


def assert_moved(before: LanguageModel, after: LanguageModel, rate: float) -> None:
    """Check that `after` is one step of plain gradient descent from `before`."""
    moved = dict(after.named_parameters())
    for name, parameter in before.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(moved[name].double(), parameter - rate * parameter.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("divisor", "divisor_count"), [("batch", BATCH), ("tokens", BATCH * STEPS)])
def test_penalised_loss_is_divided_once(update: Update, divisor: str, divisor_count: int) -> None:
    rate = 0.25
    penalty_weight = 0.7
    before, after, lines = update(
        f"training.divisor={divisor}",
        "training.clip=1000.0",
        f"training.optimiser.learning_rate={rate}",
        f"output.classifier.penalty={penalty_weight}",
    )
    exact: Any = copy.deepcopy(before).double()
    projection = exact.output.classifier.projection.weight
    penalty = 0.5 * penalty_weight * projection.square().sum()
    loss = summed_loss(exact)
    ((loss + penalty) / divisor_count).backward()
    assert_moved(before=exact, after=after, rate=rate)
    gradients = [parameter.grad for parameter in exact.parameters() if parameter.grad is not None]
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    assert lines[0]["nll"] == pytest.approx(loss.item() / (BATCH * STEPS), rel=1e-6)
    assert lines[0]["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert lines[0]["penalties"] == pytest.approx({"projection": penalty.item()}, rel=1e-6)


@pytest.mark.parametrize(("divisor", "divisor_count"), [("batch", BATCH), ("tokens", BATCH * STEPS)])
def test_every_part_of_the_loss_has_its_weight(update: Update, divisor: str, divisor_count: int) -> None:
    """Inan's loss, AR and TAR are logged without weights. The objective weights them and divides them like the nll."""
    rate, tau, alpha, ar, tar = 0.25, 3.0, 2.0, 1.5, 0.7
    before, after, lines = update(
        f"training.divisor={divisor}",
        "training.clip=1000.0",
        f"training.optimiser.learning_rate={rate}",
        "output={kind='augmented', table='words', classifier={kind='plain', table='words'}}",
        f"output.tau={tau}",
        f"output.alpha={alpha}",
        f"regularisation.activation={ar}",
        f"regularisation.temporal_activation={tar}",
    )
    exact: Any = copy.deepcopy(before).double()
    inputs_BT, targets_BT = Streams(IDS, BATCH, STEPS).window(0)
    hidden_BTD = hidden_states(exact, inputs_BT)
    table_VD, bias_V = exact.input.table.weight, exact.output.classifier.bias
    plain_BTV = hidden_BTD @ table_VD.T
    nll = -torch.log_softmax(plain_BTV + bias_V, -1).gather(-1, targets_BT[..., None]).sum()
    soft_BTV = torch.softmax(table_VD[targets_BT] @ table_VD.T / tau, -1)
    kl = (soft_BTV * (soft_BTV.log() - torch.log_softmax(plain_BTV / tau, -1))).sum()
    # Without dropout, the outputs before and after dropout are equal.
    activation = hidden_BTD.square().mean()
    temporal_activation = (hidden_BTD[:, 1:] - hidden_BTD[:, :-1]).square().mean()
    tokens = BATCH * STEPS
    objective = nll + alpha * kl + tokens * (ar * activation + tar * temporal_activation)
    (objective / divisor_count).backward()
    assert_moved(before=exact, after=after, rate=rate)
    assert lines[0]["nll"] == pytest.approx(nll.item() / tokens, rel=1e-6)
    parts = {"augmented": kl / tokens, "activation": activation, "temporal_activation": temporal_activation}
    # In float32 a divergence is the small difference of large numbers.
    assert lines[0]["parts"] == pytest.approx({name: value.item() for name, value in parts.items()}, abs=3e-7)


def test_learning_rate_depends_on_epoch_and_window(
    tmp_path: Path, tiny_recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("training.epochs=3", "training.random_steps={probability = 0.5, deviation = 2.0, least = 2}")
    experiment = load_recipe(str(tiny_recipe()), overrides, "tied").experiments["tied"]
    settings = experiment.training
    ids = np.random.default_rng(7).integers(0, VOCABULARY, BATCH * 30).astype(np.int32)
    rates: list[float] = []
    step = SGD.step

    def record_rate(self: SGD) -> None:
        rates.append(self.param_groups[0]["lr"])
        step(self)

    monkeypatch.setattr(SGD, "step", record_rate)
    with RunFolder.open_for_training(tmp_path / "run", {}) as folder:
        model = build_model(experiment, VOCABULARY)
        Trainer(model, build_batches(settings, ids), lambda: 1.0, settings, folder).train()
    batches = build_batches(settings, ids)
    factors = []
    for epoch in (1, 2, 3):
        batches.set_epoch(epoch)
        factors.append([batches.learning_rate_factor(index) for index in range(batches.num_windows)])
    first, second, third = factors
    assert rates == [*first, *(0.5 * factor for factor in second), *(0.25 * factor for factor in third)]
    assert first != second


def test_label_encoder_runs_once_for_all_micro_batches(update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    encode = Drill.encode

    def count_and_encode(self: Drill, ids: Tensor | None = None) -> Tensor:
        nonlocal calls
        calls += 1
        return encode(self, ids)

    monkeypatch.setattr(Drill, "encode", count_and_encode)
    drill = "output={kind='softmax', classifier={kind='drill', table='words', depth=2, dropout=0.5}}"
    before, after, _ = update(drill, f"training.accumulate={BATCH}")
    assert calls == 1
    moved = dict(after.named_parameters())
    assert not any(torch.equal(parameter, moved[name]) for name, parameter in before.named_parameters())


def test_clipping_bounds_the_whole_gradient(update: Update) -> None:
    before, after, lines = update("training.clip=0.125", "training.optimiser.learning_rate=1.0")
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    moved = math.sqrt(sum((new - old).square().sum().item() for old, new in pairs))
    assert lines[0]["gradient_norm"] > 0.125  # as it was before clipping
    assert moved == pytest.approx(0.125, rel=1e-4)


def test_small_gradient_is_not_scaled_up(update: Update) -> None:
    before, after, lines = update("training.clip=1000.0", "training.optimiser.learning_rate=1.0")
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    moved = math.sqrt(sum((new - old).square().sum().item() for old, new in pairs))
    assert moved == pytest.approx(lines[0]["gradient_norm"], rel=1e-4)


def test_uniform_draws_every_parameter_from_its_range(update: Update) -> None:
    before, _, _ = update(uniform=0.3)
    for name, parameter in before.named_parameters():
        assert parameter.abs().max().item() <= 0.3, name
        assert parameter.std().item() > 0.05, name  # biases are drawn too
    values = torch.cat([parameter.flatten() for parameter in before.parameters()])
    assert values.min().item() < -0.29
    assert values.max().item() > 0.29


def test_tied_table_is_initialised_once(update: Update) -> None:
    model, _, _ = update()
    assert model.tied
    torch.manual_seed(5)
    initialise(model, InitialisationSettings(uniform=0.2))
    torch.manual_seed(5)
    drawn = [torch.empty_like(parameter).uniform_(-0.2, 0.2) for parameter in model.parameters()]
    assert all(
        torch.equal(parameter_now, expected) for parameter_now, expected in zip(model.parameters(), drawn, strict=True)
    )
    assert sum(parameter.shape == (VOCABULARY, 8) for parameter in model.parameters()) == 1


TRANSFORMER = "encoder={kind = 'transformer', layers = 1, heads = 2, ffn_dim = 8, dropout = 0.3}"
ADAPTIVE = (
    "tables.bands={kind = 'banded', dim = 8, sizes = [4, 4], factor = 2}",
    "projections.out={kind = 'bands', table = 'bands', dim = 8, head = false}",
    "output={kind = 'adaptive', projections = 'out', classifier = {kind = 'plain', table = 'bands', bias = false}}",
)


@pytest.mark.parametrize(
    ("overrides", "graphs"),
    [
        (("training.random_steps={probability = 0.5, deviation = 2.0, least = 2}",), 3),
        (("training.accumulate=2", "training.averaging={start = 'at_once'}"), 1),
        ((TRANSFORMER, "training.batching=sentences", "training.divisor=tokens"), 2),
        (("output={kind='augmented', table='words', gamma = 0.5, classifier={kind='plain', table='words'}}",), 1),
        (ADAPTIVE, 1),
    ],
    ids=["random lengths", "micro-batches", "sentences", "augmented", "adaptive"],
)
def test_replayed_updates_equal_eager_updates(
    tiny_recipe: Callable[..., Path], recorded: list[RecordedGraph], overrides: tuple[str, ...], graphs: int
) -> None:
    """Bit for bit, with dropout and a hidden state that is carried over windows of several lengths."""
    rate = "training.optimiser.learning_rate=0.5"
    experiment = load_recipe(str(tiny_recipe()), ("encoder.dropout=0.3", rate, *overrides), "tied").experiments["tied"]
    settings, world = experiment.training, World()
    ids = np.random.default_rng(7).integers(0, VOCABULARY, BATCH * 60).astype(np.int32)
    batches = build_batches(settings, ids, eos=0)
    torch.manual_seed(1)
    built = build_model(experiment, VOCABULARY)
    outcomes = []
    for replay in (False, True):
        model = copy.deepcopy(built).train()
        parallel = world.wrap_model(model)
        optimiser = OPTIMISERS.build(settings.optimiser, {"parameters": parallel.trainable_parameters})
        hidden = model.initial_state(BATCH) if settings.batching == "streams" else {}
        averages = WeightAverages.create_at_start(parallel.parameters, settings.averaging)
        state = TrainState(parallel, optimiser, hidden, Progress(), averages, parallel.build_scaler(False))
        updater = Updater(model, state, world, settings)
        if replay:
            # As on a GPU, where the host does not wait for an update.
            updater.synchronous = False
            updater._captured = CapturedUpdates(updater._apply_update, world.device)
        torch.manual_seed(2)
        for epoch in (1, 2):
            batches.set_epoch(epoch)
            for index in range(batches.num_windows):
                with using("reference"):  # the other kernels read a value on the host
                    updater(*batches.window(index), 0.5, batches.count_targets(index))
        outcomes.append((updater.stats.report(), model.state_dict(), state.hidden))
    assert len(recorded) >= graphs
    eager, replayed = outcomes
    eager_report, eager_weights, eager_hidden = eager
    replayed_report, replayed_weights, replayed_hidden = replayed
    assert eager_report == replayed_report
    assert eager_report.tokens > 0
    assert all(torch.equal(eager_weights[name], replayed_weights[name]) for name in eager_weights)
    assert all(torch.equal(eager_hidden[name], replayed_hidden[name]) for name in eager_hidden)
