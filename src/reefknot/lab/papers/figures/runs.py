"""Select the runs that a figure shows, from folders that the user names or from the default folder.

A figure shows rows (experiments) of one or more recipes. If there are no runs of these rows, it can show runs of its
fallback recipe. There are two functions to start with:

    select_runs         for `reefknot figure`; raises an error if there is nothing to show
    find_figure_runs    for the report; returns None if there is nothing to show

Both return the runs with notes, for example on rows without runs.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.papers.figures.contract import Figure
from reefknot.lab.recipes.file import find_recipe, read_recipe_file
from reefknot.lab.reports.rows import TableRow, group_by_row
from reefknot.lab.reports.table import changed_settings
from reefknot.lab.runs.loading import Result, collect_runs, differing_keys, distinguishing_settings
from reefknot.lab.tasks import load_task

DEFAULT_FOLDER = Path("runs")
"""The default folder of `reefknot train` and `reefknot table`."""


@dataclass(frozen=True)
class FigureRows:
    """Rows of one recipe that a figure shows."""

    recipe: str
    """The recipe whose runs are shown."""
    selection: str
    """The recipe that the figure names. It may be a selection of rows of `recipe`."""
    names: tuple[str, ...]
    """The names of the rows."""


@dataclass(frozen=True)
class SelectedRuns:
    """The runs of a figure, with notes on how they were selected."""

    runs: list[Result]
    notes: list[str]


def figure_rows(figure: Figure) -> list[FigureRows]:
    """Return the rows that a figure shows, by recipe."""
    return [_read_rows(name) for name in figure.recipes]


def select_runs(figure: Figure, folders: Sequence[Path]) -> SelectedRuns:
    """Select the runs of a figure.

    These are the runs of the figure's rows or of its fallback recipe. If there are none, these are the given runs of a
    task (kind of experiment) that the figure can show.

    Args:
        figure: The figure.
        folders: Folders with runs. If it is empty, the default folder is searched.
    """
    results = collect_runs(folders) if folders else _collect_default_runs(figure)
    finished = [result for result in results if result.record]

    selected = find_figure_runs(figure, finished)
    reason_left_out = "not rows of the figure"
    if selected is None:
        selected = _select_other_rows(figure, finished, folders)
        reason_left_out = f"not {_nouns(figure.tasks)}"
    _check_weights(figure, selected.runs)

    # Add notes on changed settings and on the runs that are not shown.
    notes = list(selected.notes)
    rows = [TableRow(name, results=row_results) for name, row_results in group_by_row(selected.runs).items()]
    notes += changed_settings(rows)
    selected_folders = {result.folder for result in selected.runs}
    unused = [result for result in finished if result.folder not in selected_folders]
    if folders and unused:
        notes.append(f"left out, {reason_left_out}: {_count_runs(unused)}")
    notes += [f"left out, not finished: {result.folder}" for result in results if not result.record]
    return SelectedRuns(selected.runs, notes)


def _count_runs(runs: Sequence[Result]) -> str:
    """Return the number of runs of each recipe: "demo (2 runs), inan2017/table1 (1 run)"."""
    run_counts = Counter(run.recipe or str(run.folder) for run in runs)
    return ", ".join(f"{recipe} ({count} run{'s' if count > 1 else ''})" for recipe, count in run_counts.items())


def _select_other_rows(figure: Figure, finished: Sequence[Result], folders: Sequence[Path]) -> SelectedRuns:
    """Select given runs of other rows, if the figure can show their task. Raise a DataError if there are none."""
    runs = [result for result in finished if folders and result.task in figure.tasks]
    if runs:
        return SelectedRuns(runs, [_substitution_note(figure.recipes, runs)])

    if not folders:
        problem = f"there are no runs of its rows in {DEFAULT_FOLDER}/"
    elif not finished:
        problem = "the given runs are not finished"
    else:
        problem = f"it shows {_nouns(figure.tasks)}, but {finished[0].folder} is {_nouns([finished[0].task])}"
    commands = "; ".join(map(_format_command, figure_rows(figure)))
    raise DataError(f"{figure.name}: {problem}; pass run folders, or train them: {commands}")


def _nouns(tasks: Sequence[str]) -> str:
    """Return the names of tasks for a message, such as "a language model or a run of skip-gram"."""
    return " or ".join(load_task(task).noun for task in tasks)


def _check_weights(figure: Figure, runs: Sequence[Result]) -> None:
    """Raise a DataError if the figure reads weights and a run has no weights."""
    without_weights = [run.folder for run in runs if not (run.folder / "checkpoints").is_dir()]
    if figure.needs == "weights" and without_weights:
        raise DataError(
            f"{figure.name} needs weights, but {without_weights[0]} has none; pass the folder in which it was trained"
        )


def find_figure_runs(figure: Figure, results: Sequence[Result]) -> SelectedRuns | None:
    """Return the finished runs of the figure's rows, in their order; None if there are none.

    If the last of its recipes has no runs, the runs of its fallback recipe are used instead.
    """
    *other_rows, last_rows = figure_rows(figure)
    fallback_runs: list[Result] = []
    if figure.fallback_recipe and not _filter_runs([last_rows], results):
        fallback_runs = _filter_runs([_read_rows(figure.fallback_recipe)], results)

    notes = []
    rows = [*other_rows, last_rows]
    if fallback_runs:
        rows = other_rows
        notes.append(_substitution_note([last_rows.selection], fallback_runs))
    runs = [*_filter_runs(rows, results), *fallback_runs]
    if not runs:
        return None
    return SelectedRuns(runs, [*notes, *_missing_row_notes(rows, runs)])


def _substitution_note(recipes: Sequence[str], runs: Sequence[Result]) -> str:
    """Return the note that runs of other recipes are shown."""
    shown_recipes = ", ".join(dict.fromkeys(result.recipe or str(result.folder) for result in runs))
    return f"runs of {shown_recipes} are shown in place of the rows of {' and '.join(recipes)}"


def _filter_runs(rows: Sequence[FigureRows], results: Sequence[Result]) -> list[Result]:
    """Return the finished runs of some rows, in the order of the rows."""
    row_order = [(recipe_rows.recipe, name) for recipe_rows in rows for name in recipe_rows.names]
    matches = [result for result in results if result.record and (result.recipe, result.row) in row_order]
    return sorted(matches, key=lambda result: (row_order.index((result.recipe, result.row)), result.seed))


def check_one_row(runs: Sequence[Result]) -> None:
    """Raise a DataError unless the runs are of one row and differ only in the seed, so that they can be averaged."""
    by_seed: dict[int, Result] = {}
    for result in runs:
        first = runs[0]
        pair = f"{first.folder} and {result.folder}"
        if (first.recipe, first.row) != (result.recipe, result.row):
            raise DataError(f"{pair} are runs of different rows, so they cannot be averaged; pass runs of one row")
        keys = differing_keys([distinguishing_settings(run.settings) for run in (first, result)])
        if keys:
            raise DataError(f"{pair} are runs of one row but differ in {keys[0]}; pass runs with equal settings")
        earlier = by_seed.setdefault(result.seed, result)
        if earlier is not result:
            raise DataError(f"{earlier.folder} and {result.folder} have the same row and seed; pass only one of them")


def _read_rows(selection: str) -> FigureRows:
    """Return the trained rows of a recipe, which may be a selection of rows of another recipe."""
    path, recipe_name = find_recipe(selection)
    recipe_file = read_recipe_file(path, selection)
    trained_rows = tuple(row.name for row in recipe_file.rows if row.trained)
    return FigureRows(recipe_file.extends or recipe_name, selection, trained_rows)


def _collect_default_runs(figure: Figure) -> list[Result]:
    """Return the runs of the figure's recipes in the default folder."""
    rows = figure_rows(figure)
    if figure.fallback_recipe:
        rows.append(_read_rows(figure.fallback_recipe))
    recipes = dict.fromkeys(recipe_rows.recipe for recipe_rows in rows)
    folders = [DEFAULT_FOLDER / recipe for recipe in recipes]
    existing_folders = [folder for folder in folders if folder.is_dir()]
    return collect_runs(existing_folders) if existing_folders else []


def _missing_row_notes(rows: Sequence[FigureRows], runs: Sequence[Result]) -> list[str]:
    """Return notes on rows without runs, with the commands that train them."""
    trained = {(result.recipe, result.row) for result in runs}
    notes = []
    for recipe_rows in rows:
        missing = [name for name in recipe_rows.names if (recipe_rows.recipe, name) not in trained]
        if missing:
            names = ", ".join(f'"{name}"' for name in missing)
            notes.append(f"no run of {names}; this command trains them: {_format_command(recipe_rows, missing)}")
    return notes


def _format_command(rows: FigureRows, missing: Sequence[str] = ()) -> str:
    """Return the command that trains the rows, or only the missing ones."""
    options = []
    if len(missing) < len(rows.names):
        options = [f"--row {shlex.quote(name)}" for name in missing]
    return " ".join(["reefknot table", rows.selection, *options, "--data DIR"])
