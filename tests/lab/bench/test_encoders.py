"""Encoder benchmarks: complete rows, masks shared with the float64 reference, and failures that do not stop the run."""

from __future__ import annotations

import json

import pytest
import torch

from reefknot.errors import SettingsError
from reefknot.lab.bench import encoders, measure
from reefknot.lab.bench.encoders import (
    AWD,
    BASELINE,
    LAYER_BUILDERS,
    PLAIN_LOOP,
    SHAPES,
    Bench,
    Row,
    Shape,
    measure_all,
)

EQUAL, AWD_LIKE = Shape(3, 4, (6, 5, 5)), Shape(2, 5, (4, 6, 6, 4))
QUICK = Bench("cpu", ("float32",), seconds=0.0)


def _run(*shapes: Shape, bench: Bench = QUICK) -> list[Row]:
    messages: list[str] = []
    rows_measured = [row for rows in measure_all(bench, shapes, messages.append) for row in rows]
    assert sum(line.startswith("  ") for line in messages) == len(rows_measured)
    return rows_measured


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_competitor_is_measured(dtype: str) -> None:
    rows = _run(EQUAL, AWD_LIKE, bench=Bench("cpu", (dtype,), seconds=0.0))
    assert [row.competitor for row in rows] == [*LAYER_BUILDERS, *LAYER_BUILDERS, AWD]
    for row in rows:
        assert row.note == ""
        assert row.ms is not None
        assert row.repeats > 0
        assert row.worst_error is not None
        assert 0 < row.worst_error < (1e-5 if dtype == "float32" else 0.2)
        assert row.deterministic
        assert row.over_lstm is not None
        if row.competitor == BASELINE:
            assert row.over_lstm == 1.0


def test_record_is_valid_json() -> None:
    *_, row = _run(AWD_LIKE)
    record = json.loads(json.dumps(row.record(), allow_nan=False))
    assert record["shape"] == [2, 5, [4, 6, 6, 4]]
    assert {"competitor", "dtype", "ms", "graph_ms", "over_lstm", "worst_error", "deterministic", "note"} <= set(record)


def test_timed_step_draws_new_masks() -> None:
    step = encoders.build_step("reefknot, variational", EQUAL, torch.float32, "cpu")
    assert step.run() != step.run()
    plain = encoders.build_step(BASELINE, EQUAL, torch.float32, "cpu")
    assert plain.run() == plain.run()


def test_loop_has_the_same_weights_as_our_encoder() -> None:
    fused_weights, loop_weights = (
        encoders.build_encoder(name, AWD_LIKE).state_dict() for name in ("reefknot, variational", PLAIN_LOOP)
    )
    assert fused_weights.keys() == loop_weights.keys()
    assert all(torch.equal(fused_weights[name], loop_weights[name]) for name in fused_weights)


@pytest.mark.parametrize("name", [*LAYER_BUILDERS, AWD])
def test_layers_have_the_dimensions_of_the_shape(name: str) -> None:
    encoder = encoders.build_encoder(name, AWD_LIKE)
    assert encoder(torch.zeros(2, 5, 4)).shape == (2, 5, 4)
    recurrent = [weight.shape for path, weight in encoder.named_parameters() if "weight_hh" in path]
    assert recurrent == [(24, 6), (24, 6), (16, 4)]


def test_failing_competitor_is_noted_and_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(input_dim: int, dim: int, num_layers: int) -> torch.nn.LSTM:
        raise RuntimeError("no kernel for this shape\nmore")

    monkeypatch.setitem(LAYER_BUILDERS, "reefknot, Bayesian", fail)
    baseline, variational, bayesian, loop = _run(EQUAL)
    assert bayesian.note == "RuntimeError: no kernel for this shape"
    assert bayesian.ms is None
    assert bayesian.over_lstm is None
    assert all(row.ms is not None for row in (baseline, variational, loop))


def test_without_the_baseline_there_are_no_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_BUILDERS, BASELINE, lambda *sizes: 1 / 0)
    rows = _run(EQUAL)
    assert rows[0].note.startswith("ZeroDivisionError")
    assert all(row.over_lstm is None for row in rows)
    assert rows[1].ms is not None


def test_captured_times_are_compared_with_captured_times() -> None:
    baseline = Row(EQUAL, "float32", competitor=BASELINE, ms=4.0, graph_ms=1.0)
    captured = Row(EQUAL, "float32", competitor="two", ms=8.0, graph_ms=1.5)
    uncaptured = Row(EQUAL, "float32", competitor="three", ms=2.0)
    assert [row.over_lstm for row in encoders._add_ratios([baseline, captured, uncaptured])] == [1.0, 1.5, 0.5]


def test_nonfinite_gradients_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "compute_relative_errors", lambda gradients, exact: {"input": float("nan")})
    row, *_ = _run(EQUAL)
    assert row.errors is None
    assert row.note == "gradients are not finite"


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_setting_is_restored(tf32: bool) -> None:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    with encoders._set_matmul_precision(tf32):
        assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is tf32
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == before


def test_shapes_are_parsed_and_checked() -> None:
    assert Shape.parse("20,70,400-1150-1150-400") in SHAPES["cuda"]
    assert str(Shape(20, 35, (200, 200))) == "B = 20, T = 35, 200-200"
    for text in ("20,35", "20,35,a-b", "20,35,200,200", ""):
        with pytest.raises(SettingsError, match="must be streams,steps,dimensions"):
            Shape.parse(text)
    for text in ("0,35,8-8", "20,35,200", "20,35,8-0"):
        with pytest.raises(SettingsError, match="needs at least"):
            Shape.parse(text)
