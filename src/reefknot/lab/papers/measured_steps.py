"""How fast the rows of recipes are trained, in seconds and against plain torch, by records of whole training steps.

A record is what `reefknot bench steps RECIPE --json FILE` wrote, in results/performance/; docs/performance.md shows all
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.papers.measured_figures import refuse_untraceable
from reefknot.lab.reports.rows import Steps, TableRow
from reefknot.lab.runs.changes import Change
from reefknot.lab.runs.result import RunResult
from reefknot.lab.runs.stored import parse
from reefknot.lab.runs.upgrade import upgrade_changes
from reefknot.storage.files import read_json

Circumstances = tuple[str, frozenset[Change]]
"""A device, and the settings that were not the recipe's."""
Measured = Mapping[tuple[str, str, Circumstances], Steps]
_LENGTH = ("training.epochs", "training.updates")
"""Settings that do not change a step."""


def with_steps(recipe: str, rows: Iterable[TableRow], measured: Measured) -> list[TableRow]:
    """A recipe's rows, each with its steps as its runs had them: on their device, with their settings; none where these
    had several.

    Where a row has no runs they are those of most runs of the recipe, and where that has none either, of most of the
    rows that were measured with the recipe's own settings: a table holds its rows against each other.
    """
    rows = list(rows)
    trained = Counter(_circumstances(record) for row in rows for record in row.records)
    own = Counter(each for name, _, each in measured if name == recipe and not each[1])
    usual = (trained or own).most_common(1)
    found = []
    for row in rows:
        theirs = {_circumstances(record) for record in row.records} or {each for each, _ in usual}
        steps = [measured.get((recipe, row.own_name, each)) for each in theirs]
        found.append(replace(row, steps=steps[0] if len(steps) == 1 else None))
    return found


def _circumstances(record: RunResult) -> Circumstances:
    return record.training.device, _of_a_step(record.changed)


def _of_a_step(changed: Iterable[Change]) -> frozenset[Change]:
    return frozenset(change for change in changed if change.key not in _LENGTH)


def measured_steps(folder: Path) -> dict[tuple[str, str, Circumstances], Steps]:
    """By recipe, row and circumstances: our fastest step, and the time of one as people write it over that, in the same
    run; of several records of one row, the one where we gain least. Records that do not say what their overrides have
    changed are left out."""
    found: dict[tuple[str, str, Circumstances], Steps] = {}
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if not isinstance(record, dict) or "rows" not in record:
            raise DataError(f"{path}: no record of a bench; `reefknot bench WHAT --json {path}` writes one")
        changed = record.get("changed")
        if record.get("bench") != "steps" or (record.get("overrides") and changed is None):
            continue
        refuse_untraceable(path, record["environment"])
        seconds: dict[str, list[float | None]] = {}
        for row in record["rows"]:  # as people write it comes first
            seconds.setdefault(row["row"], []).append(row["epoch_seconds"])
        for name, (plain, *others) in seconds.items():
            if plain and (measured := [each for each in others if each]):
                changes = [parse(Change, each, path) for each in upgrade_changes((changed or {}).get(name, ()))]
                circumstances = record["machine"]["device"], _of_a_step(changes)
                ours, key = min(measured), (record["recipe"], name, circumstances)
                steps = Steps(ours, plain / ours)
                found[key] = min(steps, found.get(key, steps), key=lambda each: each.times_plain)
    return found
