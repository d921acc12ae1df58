"""Open the systems that `reefknot compare` compares: one row of a recipe each, trained with one or more seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reefknot.lab.tasks.requests import System


def open_system(path: Path) -> System:
    """Return the finished runs below a path; raise an error if they differ in more than the seed."""
    from reefknot.errors import DataError, SettingsError
    from reefknot.lab.reports.results import collect_runs
    from reefknot.lab.reports.rows import group_by_row
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks.requests import System

    groups = group_by_row(collect_runs([path]))
    if len(groups) > 1:
        a, b, *_ = (runs[0].folder if len(runs) == 1 else runs[0].folder.parent for runs in groups.values())
        raise SettingsError(
            f"{path} holds runs that differ in more than the seed: {'; '.join(groups)}; a folder is read as one "
            f"system, so name one folder per system: reefknot compare {a} {b}"
        )
    (results,) = groups.values()
    finished = [result for result in results if result.record is not None]
    if not finished:
        raise DataError(f"{path}: training is not finished, so there is nothing to compare yet")
    folders = {result.seed: result.folder for result in finished}
    for result in finished:
        if result.folder != folders[result.seed]:
            raise SettingsError(
                f"{result.folder} and {folders[result.seed]} both have seed {result.seed}; leave one of them out"
            )
    runs = [RunFolder.open(folder) for folder in folders.values()]
    return System(path, runs, seeds=len({result.seed for result in results}))
