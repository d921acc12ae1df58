"""A benchmark run of all competitors: rows, notes, theoretical minimum, and failures that do not stop it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from reefknot.errors import ResourceError
from reefknot.lab.bench import heads
from reefknot.lab.bench.heads import Bench, Row, choose_cases, measure_all
from reefknot.lab.bench.problems import DRILL_LAYERS, ENDS, NUM_EXPERTS, Shape, make_problem

SHAPE = Shape(16, 8, 50)
QUICK = Bench("cpu", families=("reefknot", "eager", "liger"), seconds=0.0)


def _run(bench: Bench, *ends: str) -> list[Row]:
    messages: list[str] = []
    rows_measured = [
        row for rows in measure_all(bench, 1e9, [(end, SHAPE) for end in ends], messages.append) for row in rows
    ]
    assert sum(line.startswith("  ") for line in messages) == len(rows_measured)
    return rows_measured


def test_every_end_is_measured() -> None:
    rows = _run(QUICK, *ENDS)
    assert {row.end for row in rows} == set(ENDS)
    for row in rows:
        if row.family != "liger":
            assert row.note == ""
            assert row.ms is not None
            assert row.over_mib is not None
            assert row.worst_error is not None
            assert row.worst_error < 1e-4
            assert row.deterministic
        assert json.loads(json.dumps(row.record(), allow_nan=False))["shape"] == [16, 8, 50]


def test_every_memory_budget_is_a_row() -> None:
    names = [row.competitor for row in _run(Bench("cpu", ("reefknot",), memory=(1.0, 64.0), seconds=0.0), "plain")]
    assert names == ["reefknot", "reefknot, 1 MiB", "reefknot, 64 MiB", "reefknot, chunked"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 58 GiB"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory\nmore"), "out of memory"),
        (RuntimeError("no kernel for this shape\nmore"), "RuntimeError: no kernel for this shape"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_failing_competitor_is_noted_and_others_are_measured(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("reefknot.lab.bench.competitors.LOSSES", {"plain": fail})
    reefknot, *_, eager = _run(Bench("cpu", ("reefknot", "eager"), seconds=0.0), "plain")
    assert reefknot.ms is not None
    assert eager.ms is None
    assert eager.note.startswith(reason)


def test_nonfinite_gradients_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "compute_relative_errors", lambda gradients, exact: {"hidden": float("nan")})
    (row,) = _run(Bench("cpu", ("eager",), seconds=0.0), "plain")
    assert row.errors is None
    assert row.note == "gradients are not finite"


def test_minimum_operation_counts_match_values_by_hand() -> None:
    """6NDV, plus terms per distinct target, per expert and its matrix, per DRILL layer and per band."""
    N, D, V = SHAPE
    problems = {end: make_problem(end, SHAPE, "cpu", torch.float32) for end in ENDS}
    num_distinct = len(set(problems["plain"].targets.tolist()))
    assert problems["plain"].floor_flops == 6 * N * D * V
    assert problems["augmented-detached"].floor_flops == 6 * N * D * V + 6 * num_distinct * D * V
    assert problems["augmented"].floor_flops == 6 * N * D * V + 10 * num_distinct * D * V
    assert problems["mixture"].floor_flops == NUM_EXPERTS * (6 * N * D * V + 6 * N * D * D)
    assert problems["drill"].floor_flops == 6 * N * D * V + DRILL_LAYERS * 6 * V * D * D

    targets_N = problems["adaptive"].targets
    tokens_in_first_tail = int(((targets_N >= 5) & (targets_N < 25)).sum())
    tokens_in_second_tail = int((targets_N >= 25).sum())
    tail_flops = 6 * tokens_in_first_tail * 4 * (20 + D) + 6 * tokens_in_second_tail * 2 * (25 + D)
    assert problems["adaptive"].floor_flops == 6 * N * D * 7 + tail_flops


def test_default_and_requested_cases() -> None:
    assert choose_cases("cpu", (), (), False) == [(end, Shape(700, 200, 10_000)) for end in ENDS]
    assert choose_cases("cpu", ["plain"], [SHAPE], False) == [("plain", SHAPE)]
    assert ("plain", Shape(8192, 1024, 267_735)) in choose_cases("cuda", (), (), False)
    sweep = choose_cases("cpu", (), (), True)
    assert [shape.classes for end, shape in sweep if end == "drill"] == [10_000, 30_000, 100_000, 300_000, 1_000_000]
    assert {end for end, _ in sweep} == {"plain", "adaptive", "drill"}


def test_shape_that_does_not_fit_in_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(heads, "compute_exact_gradients", fail)
    with pytest.raises(ResourceError, match="plain, N = 16, D = 8, V = 50: the float64 reference does not fit"):
        list(measure_all(QUICK, 1e9, [("plain", SHAPE)], lambda line: None))


def test_end_without_competitors_is_skipped() -> None:
    messages: list[str] = []
    chosen = [("drill", SHAPE)]
    assert list(measure_all(replace(QUICK, families=("compile",)), 1e9, chosen, messages.append)) == []
    assert messages[1:] == ["  none of the chosen competitors has this end"]
