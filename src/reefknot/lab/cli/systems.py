"""Open the systems that `reefknot compare` compares.

A system is one row of a recipe (one experiment), trained with one or more seeds. It is named by a folder: either the
folder of one run, or a folder that holds one run per seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reefknot.lab.runs.loading import Result
    from reefknot.lab.tasks.requests import System


def open_system(path: Path) -> System:
    """Return the finished runs in a folder as one system; raise an error if they differ in more than the seed."""
    from reefknot.errors import DataError, SettingsError
    from reefknot.lab.reports.rows import group_by_row
    from reefknot.lab.runs.folder import RunFolder
    from reefknot.lab.runs.loading import collect_runs
    from reefknot.lab.tasks.requests import System

    results_by_row = group_by_row(collect_runs([path]))
    if len(results_by_row) > 1:
        # Suggest a folder for each system: its only run, or the folder that holds its runs.
        system_folders = []
        for row_results in results_by_row.values():
            folder = row_results[0].folder
            system_folders.append(folder if len(row_results) == 1 else folder.parent)
        raise SettingsError(
            f"{path} holds runs that differ in more than the seed: {'; '.join(results_by_row)}; a folder is read as "
            f"one system, so pass one folder per system: reefknot compare {system_folders[0]} {system_folders[1]}"
        )

    (results,) = results_by_row.values()
    finished_results = [result for result in results if result.record is not None]
    if not finished_results:
        raise DataError(f"{path}: training is not finished, so there is nothing to compare yet")
    folder_by_seed = _find_folders_by_seed(finished_results)
    runs = [RunFolder.open(folder) for folder in folder_by_seed.values()]
    num_seeds = len({result.seed for result in results})  # with the seeds whose training is not finished
    return System(path, runs, seeds=num_seeds)


def _find_folders_by_seed(results: Sequence[Result]) -> dict[int, Path]:
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
