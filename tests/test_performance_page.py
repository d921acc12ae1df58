"""docs/performance.md is what script/performance makes of the committed records, and what it says is true."""

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


def test_the_page_is_made_from_the_records() -> None:
    done = subprocess.run(
        [sys.executable, "script/performance", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_records_it_says_so(script: dict[str, Any]) -> None:
    assert script["results"]({}) == "Nothing has been recorded yet."
    page = script["between_marks"]("a\n<!-- results:begin -->\nold\n<!-- results:end -->\nb", "new")
    assert page == "a\n<!-- results:begin -->\nnew\n<!-- results:end -->\nb"


def test_a_record_becomes_tables(script: dict[str, Any]) -> None:
    text = script["results"]({"engine": _record()})
    assert "An Engine, 2 threads, torch 2.11.0, float32, 0.25 TFLOP/s in large products; commit 0123456789." in text
    assert "| 16, 8, 50 (0.5) | reefknot | 1 | 2 | 0 | 1.0e-06 | yes |  |" in text
    assert "|  | CCE |  |  |  |  |  | not installed |" in text


def test_steps_have_their_seconds_of_an_epoch(script: dict[str, Any]) -> None:
    row = {"row": "tied", "mode": "captured", "ms": 12.6, "epoch_seconds": 8.719}
    text = script["results"]({"engine": _record(bench="steps", rows=[row])})
    titles, _, cells = text.splitlines()[-3:]
    found = dict(zip(titles.split(" | "), cells.split(" | "), strict=True))
    assert (found["ms"], found["s/epoch"]) == ("12.6", "8.72")


def test_a_sweep_becomes_a_figure(script: dict[str, Any]) -> None:
    record = json.loads(json.dumps(_record(vocabulary=True)))
    assert "(performance/engine.svg)" in script["results"]({"engine": record})
    svg = script["figure"](record)
    assert svg.count("stroke: #0e83c4; stroke-width: 3") == 3, "one line of time, one of memory, one in the legend"
    assert svg == script["figure"](record)
