"""Averages of iterates: they agree with torch's ASGD, are used for validation, and survive a stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reefknot.errors import Stopped
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import build_model
from reefknot.lab.text.streams import Streams
from reefknot.lab.training.averaging import WeightAverages
from reefknot.lab.training.loop import Trainer
from reefknot.lab.training.optimisers import SGD
from reefknot.lab.training.state import named_weights

RATE, DECAY = 0.3, 1.2e-3
RANDOM = "training.random_steps={probability = 0.5, deviation = 2.0, least = 2}"
NONMONOTONE = "training.averaging={start = 'nonmonotone', interval = 1}"
AT_ONCE = "training.averaging={start = 'at_once'}"
APPLIED, SKIPPED = torch.tensor(1.0), torch.tensor(0.0)

Outcome = Callable[[Path], dict[str, Any]]


@pytest.fixture
def _float64() -> Any:
    """Use float64, because torch's ASGD computes its weights in the default type and not in that of the parameters."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train_steps(network: nn.Module, optimiser: torch.optim.Optimizer, steps: int) -> Any:
    """Train, and yield after every step."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        optimiser.zero_grad()
        network(torch.randn(6, 3, generator=generator)).square().sum().backward()
        optimiser.step()
        yield


@pytest.mark.usefixtures("_float64")
def test_averages_agree_with_torch_asgd() -> None:
    """Except for the first iterate, which torch leaves out: with t0 = 0, its first two steps both have weight 1."""
    network, torch_network = model(), model()
    averages = None
    asgd = torch.optim.ASGD(torch_network.parameters(), lr=RATE, t0=0, lambd=0.0, weight_decay=DECAY)
    sgd = SGD(network.parameters(), RATE, weight_decay=DECAY)
    for number, _ in enumerate(zip(train_steps(network, sgd, 40), train_steps(torch_network, asgd, 40), strict=True)):
        if number == 0:
            averages = WeightAverages(dict(network.named_parameters()))
            continue
        assert averages is not None
        averages.update(APPLIED)
        for mean, parameter in zip(averages.means.values(), torch_network.parameters(), strict=True):
            torch.testing.assert_close(mean, asgd.state[parameter]["ax"], rtol=1e-12, atol=1e-12)
    for parameter, expected in zip(network.parameters(), torch_network.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_float64")
def test_averages_are_the_mean_of_all_iterates() -> None:
    network = model()
    averages = WeightAverages(dict(network.named_parameters()))
    assert all(torch.equal(mean, p) for mean, p in zip(averages.means.values(), network.parameters(), strict=True))
    iterates: list[Tensor] = []
    for _ in train_steps(network, SGD(network.parameters(), RATE), 25):
        averages.update(APPLIED)
        iterates.append(network[0].weight.detach().clone())
        torch.testing.assert_close(averages.means["0.weight"], torch.stack(iterates).mean(0), rtol=1e-12, atol=1e-14)
    assert averages.count.item() == 25


@pytest.mark.usefixtures("_float64")
def test_skipped_update_is_not_averaged() -> None:
    network = model()
    averages = WeightAverages(dict(network.named_parameters()))
    averages.update(SKIPPED)
    iterates: list[Tensor] = []
    for number, _ in enumerate(train_steps(network, SGD(network.parameters(), RATE), 6)):
        averages.update(APPLIED if number % 2 else SKIPPED)
        iterates += [network[0].weight.detach().clone()] if number % 2 else []
    torch.testing.assert_close(averages.means["0.weight"], torch.stack(iterates).mean(0), rtol=1e-12, atol=1e-14)
    assert averages.count.item() == 3


def test_swapping_restores_the_parameters_in_place() -> None:
    network = model()
    averages = WeightAverages(dict(network.named_parameters()))
    for _ in train_steps(network, SGD(network.parameters(), 0.1), 3):
        averages.update(APPLIED)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    addresses = [parameter.data_ptr() for parameter in network.parameters()]
    with averages.swap_in():
        for name, parameter in network.named_parameters():
            assert torch.equal(parameter, averages.means[name])
        assert [parameter.data_ptr() for parameter in network.parameters()] == addresses
        assert not torch.equal(network[0].weight, before["0.weight"])
    for name, parameter in network.named_parameters():
        assert torch.equal(parameter, before[name])
    assert [parameter.data_ptr() for parameter in network.parameters()] == addresses


@pytest.fixture
def scripted(tmp_path: Path, tiny_recipe: Callable[..., Path]) -> Callable[..., tuple[Trainer, RunFolder, list[Any]]]:
    """A function that trains with given validation losses and records the weights that were validated."""

    def run(valid: list[float], *overrides: str) -> tuple[Trainer, RunFolder, list[Any]]:
        epochs = f"training.epochs={len(valid)}"
        recipe = load_recipe(str(tiny_recipe()), (epochs, "training.keep=100", *overrides), "tied")
        torch.manual_seed(1)
        network = build_model(recipe.experiments["tied"], 11)
        losses, validated = iter(valid), []

        def validate() -> float:
            validated.append({name: tensor.clone() for name, tensor in named_weights(network).items()})
            return next(losses)

        ids = np.random.default_rng(7).integers(0, 11, 4 * 16).astype(np.int32)
        settings = recipe.experiments["tied"].training
        with RunFolder.open_for_training(tmp_path / "run", {}) as folder:
            trainer = Trainer(network, Streams(ids, 4, settings.steps), validate, settings, folder)
            trainer.train()
            return trainer, folder, validated

    return run


def test_averaging_starts_after_the_nonmonotone_rule(scripted: Any) -> None:
    # After epoch 5, the best loss except for the last two is 2.0, and 2.5 is worse.
    trainer, folder, validated = scripted(
        [3.0, 2.0, 2.2, 2.1, 2.5, 1.9, 1.95], "training.averaging={start = 'nonmonotone', interval = 2}"
    )
    progress = trainer.state.progress
    assert progress.averaged_from == 6
    assert progress.validated == [1.9, 1.95]
    windows = trainer.batches.num_windows
    assert trainer.state.averages is not None
    assert trainer.state.averages.count.item() == 2 * windows
    assert (progress.best_nll, progress.best_epoch) == (1.9, 6)
    # The validated averages are saved as the model, and training continues from the iterate.
    best = folder.best_weights()
    assert all(torch.equal(best[name], validated[5][name]) for name in best)
    saved = folder.checkpoints.load(folder.checkpoints.step_path(7 * windows))
    assert all(torch.equal(saved.weights[name], validated[6][name]) for name in saved.weights)
    iterate = named_weights(trainer.model)
    assert all(
        torch.equal(saved.state_tensors[f"iterate.{name}"], iterate[name]) for name in trainer.state.averages.means
    )
    assert any(not torch.equal(saved.weights[name], iterate[name]) for name in iterate)


def test_averaging_does_not_start_after_the_last_epoch(scripted: Any) -> None:
    trainer, _, _ = scripted([2.0, 2.5, 3.0], NONMONOTONE)
    assert trainer.state.progress.averaged_from == 0
    assert trainer.state.averages is None


def test_with_averaging_only_losses_of_averages_stop_a_run(scripted: Any) -> None:
    """The first losses rise, so that patience would have stopped the run after the second epoch."""
    stop = "training.stop={rule = 'patience', interval = 1}"
    averaging = "training.averaging={start = 'nonmonotone', interval = 2}"
    trainer, _, validated = scripted([2.0, 2.1, 2.2, 2.3, 1.9, 1.8, 1.85, 1.7], averaging, stop)
    progress = trainer.state.progress
    assert progress.averaged_from == 5
    assert len(validated) == 7
    assert "after epoch 7 by patience" in progress.stopped


def test_averaging_at_once_includes_the_first_step(scripted: Any) -> None:
    trainer, _, _ = scripted([3.0, 2.0], AT_ONCE)
    assert trainer.state.averages.count.item() == trainer.state.progress.step
    assert trainer.state.progress.averaged_from == 1


def test_iterates_do_not_depend_on_being_averaged(scripted: Any, tmp_path: Path) -> None:
    averaged, _, _ = scripted([3.0, 2.0], AT_ONCE)
    (tmp_path / "run").rename(tmp_path / "first")
    plain, _, _ = scripted([3.0, 2.0])
    pairs = zip(averaged.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(averaged_parameter, plain_parameter) for averaged_parameter, plain_parameter in pairs)


@pytest.mark.parametrize("change", [(AT_ONCE,), (AT_ONCE, RANDOM), (NONMONOTONE, RANDOM)])
def test_run_stopped_while_averaging_resumes_bit_for_bit(
    tmp_path: Path,
    train: Any,
    outcome: Outcome,
    signal_in_step: Callable[[int], None],
    change: tuple[str, ...],
) -> None:
    """The learning rate is so high that the losses go up and down, and averaging starts during the run."""
    settings = ("training.epochs=5", "training.schedule={kind = 'constant'}", "training.optimiser.learning_rate=2.0")
    settings = (*settings, "training.keep=100", *change)
    steps = train(tmp_path / "unbroken", *settings)["training"]["steps"]
    unbroken = outcome(tmp_path / "unbroken")
    start = RunFolder.open(tmp_path / "unbroken").result.training.averaged_from_epoch  # type: ignore[union-attr]
    assert start is not None
    assert start <= 4
    out = tmp_path / "stopped"
    for stop in (steps - 8, 3, 4):
        signal_in_step(stop)
        with pytest.raises(Stopped):
            train(out, *settings)
    signal_in_step(0)
    train(out, *settings)
    resumed = outcome(out)
    shared = resumed["weights"].keys() & unbroken["weights"].keys()
    assert len(shared) >= 5
    assert all(resumed["weights"][name] == unbroken["weights"][name] for name in shared)
    assert {**resumed, "weights": None} == {**unbroken, "weights": None}
