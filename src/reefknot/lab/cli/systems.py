"""What `reefknot compare` compares: systems, each of them the runs of one or more seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reefknot.lab.runs.folder import RunFolder


@dataclass(frozen=True)
class System:
    """A or B: the finished runs below a path, which differ in nothing but the seed."""

    path: Path
    runs: list[RunFolder]
    seeds: int
    """Those that are not finished included."""

    def __str__(self) -> str:
        count = "1 seed" if self.seeds == 1 else f"{self.seeds} seeds"
        return f"{self.path} ({count if len(self.runs) == self.seeds else f'{len(self.runs)} of {count} finished'})"


def open_system(path: Path) -> System:
    """The finished runs below `path`; those of several rows are refused, and a seed that is there twice."""
    from reefknot.errors import DataError, SettingsError
    from reefknot.lab.reports.results import collect
    from reefknot.lab.reports.rows import group
    from reefknot.lab.runs.folder import RunFolder

    groups = group(collect([path]))
    if len(groups) > 1:
        a, b, *_ = (runs[0].folder if len(runs) == 1 else runs[0].folder.parent for runs in groups.values())
        raise SettingsError(
            f"{path} holds runs that differ in more than the seed: {'; '.join(groups)}; a folder is read as one "
            f"system, so name one each: reefknot compare {a} {b}"
        )
    (results,) = groups.values()
    finished = [result for result in results if result.record is not None]
    if not finished:
        raise DataError(f"{path}: training is not finished, so there is nothing to compare yet")
    folders = {result.seed: result.folder for result in finished}
    for result in finished:
        if result.folder != folders[result.seed]:
            raise SettingsError(
                f"{result.folder} and {folders[result.seed]} are the same seed, {result.seed}, twice; leave one out"
            )
    runs = [RunFolder.open(folder) for folder in folders.values()]
    return System(path, runs, seeds=len({result.seed for result in results}))
