"""How fast the rows of recipes are trained, in seconds and against plain torch, by records of whole training steps.

A record is what `reefknot bench steps RECIPE --json FILE` wrote, in results/performance/; docs/performance.md shows all
of it.
"""

from __future__ import annotations

from pathlib import Path

from reefknot.durable import read_json
from reefknot.errors import DataError
from reefknot.reports.measured_figures import refuse_untraceable
from reefknot.reports.rows import Steps


def measured_steps(folder: Path) -> dict[tuple[str, str], Steps]:
    """By recipe and row: our fastest step, and the time of one as people write it over that, in the same run.

    A record with other settings than the recipe's is left out; of several of one row, the one where we gain least is
    taken.
    """
    found: dict[tuple[str, str], Steps] = {}
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
                ours, key = min(measured), (record["recipe"], name)
                steps = Steps(ours, plain / ours)
                found[key] = min(steps, found.get(key, steps), key=lambda each: each.times_plain)
    return found
