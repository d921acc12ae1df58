"""Seconds per epoch and speed relative to plain torch, from step records with the recipe's settings and known code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_results import change, result, write_run, write_runs
from reefknot.errors import DataError
from reefknot.lab.papers.measured_steps import Conditions, MeasuredRow, add_steps, read_measured_steps
from reefknot.lab.reports.rows import StepTimes, TableRow, join_runs, time_ratios
from reefknot.lab.reports.table import to_markdown
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.loading import collect_runs

NO_CHANGES: frozenset[Change] = frozenset()
"""The settings of the recipe, without changes."""


def measured_row(recipe: str, row: str, device: str) -> MeasuredRow:
    return MeasuredRow(recipe, row, Conditions(device, NO_CHANGES))


def write_record(
    folder: Path, name: str = "gpu", seconds: tuple[float | None, ...] = (40.0, 12.0, 8.0), **changes: Any
) -> None:
    modes = ("plain loop", "eager", "captured")
    record = {
        "bench": "steps",
        "machine": {"device": "H200"},
        "environment": {"commit": "0123456789abcdef", "command": "reefknot bench steps", "dirty": None},
        "recipe": "pappas2019/table3",
        "overrides": [],
        "rows": [
            {"row": "tied", "mode": mode, "epoch_seconds": value} for mode, value in zip(modes, seconds, strict=True)
        ],
    }
    (folder / f"{name}.json").write_text(json.dumps(record | changes))


def test_fastest_step_counts(tmp_path: Path) -> None:
    assert read_measured_steps(tmp_path) == {}
    write_record(tmp_path)
    assert read_measured_steps(tmp_path) == {measured_row("pappas2019/table3", "tied", "H200"): StepTimes(8.0, 5.0)}
    write_record(tmp_path, seconds=(40.0, 50.0, None))
    assert read_measured_steps(tmp_path) == {measured_row("pappas2019/table3", "tied", "H200"): StepTimes(50.0, 0.8)}, (
        "a factor below 1 is shown too"
    )


def test_slowest_of_several_records_counts(tmp_path: Path) -> None:
    for name, captured in (("a", 8.0), ("b", 10.0), ("c", 9.0)):
        write_record(tmp_path, name, (40.0, 20.0, captured))
    assert read_measured_steps(tmp_path) == {measured_row("pappas2019/table3", "tied", "H200"): StepTimes(10.0, 4.0)}


def test_devices_are_kept_separate(tmp_path: Path) -> None:
    write_record(tmp_path)
    write_record(tmp_path, "cpu", (900.0, 600.0, None), machine={"device": "Xeon"})
    assert read_measured_steps(tmp_path) == {
        measured_row("pappas2019/table3", "tied", "H200"): StepTimes(8.0, 5.0),
        measured_row("pappas2019/table3", "tied", "Xeon"): StepTimes(600.0, 1.5),
    }


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (("A100", "A100"), {"Small": 2.0, "Small + WT": None, "not run": 4.0}),
        (("A100", "Xeon"), {"Small": None, "Small + WT": None, "not run": 4.0}),
        (("H200", "H200"), {"Small": None, "Small + WT": None, "not run": None}),
        ((), {"Small": 3.0, "Small + WT": 5.0, "not run": None}),
    ],
)
def test_steps_of_another_device_are_not_used_for_runs(
    tmp_path: Path, devices: tuple[str, ...], expected: dict[str, float | None]
) -> None:
    """Without runs, the device with the most measured rows is used: the Xeon."""
    for seed, device in enumerate(devices):
        write_run(tmp_path, "Small", seed, result("Small", seed, training={"device": device}))
    rows = join_runs([TableRow(name) for name in expected], collect_runs([tmp_path]) if devices else [])
    speedups = {("Small", "A100"): 2.0, ("Small", "Xeon"): 3.0, ("not run", "A100"): 4.0}
    speedups |= {("Small + WT", "Xeon"): 5.0, ("other", "Xeon"): 6.0}
    measured = {
        measured_row("a/b", name, device): StepTimes(1.0, speedup) for (name, device), speedup in speedups.items()
    }
    for device in ("H200", "A100", "Xeon"):
        measured[measured_row("other", "Small", device)] = StepTimes(1.0, 7.0)
    rows_with_steps = add_steps("a/b", rows, measured)
    assert {row.name: row.step_times and row.step_times.speedup for row in rows_with_steps} == expected


def test_steps_count_for_runs_with_the_same_settings(tmp_path: Path) -> None:
    """The training length may differ. Untrained rows match the recipe's settings or those of trained rows."""
    performance, runs = tmp_path / "performance", tmp_path / "runs"
    performance.mkdir()
    plain, fast = (
        [{"row": "Small", "epoch_seconds": value} for value in times] for times in ((40.0, 8.0), (44.0, 4.0))
    )
    write_record(performance, recipe="a/b", rows=plain)
    precision, fewer = change("training.precision", "float32", "bfloat16"), change("training.epochs", 60, 25)
    overrides = ["training.precision='bfloat16'", "training.epochs=1"]
    changed_as_text = {
        "Small": ['training.precision: "float32" -> "bfloat16"', "training.epochs: 60 -> 1"]
    }  # the older text format
    write_record(performance, "fast", recipe="a/b", rows=fast, overrides=overrides, changed=changed_as_text)
    write_record(performance, "untold", recipe="a/b", rows=fast, overrides=["training.batch=8"])
    measured = read_measured_steps(performance)
    rows = [TableRow("Small"), TableRow("Small + WT")]
    assert [row.step_times for row in add_steps("a/b", rows, measured)] == [StepTimes(8.0, 5.0), None]
    for seed, (changed, expected) in enumerate(
        [
            ((), StepTimes(8.0, 5.0)),
            ((fewer,), StepTimes(8.0, 5.0)),
            ((fewer, precision), StepTimes(4.0, 11.0)),
            ((precision, change("training.batch", 20, 8)), None),
        ]
    ):
        folder = runs / str(seed)
        for name in ("Small", "Small + WT"):
            write_run(folder / name, name, seed, result(name, seed, changed=changed, training={"device": "H200"}))
        trained = add_steps("a/b", join_runs(rows, collect_runs([folder])), measured)
        assert [row.step_times for row in trained] == [expected, None]
        untrained = add_steps("a/b", join_runs(rows, collect_runs([folder / "Small + WT"])), measured)
        assert [row.step_times for row in untrained] == [expected, None], "like the trained rows"


@pytest.mark.parametrize(
    "changes",
    [
        {"overrides": ["training.batch=8"]},
        {"bench": "encoders"},
        {"seconds": (None, 12.0, 8.0)},
        {"seconds": (40.0, None, None)},
    ],
)
def test_unusable_step_records_are_ignored(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_record(tmp_path, **changes)
    assert read_measured_steps(tmp_path) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"command": "reefknot bench"}}, "gpu.json: no commit recorded for it"),
        ({"environment": {"command": "a", "commit": "b", "dirty": True}}, "uncommitted changes; commit and run"),
    ],
)
def test_untraceable_step_record_is_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_record(tmp_path, **changes)
    with pytest.raises(DataError, match=message):
        read_measured_steps(tmp_path)


def test_file_that_is_not_a_benchmark_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match="not a record of a benchmark; `reefknot bench WHAT --json"):
        read_measured_steps(tmp_path)


def test_step_columns_are_shown_only_if_measured() -> None:
    rows = [TableRow("tied", step_times=StepTimes(8.72, 4.72)), TableRow("untied")]
    text = to_markdown(rows)
    assert "| row | test | s/epoch alone | x plain torch |" in text
    assert "| tied | not run | 8.72 | 4.7 |\n| untied | not run |  |  |" in text
    assert "s/epoch alone: the time of our fastest training step with nothing else on the device" in text
    assert "x plain torch: the time of a training step in plain PyTorch" in text
    assert "x plain torch" not in to_markdown(rows[1:])


def test_table_of_seconds_uses_steps_for_untrained_rows() -> None:
    steps = {"AWD": StepTimes(8.0, 4.7), "AWD + DRILL": StepTimes(10.0, 5.0)}
    rows = [
        TableRow(name, {"seconds": 47.0}, step_times=measured_steps_of_row)
        for name, measured_steps_of_row in steps.items()
    ]
    text = to_markdown([*rows, TableRow("AWD + mixture", {"seconds": 139.0})])
    assert "| AWD | 8.00 | 47 | 1.00 | 1.00 | 4.7 |\n| AWD + DRILL | 10.0 | 47 | 1.25 | 1.00 | 5.0 |" in text
    assert "| AWD + mixture | not run | 139 |  | 2.96 |  |" in text
    assert "s/epoch: for a row that was not trained, the time of our fastest training step" in text


def test_seconds_of_runs_and_of_steps_are_not_compared(tmp_path: Path) -> None:
    runs = write_runs(tmp_path / "runs")
    trained = TableRow("Small", {"seconds": 47.0}, results=tuple(collect_runs([runs / "press2017/table6/small"])))
    measured = TableRow("other", {"seconds": 94.0}, step_times=StepTimes(8.0, 4.7))
    assert trained.epoch_seconds
    assert time_ratios([trained, measured], measured) == (None, 2.0)
    assert time_ratios([trained, measured], trained) == (1.0, 1.0)
    both = replace(trained, step_times=StepTimes(4.0, 4.7))
    assert time_ratios([both, measured], measured) == (2.0, 2.0), "both have steps"
