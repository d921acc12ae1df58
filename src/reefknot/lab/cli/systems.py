"""Open the systems that `reefknot compare` compares.

A system is one row of a recipe (one experiment), trained with one or more seeds. It is named by a folder: either the
folder of one run, or a folder that holds one run per seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reefknot.lab.reports.results import Result
    from reefknot.lab.tasks.requests import System


def open_system(path: Path) -> System:
    """Return the finished runs in a folder as one system; raise an error if they differ in more than the seed."""
    from reefknot.errors import DataError, SettingsError
    from reefknot.lab.reports.results import collect_runs
    from reefknot.lab.reports.rows import group_by_row
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.tasks.requests import System

    groups = group_by_row(collect_runs([path]))
    if len(groups) > 1:
        folders = [runs[0].folder if len(runs) == 1 else runs[0].folder.parent for runs in groups.values()]
        raise SettingsError(
            f"{path} holds runs that differ in more than the seed: {'; '.join(groups)}; a folder is read as one "
            f"system, so pass one folder per system: reefknot compare {folders[0]} {folders[1]}"
        )
    (results,) = groups.values()
    finished = [result for result in results if result.record is not None]
    if not finished:
        raise DataError(f"{path}: training is not finished, so there is nothing to compare yet")
    folder_by_seed = _folders_by_seed(finished)
    runs = [RunFolder.open(folder) for folder in folder_by_seed.values()]
    return System(path, runs, seeds=len({result.seed for result in results}))


def _folders_by_seed(results: Sequence[Result]) -> dict[int, Path]:
    """Return the run folder of each seed; raise an error if two runs have the same seed."""
    from reefknot.errors import SettingsError

    folder_by_seed = {result.seed: result.folder for result in results}
    for result in results:
        other_folder = folder_by_seed[result.seed]
        if result.folder != other_folder:
            raise SettingsError(
                f"{result.folder} and {other_folder} both have seed {result.seed}; leave one of them out"
            )
    return folder_by_seed
