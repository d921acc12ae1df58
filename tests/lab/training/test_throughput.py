"""Throughput: speed, share of the measured matrix rate, and a measurement without side effects."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from reefknot.kernels.scores import IGNORE
from reefknot.lab.training import throughput
from reefknot.lab.training.display import format_progress
from reefknot.lab.training.distributed import World
from reefknot.lab.training.throughput import Speed, Throughput, measure_matrix_rate
from reefknot.nn.classifiers.plain import Plain
from reefknot.nn.encoders.stacked import LSTM
from reefknot.nn.inputs.lookup import Lookup
from reefknot.nn.models.language_model import LanguageModel
from reefknot.nn.outputs.softmax import Softmax
from reefknot.nn.tables import WordTable


def _model() -> LanguageModel:
    table = WordTable(20, 8)
    return LanguageModel(Lookup(table), LSTM(8, 8, 1), Softmax(Plain(table)))


def test_matrix_rate_of_a_cpu_uses_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a first product, which is not measured, three products take 2, 0.5 and 1 seconds."""
    readings = iter([0.0, 0.1, 0.1, 1.0, 3.0, 3.0, 3.5, 4.0, 5.0, 5.0])
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    monkeypatch.setitem(throughput.MATRIX_SIZES, "cpu", 32)
    assert measure_matrix_rate("cpu", torch.float32, seconds=0.01) == 2 * 32**3 / 0.5


def test_measuring_does_not_use_the_global_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(throughput.MATRIX_SIZES, "cpu", 32)
    before = torch.get_rng_state()
    measure_matrix_rate("cpu", torch.bfloat16, seconds=0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_matrix_rate_is_not_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "measure_matrix_rate", lambda *_: pytest.fail("nothing is measured on a CPU"))
    meter = Throughput(_model(), World(), torch.float32)
    inputs_BT = torch.zeros(2, 5, dtype=torch.long)
    speed = meter.compute_speed(1000.0, inputs_BT, inputs_BT)
    assert speed.matrix_rate_share is None
    assert speed.flops_per_second == 1000.0 * 6 * (8 * 8 * 8 + 8 * 20)
    assert speed.memory_bytes > 2**20
    assert set(speed.record()) == {"tokens_per_second", "flops", "memory_bytes"}
    assert not any("matrix rate" in fact for fact in speed.describe())


def test_share_of_the_matrix_rate_counts_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        throughput, "measure_matrix_rate", lambda device, dtype: 1e9 if dtype == torch.bfloat16 else 1.0
    )
    monkeypatch.setattr(throughput, "peak_memory_bytes", lambda device: 3 * 2**30)
    model = _model()
    world = World(rank=0, size=4, device=torch.device("cuda"))
    meter = Throughput(model, world, torch.bfloat16)
    assert meter.matrix_rate == 4e9
    inputs_BT = torch.zeros(2, 5, dtype=torch.long)
    speed = meter.compute_speed(1e5, inputs_BT, inputs_BT)
    assert speed.matrix_rate_share == pytest.approx(1e5 * model.flops(inputs_BT, inputs_BT) / 10 / 4e9)
    assert json.loads(json.dumps(speed.record()))["share"] == speed.matrix_rate_share
    assert Throughput(model, World(rank=1, size=4, device=torch.device("cuda")), torch.bfloat16).matrix_rate is None


def test_flops_per_target_come_from_the_window() -> None:
    meter = Throughput(_model(), World(), torch.float32)
    inputs_BT = torch.zeros(2, 5, dtype=torch.long)
    padded = inputs_BT.clone()
    padded[1:] = IGNORE
    assert (
        meter.compute_speed(7.0, inputs_BT, padded).flops_per_second
        == meter.compute_speed(7.0, inputs_BT, inputs_BT).flops_per_second
    )
    assert meter.compute_speed(7.0, inputs_BT, torch.full_like(inputs_BT, IGNORE)).flops_per_second == 0.0


def test_progress_line_shows_speed_memory_and_time_left() -> None:
    texts = Speed(12_345.6, 1e12, 12 * 2**30, 0.384).describe()
    assert texts == ["12,346 tokens/s", "12.0 GiB", "38% of the matrix rate"]
    line = format_progress("tied", ["epoch 1/2", *texts], 0.25, 95)
    assert line.startswith("tied  ━━╌╌╌╌╌╌╌╌ 25%, 1m35s left  epoch 1/2  12,346 tokens/s")
    assert format_progress("tied", [], 1.0, 0).endswith("100%, 0s left")
