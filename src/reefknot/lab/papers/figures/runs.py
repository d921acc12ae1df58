"""Select the runs for a figure, from the given folders or from the default folder."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.papers.figures.contract import Figure
from reefknot.lab.recipes.file import find_recipe, read_recipe_file
from reefknot.lab.reports.results import Result, collect, differing, distinguishing
from reefknot.lab.reports.rows import TableRow, group
from reefknot.lab.reports.table import changed_settings
from reefknot.lab.tasks import load_task

RUNS = Path("runs")
"""The default folder of `reefknot train` and `reefknot table`."""


@dataclass(frozen=True)
class Rows:
    """Rows of one recipe that a figure shows."""

    recipe: str
    selection: str
    """The recipe that the figure names. It may be a selection of rows of `recipe`."""
    names: tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    """The runs of a figure, with notes on how they were chosen."""

    runs: list[Result]
    notes: list[str]


def rows_of(figure: Figure) -> list[Rows]:
    """Return the rows that a figure shows, by recipe."""
    return [_rows(name) for name in figure.recipes]


def choose(figure: Figure, named: Sequence[Path]) -> Chosen:
    """Choose the runs of a figure.

    These are the runs of the figure's rows or of its stand-in. If there are none, these are the given runs of a task
    that the figure can show.

    Args:
        figure: The figure.
        named: Folders with runs. If it is empty, the default folder is searched.
    """
    results = collect(named) if named else _default(figure)
    finished = [result for result in results if result.record]
    unfinished = [f"left out, not finished: {result.folder}" for result in results if not result.record]
    chosen, reason = among(figure, finished), "not rows of the figure"
    if chosen is None:
        chosen, reason = _others(figure, finished, named), f"not {_nouns(figure.tasks)}"
    taken = {result.folder for result in chosen.runs}
    unused = Counter(result.recipe or str(result.folder) for result in finished if result.folder not in taken)
    counts = ", ".join(f"{recipe} ({count} run{'s' * (count > 1)})" for recipe, count in unused.items())
    left_out = [f"left out, {reason}: {counts}"] if named and unused else []
    changed = changed_settings([TableRow(name, results=results) for name, results in group(chosen.runs).items()])
    return _with_weights(figure, Chosen(chosen.runs, [*chosen.notes, *changed, *left_out, *unfinished]))


def _others(figure: Figure, finished: Sequence[Result], named: Sequence[Path]) -> Chosen:
    """Choose given runs of other rows, if the figure can show their task."""
    runs = [result for result in finished if named and result.task in figure.tasks]
    if not runs:
        if not named:
            problem = f"there are no runs of its rows in {RUNS}/"
        elif not finished:
            problem = "the given runs are not finished"
        else:
            problem = f"it shows {_nouns(figure.tasks)}, but {finished[0].folder} is {_nouns([finished[0].task])}"
        commands = "; ".join(map(_command, rows_of(figure)))
        raise DataError(f"{figure.name}: {problem}; name run folders, or train them: {commands}")
    return Chosen(runs, [_standing_in(figure.recipes, runs)])


def _nouns(tasks: Sequence[str]) -> str:
    """Return the names of tasks for a message, such as "a language model or a run of skip-gram"."""
    return " or ".join(load_task(task).noun for task in tasks)


def _with_weights(figure: Figure, chosen: Chosen) -> Chosen:
    """Raise a DataError if the figure reads weights and a run has no weights."""
    bare = [str(run.folder) for run in chosen.runs if not (run.folder / "checkpoints").is_dir()]
    if figure.needs == "weights" and bare:
        raise DataError(f"{figure.name} needs weights, but {bare[0]} has none; name the folder in which it was trained")
    return chosen


def among(figure: Figure, results: Sequence[Result]) -> Chosen | None:
    """Return the finished runs of the figure's rows, in their order; None if there are none.

    If the last of its recipes has no runs, the runs of its stand-in are used instead.
    """
    *others, last = rows_of(figure)
    spare = [_rows(figure.stand_in)] if figure.stand_in and not _runs_of([last], results) else []
    stand_ins = _runs_of(spare, results)
    rows = others if stand_ins else [*others, last]
    runs = [*_runs_of(rows, results), *stand_ins]
    notes = [_standing_in([last.selection], stand_ins)] if stand_ins else []
    return Chosen(runs, [*notes, *_missing(rows, runs)]) if runs else None


def _standing_in(recipes: Sequence[str], runs: Sequence[Result]) -> str:
    """Return the note that runs of other recipes are shown."""
    ours = ", ".join(dict.fromkeys(result.recipe or str(result.folder) for result in runs))
    return f"runs of {ours} are shown in place of the rows of {' and '.join(recipes)}"


def _runs_of(rows: Sequence[Rows], results: Sequence[Result]) -> list[Result]:
    """Return the finished runs of some rows, in the order of the rows."""
    wanted = [(selected.recipe, name) for selected in rows for name in selected.names]
    matches = [result for result in results if result.record and (result.recipe, result.row) in wanted]
    return sorted(matches, key=lambda result: (wanted.index((result.recipe, result.row)), result.seed))


def check_one_row(runs: Sequence[Result]) -> None:
    """Raise a DataError unless the runs are of one row and differ only in the seed, so that they can be averaged."""
    seeds: dict[int, Result] = {}
    for result in runs:
        first = next(iter(seeds.values()), result)
        pair = f"{first.folder} and {result.folder}"
        if (first.recipe, first.row) != (result.recipe, result.row):
            raise DataError(f"{pair} are runs of different rows, so they cannot be averaged; name runs of one row")
        if changed := differing([distinguishing(run.settings) for run in (first, result)]):
            raise DataError(f"{pair} are runs of one row but differ in {changed[0]}; name runs with equal settings")
        twin = seeds.setdefault(result.seed, result)
        if twin is not result:
            raise DataError(f"{twin.folder} and {result.folder} have the same row and seed; name one of them")


def _rows(name: str) -> Rows:
    path, known_as = find_recipe(name)
    file = read_recipe_file(path, name)
    return Rows(file.extends or known_as, name, tuple(row.name for row in file.rows if row.trained))


def _default(figure: Figure) -> list[Result]:
    rows = [*rows_of(figure), *([_rows(figure.stand_in)] if figure.stand_in else [])]
    recipes = dict.fromkeys(selected.recipe for selected in rows)
    folders = [folder for name in recipes if (folder := RUNS / name).is_dir()]
    return collect(folders) if folders else []


def _missing(rows: Sequence[Rows], runs: Sequence[Result]) -> list[str]:
    """Return notes on rows without runs, with the commands that train them."""
    trained = {(result.recipe, result.row) for result in runs}
    notes = []
    for selected in rows:
        absent = [name for name in selected.names if (selected.recipe, name) not in trained]
        if absent:
            names = ", ".join(f'"{name}"' for name in absent)
            notes.append(f"no run of {names}; this command trains them: {_command(selected, absent)}")
    return notes


def _command(rows: Rows, absent: Sequence[str] = ()) -> str:
    """Return the command that trains the rows, or only the absent ones."""
    some = absent if len(absent) < len(rows.names) else ()
    return " ".join(["reefknot table", rows.selection, *(f"--row {shlex.quote(name)}" for name in some), "--data DIR"])
