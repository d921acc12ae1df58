"""Learning-rate schedules agree with the papers and with torch, and the loop applies them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, LRScheduler

from reefknot.errors import SettingsError
from reefknot.lab.config.parts import SCHEDULES
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.training.schedules import Constant, Cosine, Decay, InverseSqrt


def test_press_halves_the_rate_after_five_epochs() -> None:
    training = load_recipe("press2017/table6").experiments["Small + WT"].training
    schedule = SCHEDULES.build(training.schedule, {})
    rates = [
        training.optimiser.model_dump()["learning_rate"] * schedule.learning_rate_factor(epoch, 0)
        for epoch in range(1, 14)
    ]
    assert rates == [1, 1, 1, 1, 1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_decay_without_hold_starts_in_the_first_epoch() -> None:
    assert [Decay(0, 0.8).learning_rate_factor(epoch, 0) for epoch in (1, 2, 3)] == pytest.approx([0.8, 0.64, 0.512])


def test_constant_schedule_never_changes() -> None:
    assert {Constant().learning_rate_factor(epoch, 7 * epoch) for epoch in range(1, 100)} == {1.0}


WIKITEXT = Cosine(18_000, warmup=16_000, warmup_from=1e-7, growth=2.0, shrink=0.75, least=1e-5)
"""The schedule of Baevski & Auli (2019), with a rate of 1."""
FIRST = 16_000
SECOND = FIRST + 18_000
THIRD = SECOND + 36_000
FOURTH = THIRD + 72_000


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 1e-7),
        (8_000, (1 + 1e-7) / 2),
        (FIRST, 1.0),
        (FIRST + 9_000, (1 + 1e-5) / 2),
        (FIRST + 6_000, 1e-5 + (1 - 1e-5) * 0.75),  # cos 60 degrees is one half
        (SECOND, 0.75),
        (SECOND + 18_000, 0.75 * (1 + 1e-5) / 2),
        (THIRD, 0.75**2),
        (FOURTH, 0.75**3),
        (FOURTH + 72_000, 0.75**3 * (1 + 1e-5) / 2),
    ],
)
def test_cosine_cycles_agree_with_baevski_and_auli(step: int, factor: float) -> None:
    assert WIKITEXT.learning_rate_factor(1, step) == pytest.approx(factor, rel=1e-12)


def test_cosine_cycles_end_at_their_minimum() -> None:
    for i, last in enumerate((SECOND - 1, THIRD - 1, FOURTH - 1, 286_000 - 1)):
        assert WIKITEXT.learning_rate_factor(1, last) == pytest.approx(1e-5 * 0.75**i, rel=1e-2)
        assert WIKITEXT.learning_rate_factor(1, last) < WIKITEXT.learning_rate_factor(1, last - 1)


def test_single_cosine_cycle_agrees_with_its_formula() -> None:
    schedule = Cosine(270_000, warmup=16_000, warmup_from=1e-7, least=1e-4)
    for step in (16_000, 100_000, 200_000, 285_999):
        expected = 1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * (step - 16_000) / 270_000)) / 2
        assert schedule.learning_rate_factor(1, step) == pytest.approx(expected, rel=1e-12)


def torch_rates(make: Callable[[Any], LRScheduler], steps: int) -> list[float]:
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    scheduler, rates = make(optimiser), []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimiser.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("growth", [1, 2, 3])
def test_cosine_agrees_with_torch_warm_restarts(growth: int) -> None:
    expected = torch_rates(
        lambda optimiser: CosineAnnealingWarmRestarts(optimiser, T_0=7, T_mult=growth, eta_min=0.125), 100
    )
    schedule = Cosine(7, growth=float(growth), least=0.125)
    assert [schedule.learning_rate_factor(1, step) for step in range(100)] == pytest.approx(expected, rel=1e-12)


def test_one_cycle_agrees_with_torch_annealing() -> None:
    expected = torch_rates(lambda optimiser: CosineAnnealingLR(optimiser, T_max=50, eta_min=0.01), 50)
    schedule = Cosine(50, least=0.01)
    assert [schedule.learning_rate_factor(1, step) for step in range(50)] == pytest.approx(expected, rel=1e-9)


def test_cycles_with_fractional_growth_start_at_their_peak() -> None:
    schedule, first = Cosine(100, growth=1.1, shrink=0.5), 0
    for cycle in range(20):
        assert schedule.learning_rate_factor(1, first) == 0.5**cycle
        first += round(100 * 1.1**cycle)
        assert schedule.learning_rate_factor(1, first - 1) < 1e-3 * 0.5**cycle


def test_inverse_sqrt_agrees_with_its_formula() -> None:
    schedule = InverseSqrt(4_000)
    steps = (0, 1_000, 4_000, 16_000, 400_000)
    assert [schedule.learning_rate_factor(1, step) for step in steps] == pytest.approx([0.0, 0.25, 1.0, 0.5, 0.1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"period": 0}, "period = 0: must be at least 1"),
        ({"warmup": -1}, "warmup = -1: must be at least 0"),
        ({"warmup_from": 1.5}, "warmup_from = 1.5: must lie between 0 and 1"),
        ({"growth": 0.5}, "growth = 0.5: must be at least 1"),
        ({"shrink": 0.0}, "shrink = 0.0: must be above 0 and at most 1"),
        ({"least": math.nan}, "least = nan: must lie between 0 and 1"),
    ],
)
def test_invalid_cosine_settings_are_rejected(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Cosine(**({"period": 10} | wrong))


def test_inverse_sqrt_without_warmup_is_rejected() -> None:
    with pytest.raises(SettingsError, match="warmup = 0: must be at least 1"):
        InverseSqrt(0)


def test_metrics_have_the_learning_rate_of_every_epoch(tmp_path: Path, train: Any, metrics: Any) -> None:
    train(tmp_path / "run", "training.epochs=3", "training.optimiser.learning_rate=0.5")
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert {(line["epoch"], line["learning_rate"]) for line in lines} == {(1, 0.5), (2, 0.25), (3, 0.125)}


def test_metrics_have_the_learning_rate_of_the_last_update(tmp_path: Path, train: Any, metrics: Any) -> None:
    schedule = "training.schedule={kind = 'cosine', period = 8, warmup = 4}"
    train(tmp_path / "run", schedule, "training.log_every=3", "training.optimiser.learning_rate=0.5")
    expected = Cosine(8, warmup=4)
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == [3, 6, 9, 12]
    assert [line["learning_rate"] for line in lines] == [
        0.5 * expected.learning_rate_factor(1, step - 1) for step in (3, 6, 9, 12)
    ]
