"""How many times as fast as in plain torch the rows of recipes are trained, by records of whole training steps.

A record is what `reefknot bench steps RECIPE --json FILE` wrote, in results/performance/; docs/performance.md shows all
of it.
"""

from __future__ import annotations

from pathlib import Path

from reefknot.durable import read_json
from reefknot.errors import DataError
from reefknot.reports.measured_figures import refuse_untraceable


def times_plain(folder: Path) -> dict[tuple[str, str], float]:
    """By recipe and row: the time of a step as people write it over that of our fastest, in the same run.

    A record with other settings than the recipe's is left out; of several of one row the least is taken.
    """
    found: dict[tuple[str, str], float] = {}
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if not isinstance(record, dict) or "rows" not in record:
            raise DataError(f"{path}: no record of a bench; `reefknot bench WHAT --json {path}` writes one")
        if record.get("bench") != "steps" or record["overrides"]:
            continue
        refuse_untraceable(path, record["environment"])
        seconds: dict[str, list[float | None]] = {}
        for row in record["rows"]:  # as people write it comes first
            seconds.setdefault(row["row"], []).append(row["epoch_seconds"])
        for name, (plain, *ours) in seconds.items():
            if plain and (measured := [each for each in ours if each]):
                times, key = plain / min(measured), (record["recipe"], name)
                found[key] = min(times, found.get(key, times))
    return found
