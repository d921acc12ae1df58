"""How fast the rows of recipes are trained, in seconds and against plain torch, by records of whole training steps.

A record is what `reefknot bench steps RECIPE --json FILE` wrote, in results/performance/; docs/performance.md shows all
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from reefknot.durable import read_json
from reefknot.errors import DataError
from reefknot.reports.measured_figures import refuse_untraceable
from reefknot.reports.rows import Steps, TableRow

Measured = Mapping[tuple[str, str, str], Steps]


def with_steps(recipe: str, rows: Iterable[TableRow], measured: Measured) -> list[TableRow]:
    """A recipe's rows, each with its steps on the device that its runs had, and none where these had several.

    Where a row has no runs it is the device of most runs of the recipe, and where that has none either, of most of its
    measured rows: a table holds its rows against each other.
    """
    rows = list(rows)
    trained = Counter(record.training.device for row in rows for record in row.records)
    usual = (trained or Counter(device for name, _, device in measured if name == recipe)).most_common(1)
    found = []
    for row in rows:
        devices = {record.training.device for record in row.records} or {device for device, _ in usual}
        steps = [measured.get((recipe, row.own_name, device)) for device in devices]
        found.append(replace(row, steps=steps[0] if len(steps) == 1 else None))
    return found


def measured_steps(folder: Path) -> dict[tuple[str, str, str], Steps]:
    """By recipe, row and device: our fastest step, and the time of one as people write it over that, in the same run.

    A record with other settings than the recipe's is left out; of several of one row on one device, the one where we
    gain least is taken.
    """
    found: dict[tuple[str, str, str], Steps] = {}
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if not isinstance(record, dict) or "rows" not in record:
            raise DataError(f"{path}: no record of a bench; `reefknot bench WHAT --json {path}` writes one")
        if record.get("bench") != "steps" or record.get("overrides"):
            continue
        refuse_untraceable(path, record["environment"])
        seconds: dict[str, list[float | None]] = {}
        for row in record["rows"]:  # as people write it comes first
            seconds.setdefault(row["row"], []).append(row["epoch_seconds"])
        for name, (plain, *others) in seconds.items():
            if plain and (measured := [each for each in others if each]):
                ours, key = min(measured), (record["recipe"], name, record["machine"]["device"])
                steps = Steps(ours, plain / ours)
                found[key] = min(steps, found.get(key, steps), key=lambda each: each.times_plain)
    return found
