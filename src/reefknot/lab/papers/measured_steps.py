"""Add measured training speeds to the rows of a recipe: seconds per epoch, and the speed-up over plain PyTorch.

A recipe is a file of experiments, and each of its experiments is a row. `reefknot bench steps RECIPE --json FILE`
measures the training steps of a recipe's rows; the records are kept in results/performance/:

    step_times = read_measured_steps(Path("results/performance"))
    rows = add_steps("press2017/table6", rows, step_times)

docs/performance.md shows all records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from reefknot.errors import DataError
from reefknot.lab.papers.measured_figures import check_origin
from reefknot.lab.reports.rows import StepTimes, TableRow
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.result import RunResult
from reefknot.lab.runs.stored import parse
from reefknot.lab.runs.upgrade import upgrade_changes
from reefknot.storage.files import read_json


class Conditions(NamedTuple):
    """What a measurement depends on."""

    device: str
    changes: frozenset[Change]
    """Changes to the recipe's settings that may affect the time of a step."""


class MeasuredRow(NamedTuple):
    """A row of a recipe under some conditions."""

    recipe: str
    row: str
    conditions: Conditions


_COMPETITOR_MODE = "compiled torch"
"""Kind of step that is neither ours nor the step in plain PyTorch that ours is compared with."""
_DURATION_SETTINGS = ("training.epochs", "training.updates")
"""Settings that do not affect the time of a step."""


def read_measured_steps(folder: Path) -> dict[MeasuredRow, StepTimes]:
    """Read the benchmark records in a folder, and return the measured times.

    Our fastest step and the step in plain PyTorch are always from the same record. If several records measure a row,
    the record with the smallest speed-up is used. Records with overrides that do not list the changed settings are
    left out.
    """
    step_times: dict[MeasuredRow, StepTimes] = {}
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if not isinstance(record, dict) or "rows" not in record:
            raise DataError(f"{path}: not a record of a benchmark; `reefknot bench WHAT --json {path}` writes one")

        changes_by_row = record.get("changed")
        has_unknown_changes = record.get("overrides") and changes_by_row is None
        if record.get("bench") != "steps" or has_unknown_changes:
            continue
        check_origin(path, record["environment"])

        for row_name, times in _read_step_times(record["rows"]).items():
            stored_changes = (changes_by_row or {}).get(row_name, ())
            changes = [parse(Change, change, path) for change in upgrade_changes(stored_changes)]
            conditions = Conditions(record["machine"]["device"], _select_relevant(changes))
            key = MeasuredRow(record["recipe"], row_name, conditions)
            if key not in step_times or times.speedup <= step_times[key].speedup:
                step_times[key] = times
    return step_times


def _read_step_times(entries: Iterable[Mapping[str, Any]]) -> dict[str, StepTimes]:
    """Return the times of each row, from a record with one entry per row and kind of step.

    The first entry of a row is the step in plain PyTorch. Rows without that time, or without any other, are left out.
    """
    seconds_by_row: dict[str, list[float | None]] = {}
    for entry in entries:
        if entry.get("mode") == _COMPETITOR_MODE:
            continue
        seconds_by_row.setdefault(entry["row"], []).append(entry["epoch_seconds"])

    step_times = {}
    for row_name, (plain_seconds, *other_seconds) in seconds_by_row.items():
        measured_seconds = [seconds for seconds in other_seconds if seconds]
        if plain_seconds and measured_seconds:
            fastest_seconds = min(measured_seconds)
            step_times[row_name] = StepTimes(fastest_seconds, plain_seconds / fastest_seconds)
    return step_times


def add_steps(recipe: str, rows: Iterable[TableRow], measured: Mapping[MeasuredRow, StepTimes]) -> list[TableRow]:
    """Return the rows of a recipe with the measured time of their training steps.

    A row gets the steps that were measured on the device and with the settings of its runs. If its runs have different
    devices or settings, it gets no steps. A row without runs gets the steps for the most frequent device and settings
    of the recipe's runs. If the recipe has no runs, the rows get the steps for the most frequent device among records
    with unchanged settings, so that the rows of a table can be compared.
    """
    rows = list(rows)

    # Find the conditions for rows without runs.
    run_conditions = Counter(_find_conditions(record) for row in rows for record in row.records)
    recipe_conditions = [key.conditions for key in measured if key.recipe == recipe]
    unchanged_conditions = Counter(conditions for conditions in recipe_conditions if not conditions.changes)
    most_common = (run_conditions or unchanged_conditions).most_common(1)
    default_conditions = {conditions for conditions, _ in most_common}

    timed_rows = []
    for row in rows:
        conditions_of_row = {_find_conditions(record) for record in row.records} or default_conditions
        step_times = None
        if len(conditions_of_row) == 1:
            (conditions,) = conditions_of_row
            step_times = measured.get(MeasuredRow(recipe, row.base_name, conditions))
        timed_rows.append(replace(row, step_times=step_times))
    return timed_rows


def _find_conditions(record: RunResult) -> Conditions:
    """Return the conditions under which a run was trained."""
    return Conditions(record.training.device, _select_relevant(record.changed))


def _select_relevant(changes: Iterable[Change]) -> frozenset[Change]:
    """Return the changes that may affect the time of a step."""
    return frozenset(change for change in changes if change.key not in _DURATION_SETTINGS)
