"""A benchmark run of all competitors: rows, notes, theoretical minimum, and failures that do not stop it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from reefknot.errors import ResourceError
from reefknot.lab.bench import heads, measure
from reefknot.lab.bench.heads import PRODUCTS_FAMILY, Bench, Row, choose_cases, measure_all, merge_products_rows
from reefknot.lab.bench.problems import DRILL_LAYERS, ENDS, NUM_EXPERTS, NUM_PRODUCTS, Shape, make_problem

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
        if row.family not in ("liger", PRODUCTS_FAMILY):
            assert row.note == ""
            assert row.ms is not None
            assert row.over_mib is not None
            assert row.worst_error is not None
            assert row.worst_error < 1e-4
            assert row.deterministic
        assert json.loads(json.dumps(row.record(), allow_nan=False))["shape"] == [16, 8, 50]


def test_matrix_products_have_a_row_and_all_rows_a_ratio() -> None:
    for end in ENDS:
        rows = _run(Bench("cpu", ("eager",), seconds=0.0), end)
        if end not in NUM_PRODUCTS:
            assert [row.products_ms for row in rows] == [None]
            continue
        products, eager = rows
        assert products.competitor == f"{NUM_PRODUCTS[end]} matrix products"
        assert products.record()["over_products"] == 1.0
        assert (products.note, products.errors, products.over_mib) == ("", None, None)
        assert products.ms is not None
        assert eager.ms is not None
        assert eager.record()["over_products"] == eager.ms / products.ms


def test_matrix_products_are_measured_before_every_competitor_on_a_gpu() -> None:
    problem = make_problem("log_probs", SHAPE, "cpu", torch.float32)
    entries = heads._build_entries(Bench("cuda", ("reefknot", "eager", "trl")), problem, 1.0)
    names = [entry.row.competitor for entry in entries]
    assert set(names[::2]) == {"4 matrix products"}
    others = ["reefknot", "reefknot, chunked", "reefknot, fp32 weights", "eager torch", "chunks as in TRL"]
    assert names[1::2] == others


def test_turns_of_the_matrix_products_are_merged() -> None:
    """On a GPU, the products are timed before every competitor."""
    empty = Row("plain", SHAPE, "eager", "bfloat16", 1.0, competitor="eager torch")
    products = replace(empty, family=PRODUCTS_FAMILY, competitor="3 matrix products", repeats=5)
    turns = [replace(products, ms=milliseconds) for milliseconds in (2.0, 9.0, 4.0)]
    merged, *others = merge_products_rows([turns[0], replace(empty, ms=8.0), turns[1], empty, turns[2], empty])
    assert (merged.ms, merged.repeats, merged.over_products) == (4.0, 15, 1.0)
    assert [row.over_products for row in others] == [2.0, None, None]
    failed = replace(products, note="out of memory")
    merged, other = merge_products_rows([failed, replace(empty, ms=8.0)])
    assert (merged.ms, merged.note, other.over_products) == (None, "out of memory", None)


def test_every_memory_budget_is_a_row() -> None:
    names = [row.competitor for row in _run(Bench("cpu", ("reefknot",), memory=(1.0, 64.0), seconds=0.0), "plain")]
    assert names == ["3 matrix products", "reefknot", "reefknot, 1 MiB", "reefknot, 64 MiB", "reefknot, chunked"]


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
    _, reefknot, *_, eager = _run(Bench("cpu", ("reefknot", "eager"), seconds=0.0), "plain")
    assert reefknot.ms is not None
    assert eager.ms is None
    assert eager.note.startswith(reason)


def test_nonfinite_gradients_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "compute_relative_errors", lambda gradients, exact: {"hidden": float("nan")})
    _, row = _run(Bench("cpu", ("eager",), seconds=0.0), "plain")
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
    assert problems["softcap"].floor_flops == problems["log_probs"].floor_flops == 6 * N * D * V
    assert problems["distil"].floor_flops == 8 * N * D * V
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
