"""docs/performance.md is up to date, and script/performance renders records correctly."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from typing import Any

import pytest

from pages import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "script"))
    return runpy.run_path(str(ROOT / "script/performance"), run_name="performance")


def _record(**changes: Any) -> dict[str, Any]:
    row = {
        "end": "plain",
        "shape": [16, 8, 50],
        "competitor": "reefknot",
        "floor_ms": 0.5,
        "ms": 1.0,
        "graph_ms": None,
        "over_floor": 2.0,
        "over_mib": 0.0,
        "worst_error": 1e-6,
        "deterministic": True,
        "note": "",
    }
    machine = {"device": "An Engine", "torch": "2.11.0", "triton": None, "liger_kernel": None}
    machine |= {"cut_cross_entropy": None, "dtype": "float32", "matrix_tflops": 0.25}
    environment = {"gpus": [], "threads": 2, "commit": "0123456789abcdef", "dirty": False, "command": "reefknot bench"}
    absent = row | {"competitor": "CCE", "ms": None, "over_floor": None, "over_mib": None, "note": "not installed"}
    absent |= {"worst_error": None, "deterministic": None}
    wide = [row | {"shape": [16, 8, words], "ms": 0.01 * words} for words in (100, 1000)]
    record = {"machine": machine, "environment": environment, "vocabulary": False, "rows": [row, absent, *wide]}
    return record | changes


def test_performance_page_is_up_to_date() -> None:
    completed = subprocess.run(
        [sys.executable, "script/performance", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_page_without_records_is_rendered(script: dict[str, Any]) -> None:
    assert script["format_results"]({}) == "Nothing has been recorded yet."
    page = script["insert_between_marks"]("a\n<!-- results:begin -->\nold\n<!-- results:end -->\nb", "results", "new")
    assert page == "a\n<!-- results:begin -->\nnew\n<!-- results:end -->\nb"


def test_record_is_rendered_as_tables(script: dict[str, Any]) -> None:
    text = script["format_results"]({"engine": _record()})
    assert all(part in text for part in ("An Engine", "2 threads", "torch 2.11.0", "0.25 TFLOP/s", "commit 0123456789"))
    assert "| 16, 8, 50 (0.5) | reefknot | 1 | 2 | 0 | 1.0e-06 | yes |  |" in text
    assert "|  | CCE |  |  |  |  |  | not installed |" in text


def test_ratio_to_the_matrix_products_is_a_column_if_it_was_measured(script: dict[str, Any]) -> None:
    record = _record()
    assert "x products" not in script["format_results"]({"engine": record}), "records of earlier versions have none"
    record["rows"] = [row | {"over_products": 1.5 if row["ms"] else None} for row in record["rows"]]
    text = script["format_results"]({"engine": record})
    assert "| ms | x floor | x products | over MiB |" in text
    assert "| 16, 8, 50 (0.5) | reefknot | 1 | 2 | 1.5 | 0 | 1.0e-06 | yes |  |" in text
    assert "|  | CCE |  |  |  |  |  |  | not installed |" in text


def test_steps_are_rendered_with_seconds_per_epoch(script: dict[str, Any]) -> None:
    row = {"row": "tied", "mode": "captured", "ms": 12.6, "epoch_seconds": 8.719}
    text = script["format_results"]({"engine": _record(bench="steps", rows=[row])})
    header, _, cells = text.splitlines()[-3:]
    columns = dict(zip(header.split(" | "), cells.split(" | "), strict=True))
    assert (columns["ms"], columns["s/epoch"]) == ("12.6", "8.72")


def test_models_are_rendered_with_the_fastest_competitor(script: dict[str, Any]) -> None:
    size = {"model": "tiny", "batch": 8, "length": 64, "layers": 2, "parameters": 35_104, "attention": "sdpa"}
    liger = size | {
        "competitor": "liger-loss",
        "ms": 4.0,
        "tokens_per_second": 128_000.0,
        "peak_mib": 400.0,
        "note": "",
    }
    reefknot = liger | {"competitor": "reefknot", "ms": 5.0, "tokens_per_second": 102_400.0, "peak_mib": 300.0}
    absent = size | {"competitor": "trl", "ms": None, "tokens_per_second": None, "peak_mib": None, "note": "absent"}
    text = script["format_results"]({"engine": _record(bench="models", rows=[liger, reefknot, absent])})
    assert "| tiny | reefknot | 5 | 102,400 |  | 300 |" in text
    assert "`liger-loss` is the fastest, with 128,000 tokens/s. `reefknot` has the lowest peak, 300 MiB." in text
    assert "`reefknot` has 0.800 times the tokens/s of `liger-loss`, at 0.750 times its peak memory." in text


def test_summary_compares_with_the_fastest_exact_competitor(script: dict[str, Any]) -> None:
    record = _record()
    reefknot = record["rows"][0]
    rows = [
        reefknot,
        reefknot | {"competitor": "eager torch", "ms": 4.0, "worst_error": 0.02},
        reefknot | {"competitor": "torch.compile", "ms": 2.0, "worst_error": 0.035},
        reefknot | {"competitor": "fast and wrong", "ms": 0.1, "worst_error": 0.5},
    ]
    record |= {"rows": rows, "environment": record["environment"] | {"gpus": ["An Engine"]}}
    fewer = record | {"rows": [reefknot | {"ms": 9.0}, rows[1]]}
    cpu = _record(rows=[reefknot, reefknot | {"competitor": "eager torch", "ms": 0.8}])
    text = script["summarise"]({"engine": record, "older": fewer, "cpu": cpu, "alone": _record()})
    assert "| plain | 16, 8, 50 | 1 (0) | torch.compile 2 (0) | 0.50 | [engine](#engine) |" in text
    assert "On a GPU, at most 2 % slower than the fastest other implementation: 1 of 1 rows." in text
    assert "| plain | 16, 8, 50 | 1 (0) | eager torch 0.8 (0) | 1.25 | [cpu](#cpu) |" in text
    assert "On a CPU, at most 2 % slower than the fastest other implementation: 0 of 1 rows." in text
    assert "wrong" not in text
    assert "older" not in text


def test_sweep_over_vocabularies_is_drawn(script: dict[str, Any]) -> None:
    record = json.loads(json.dumps(_record(vocabulary=True)))
    assert "(performance/engine.svg)" in script["format_results"]({"engine": record})
    svg = script["draw_figure"](record)
    assert svg.count("stroke: #0e83c4; stroke-width: 3") == 3, "one line of time, one of memory, one in the legend"
    assert svg == script["draw_figure"](record)


def test_readme_table_has_the_known_competitors_that_were_measured(script: dict[str, Any]) -> None:
    record = _record()
    row = record["rows"][0] | {"shape": [8192, 1024, 267735]}
    eager = row | {"competitor": "eager torch", "ms": 119.4, "over_mib": 12013.2, "worst_error": 0.0193}
    unknown = row | {"competitor": "another package"}
    record["rows"] = [row, unknown, eager]
    record["environment"]["gpus"] = ["An Engine"]
    assert script["format_loss_table"]({"engine": record}).splitlines()[2:] == [
        "| eager torch | 119 | 12,013 | 0.019 |",
        "| **Reefknot** | 1 | 0 | 1e-06 |",
    ]
