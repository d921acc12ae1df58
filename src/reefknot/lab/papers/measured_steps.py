"""Training speed of the rows of recipes, in seconds and relative to plain PyTorch, from records of training steps.

`reefknot bench steps RECIPE --json FILE` writes a record. Records are in results/performance/, and docs/performance.md
shows all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.papers.measured_figures import check_origin
from reefknot.lab.reports.rows import Steps, TableRow
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.result import RunResult
from reefknot.lab.runs.stored import parse
from reefknot.lab.runs.upgrade import upgrade_changes
from reefknot.storage.files import read_json

Circumstances = tuple[str, frozenset[Change]]
"""A device, and the changes to the recipe's settings."""
Measured = Mapping[tuple[str, str, Circumstances], Steps]
_LENGTH = ("training.epochs", "training.updates")
"""Settings that do not affect the time of a step."""


def with_steps(recipe: str, rows: Iterable[TableRow], measured: Measured) -> list[TableRow]:
    """Return the rows of a recipe with the measured time of their training steps.

    A row gets the steps that were measured on the device and with the settings of its runs. If its runs have different
    devices or settings, it gets no steps. A row without runs gets the steps for the most frequent device and settings
    of the recipe's runs. If the recipe has no runs, the rows get the steps for the most frequent device among records
    with unchanged settings, so that the rows of a table can be compared.
    """
    rows = list(rows)
    trained = Counter(_circumstances(record) for row in rows for record in row.records)
    unchanged = Counter(circumstances for name, _, circumstances in measured if name == recipe and not circumstances[1])
    usual = (trained or unchanged).most_common(1)
    timed = []
    for row in rows:
        wanted = {_circumstances(record) for record in row.records} or {circumstances for circumstances, _ in usual}
        steps = [measured.get((recipe, row.own_name, circumstances)) for circumstances in wanted]
        timed.append(replace(row, steps=steps[0] if len(steps) == 1 else None))
    return timed


def _circumstances(record: RunResult) -> Circumstances:
    return record.training.device, _relevant(record.changed)


def _relevant(changed: Iterable[Change]) -> frozenset[Change]:
    """Return the changes that may affect the time of a step."""
    return frozenset(change for change in changed if change.key not in _LENGTH)


def measured_steps(folder: Path) -> dict[tuple[str, str, Circumstances], Steps]:
    """Read the records in a folder, and return the steps by recipe, row and circumstances.

    Our fastest step and the step in plain PyTorch are always from the same record. If several records measure a row,
    the record with the smallest speed-up is used. Records with overrides that do not list the changed settings are
    left out.
    """
    by_row: dict[tuple[str, str, Circumstances], Steps] = {}
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if not isinstance(record, dict) or "rows" not in record:
            raise DataError(f"{path}: not a record of a benchmark; `reefknot bench WHAT --json {path}` writes one")
        changed = record.get("changed")
        if record.get("bench") != "steps" or (record.get("overrides") and changed is None):
            continue
        check_origin(path, record["environment"])
        seconds: dict[str, list[float | None]] = {}
        for row in record["rows"]:  # the plain step comes first
            seconds.setdefault(row["row"], []).append(row["epoch_seconds"])
        for name, (plain, *others) in seconds.items():
            if plain and (measured := [time for time in others if time]):
                changes = [parse(Change, change, path) for change in upgrade_changes((changed or {}).get(name, ()))]
                circumstances = record["machine"]["device"], _relevant(changes)
                ours, key = min(measured), (record["recipe"], name, circumstances)
                steps = Steps(ours, plain / ours)
                by_row[key] = min(steps, by_row.get(key, steps), key=lambda steps: steps.times_plain)
    return by_row
