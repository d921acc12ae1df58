"""Autocast: weights stay float32 and the loss decreases. In float16, updates that overflow are skipped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from reefknot.errors import NonFiniteError, SettingsError, Stopped
from reefknot.lab.training.distributed import World
from reefknot.lab.training.loop import Trainer
from reefknot.lab.training.update import MAX_OVERFLOWS, UpdateStats
from reefknot.nn.encoders.stacked import LSTM

HALF = (
    "training.precision=float16",
    "encoder={kind = 'transformer', layers = 1, heads = 2, ffn_dim = 8, dropout = 0.3}",
    "training.optimiser={kind = 'sgd', learning_rate = 0.1, momentum = 0.9, nesterov = true}",
    "training.log_every=1",
)
"""Few CPUs support an LSTM in float16, so this is a transformer."""
Metrics = Callable[[Path], list[dict[str, Any]]]


def training_lines(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == "train"]


def last(run: Path, name: str) -> Path:
    return max((run / "checkpoints").iterdir()) / name


def test_loss_decreases_in_every_precision(tmp_path: Path, train: Any, metrics: Metrics) -> None:
    fixed = ("encoder={kind = 'gru', hidden_dim = 8}", "init.uniform=0.5", "training.schedule.factor=1.0")
    length = ("training.epochs=default", "training.updates=60", "training.validate_every=60", "training.save_every=60")
    losses = {}
    for precision in ("float32", "bfloat16", "float16"):
        precision_settings = (f"training.precision={precision}", "training.optimiser.learning_rate=0.2")
        train(tmp_path / precision, *fixed, *length, *precision_settings)
        losses[precision] = [line["nll"] for line in training_lines(metrics(tmp_path / precision))]
        assert all(map(math.isfinite, losses[precision]))
        assert sum(losses[precision][-3:]) < sum(losses[precision][:3]) - 0.3
        saved = load_file(last(tmp_path / precision, "model.safetensors"))
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert len({tuple(curve) for curve in losses.values()}) == 3


@pytest.fixture
def overflow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """A function that makes the gradients of some updates infinite and returns a list of updates without effect."""
    step = Trainer._step

    def arm(*numbers: int) -> list[int]:
        idle: list[int] = []

        def overflowing(self: Trainer, stop: Any) -> Any:
            weight: Any = next(self.model.encoder.parameters())
            scale = math.inf if self.state.progress.step + 1 in numbers else 1.0
            hook = weight.register_hook(lambda gradient: gradient * scale)
            before = [tensor.detach().clone() for tensor in self.model.parameters()]
            try:
                return step(self, stop)
            finally:
                hook.remove()
                if all(torch.equal(*pair) for pair in zip(before, self.model.parameters(), strict=True)):
                    idle.append(self.state.progress.step)

        monkeypatch.setattr(Trainer, "_step", overflowing)
        return idle

    return arm


@pytest.mark.parametrize("gpu", [False, True], ids=["at once", "as on a GPU"])
def test_overflowing_update_is_skipped(
    tmp_path: Path,
    train: Any,
    metrics: Metrics,
    overflow: Callable[..., list[int]],
    gpu: bool,
    request: pytest.FixtureRequest,
) -> None:
    if gpu:
        request.getfixturevalue("as_on_a_gpu")
    idle = overflow(1, 4, 5)
    result = train(tmp_path / "run", *HALF)
    assert idle == [1, 4, 5]
    assert all(tensor.isfinite().all() for tensor in load_file(last(tmp_path / "run", "model.safetensors")).values())
    lines = training_lines(metrics(tmp_path / "run"))
    assert [line["step"] for line in lines] == [2, 3, *range(6, 13)]  # no line without an update
    assert [line["skipped"] for line in lines] == [1, 1, *[3] * 7]
    assert all(math.isfinite(line["gradient_norm"]) for line in lines)
    assert sum(line["tokens"] for line in lines) == result["training"]["tokens"] - 3 * 20
    scaler = json.loads(last(tmp_path / "run", "state.json").read_text())["scaler"]
    assert scaler["scale"] == 2.0 ** (16 - 3)  # halved by each overflow
    assert scaler["_growth_tracker"] == 12 - 5


def test_loss_scale_is_resumed(
    tmp_path: Path,
    train: Any,
    outcome: Callable[[Path], dict[str, Any]],
    overflow: Callable[..., object],
    signal_in_step: Callable[[int], None],
) -> None:
    overflow(2, 6, 7)
    train(tmp_path / "unbroken", *HALF)
    signal_in_step(6)
    with pytest.raises(Stopped):
        train(tmp_path / "broken", *HALF)
    train(tmp_path / "broken", *HALF)
    assert outcome(tmp_path / "broken") == outcome(tmp_path / "unbroken")
    unbroken, resumed = (json.loads(last(tmp_path / run, "state.json").read_text()) for run in ("unbroken", "broken"))
    assert resumed["scaler"] == unbroken["scaler"]
    assert unbroken["scaler"]["scale"] == 2.0**13


def test_many_overflows_in_a_row_stop_training(
    tmp_path: Path, train: Any, overflow: Callable[..., object], metrics: Metrics
) -> None:
    overflow(*range(7, 100))
    match = rf"at step {6 + MAX_OVERFLOWS}, the last of {MAX_OVERFLOWS} in a row; the update was not made"
    with pytest.raises(NonFiniteError, match=match):
        train(tmp_path / "run", *HALF, "training.epochs=100")
    assert training_lines(metrics(tmp_path / "run"))[-1]["step"] == 6
    assert all(tensor.isfinite().all() for tensor in load_file(last(tmp_path / "run", "model.safetensors")).values())


def trains_an_lstm_in_float16() -> bool:
    """Return whether torch computes an LSTM and its gradients in float16 on this CPU."""
    lstm = torch.nn.LSTM(3, 3)
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            output = lstm(torch.zeros(2, 1, 3))[0]
        output.float().sum().backward()
    except RuntimeError:
        return False
    return True


NO_FLOAT16 = "torch cannot train this LSTM in float16 on a CPU; use bfloat16, or a GPU"


def test_encoder_without_float16_support_is_rejected(tmp_path: Path, train: Any) -> None:
    if trains_an_lstm_in_float16():
        pytest.skip("this CPU trains an LSTM in float16")
    with pytest.raises(SettingsError, match=NO_FLOAT16):
        train(tmp_path / "run", "training.precision=float16")
    assert not (tmp_path / "run").exists()


def test_encoder_without_float16_gradients_is_rejected(
    tmp_path: Path, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some CPUs compute the outputs of an LSTM in float16 but not its gradients."""
    forward = LSTM.forward

    def without_gradients(self: LSTM, inputs_BTD: torch.Tensor, state: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError("could not create a primitive")
        with torch.autocast("cpu", enabled=False):
            return forward(self, inputs_BTD.float(), state)

    monkeypatch.setattr(LSTM, "forward", without_gradients)
    with pytest.raises(SettingsError, match=NO_FLOAT16):
        train(tmp_path / "run", "training.precision=float16")
    assert not (tmp_path / "run").exists()


def test_training_fails_only_after_failures_in_a_row() -> None:
    stats = UpdateStats(World(), 10, patience=3)
    norms = [math.inf, math.inf, 2.0, math.nan, math.inf, math.inf, 4.0]
    applied = []
    for norm in norms:
        stats.add(torch.tensor(norm), {"nll": torch.tensor(1.5)}, {}, target_count=4)
        applied.append(not bool(stats.found_inf))
    assert applied == [False, False, True, False, False, False, False]  # nothing after the third in a row
    report = stats.report()
    assert report.failed_step == 16
    assert math.isinf(report.gradient_norm)
    assert report.skipped == 5
    again = UpdateStats(World(), 0, patience=3, skipped_in_a_row=1)
    for norm in (math.inf, 2.0, math.inf):
        again.add(torch.tensor(norm), {"nll": torch.tensor(1.5)}, {}, target_count=4)
    report = again.report()
    assert (report.failed_step, report.skipped, report.skipped_in_a_row) == (0, 2, 1)
    assert (report.sums, report.tokens, report.gradient_norm) == ({"nll": 1.5}, 4, 2.0)
    assert again.report().tokens == 0


def test_processes_agree_on_skipping_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loss is infinite in another process, this process skips the update too."""

    def take_minimum(number: torch.Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MIN
        number.clamp_(max=others.pop())

    others = [1, 0, 1]
    monkeypatch.setattr(dist, "all_reduce", take_minimum)
    stats = UpdateStats(World(size=2), 0, patience=3)
    applied = []
    for _ in range(3):
        stats.add(torch.tensor(2.0), {"nll": torch.tensor(1.5)}, {}, target_count=4)
        applied.append(not bool(stats.found_inf))
    assert applied == [True, False, True]
    report = stats.report()
    assert (report.skipped, report.tokens, report.sums) == (1, 8, {"nll": 3.0})
