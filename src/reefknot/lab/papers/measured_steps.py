"""Add measured training speeds to the rows of a recipe: seconds per epoch, and the speed-up over plain PyTorch.

`reefknot bench steps RECIPE --json FILE` measures the training steps of a recipe's rows (its experiments) and writes a
record to results/performance/. `read_measured_steps` reads these records, and `add_steps` adds them to the rows of a
table. docs/performance.md shows all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reefknot.errors import DataError
from reefknot.lab.papers.measured_figures import check_origin
from reefknot.lab.reports.rows import StepTimes, TableRow
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.result import RunResult
from reefknot.lab.runs.stored import parse
from reefknot.lab.runs.upgrade import upgrade_changes
from reefknot.storage.files import read_json

Conditions = tuple[str, frozenset[Change]]
"""What a measurement depends on: the device, and the changes to the recipe's settings."""
StepTimesByRow = Mapping[tuple[str, str, Conditions], StepTimes]
"""Measured times by recipe, row and conditions."""
_DURATION_SETTINGS = ("training.epochs", "training.updates")
"""Settings that do not affect the time of a step."""


def add_steps(recipe: str, rows: Iterable[TableRow], measured: StepTimesByRow) -> list[TableRow]:
    """Return the rows of a recipe with the measured time of their training steps.

    A row gets the steps that were measured on the device and with the settings of its runs. If its runs have different
    devices or settings, it gets no steps. A row without runs gets the steps for the most frequent device and settings
    of the recipe's runs. If the recipe has no runs, the rows get the steps for the most frequent device among records
    with unchanged settings, so that the rows of a table can be compared.
    """
    rows = list(rows)
    trained = Counter(_find_conditions(record) for row in rows for record in row.records)
    unchanged = Counter(conditions for name, _, conditions in measured if name == recipe and not conditions[1])
    most_common = {conditions for conditions, _ in (trained or unchanged).most_common(1)}
    timed = []
    for row in rows:
        row_conditions = {_find_conditions(record) for record in row.records} or most_common
        times = [measured.get((recipe, row.base_name, conditions)) for conditions in row_conditions]
        timed.append(replace(row, step_times=times[0] if len(times) == 1 else None))
    return timed


def _find_conditions(record: RunResult) -> Conditions:
    return record.training.device, _select_relevant(record.changed)


def _select_relevant(changes: Iterable[Change]) -> frozenset[Change]:
    """Return the changes that may affect the time of a step."""
    return frozenset(change for change in changes if change.key not in _DURATION_SETTINGS)


def read_measured_steps(folder: Path) -> dict[tuple[str, str, Conditions], StepTimes]:
    """Read the records in a folder, and return the steps by recipe, row and conditions.

    Our fastest step and the step in plain PyTorch are always from the same record. If several records measure a row,
    the record with the smallest speed-up is used. Records with overrides that do not list the changed settings are
    left out.
    """
    by_row: dict[tuple[str, str, Conditions], StepTimes] = {}
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if not isinstance(record, dict) or "rows" not in record:
            raise DataError(f"{path}: not a record of a benchmark; `reefknot bench WHAT --json {path}` writes one")
        changes = record.get("changed")
        if record.get("bench") != "steps" or (record.get("overrides") and changes is None):
            continue
        check_origin(path, record["environment"])
        for name, times in _read_step_times(record["rows"]).items():
            row_changes = upgrade_changes((changes or {}).get(name, ()))
            relevant_changes = _select_relevant(parse(Change, change, path) for change in row_changes)
            key = (record["recipe"], name, (record["machine"]["device"], relevant_changes))
            if key not in by_row or times.speedup <= by_row[key].speedup:
                by_row[key] = times
    return by_row


def _read_step_times(entries: Iterable[Mapping[str, Any]]) -> dict[str, StepTimes]:
    """Return the times of each row, from a record with one entry per row and kind of step.

    The first entry of a row is the step in plain PyTorch. Rows without that time, or without any other, are left out.
    """
    seconds_by_row: dict[str, list[float | None]] = {}
    for entry in entries:
        seconds_by_row.setdefault(entry["row"], []).append(entry["epoch_seconds"])
    step_times = {}
    for name, (plain_seconds, *other_seconds) in seconds_by_row.items():
        measured_seconds = [seconds for seconds in other_seconds if seconds]
        if plain_seconds and measured_seconds:
            fastest = min(measured_seconds)
            step_times[name] = StepTimes(fastest, plain_seconds / fastest)
    return step_times
