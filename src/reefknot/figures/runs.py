"""Which runs a figure is drawn from: those that were named, or those of its recipes where they lie by default."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reefknot.errors import DataError
from reefknot.figures.contract import Figure
from reefknot.recipes import find_recipe
from reefknot.recipes.file import read_file
from reefknot.reports.results import Result, collect, differing, without_seed

RUNS = Path("runs")
"""Where `reefknot train` and `table` put runs unless they are told otherwise."""


@dataclass(frozen=True)
class Rows:
    """Rows of one recipe that a figure shows."""

    recipe: str
    asked: str
    """What the figure calls the recipe: it may be a part of `recipe`."""
    names: tuple[str, ...]


@dataclass(frozen=True)
class Chosen:
    """The runs of a figure, and what a reader must know of the choice."""

    runs: list[Result]
    notes: list[str]


def rows_of(figure: Figure) -> list[Rows]:
    """The rows that a figure shows, by recipe."""
    return [_rows(name) for name in figure.recipes]


def choose(figure: Figure, named: Sequence[Path]) -> Chosen:
    """The runs to draw from: those of the figure's rows, or of its stand-in, or else all that were named."""
    rows = rows_of(figure)
    spare = [_rows(figure.stand_in)] if figure.stand_in else []
    there = collect(named) if named else _default([*rows, *spare])
    left_out = [f"left out, not finished: {result.folder}" for result in there if not result.record]
    chosen = among(figure, there)
    if chosen is not None:
        return _with_weights(figure, Chosen(chosen.runs, [*chosen.notes, *left_out]))
    finished = [result for result in there if result.record] if named else []
    if not finished:
        what = "the runs that were named are not finished" if named else f"no runs of it under {RUNS}/"
        raise DataError(f"{figure.name}: {what}; name run folders, or train them: {'; '.join(map(_command, rows))}")
    return _with_weights(figure, Chosen(finished, [_standing_in(figure, finished), *left_out]))


def _with_weights(figure: Figure, chosen: Chosen) -> Chosen:
    """Refuse records of runs where the figure opens their models."""
    bare = [str(run.folder) for run in chosen.runs if not (run.folder / "checkpoints").is_dir()]
    if figure.needs == "weights" and bare:
        raise DataError(f"{figure.name} reads weights, and {bare[0]} has none; name the folder it was trained in")
    return chosen


def among(figure: Figure, results: Sequence[Result]) -> Chosen | None:
    """The finished runs of the figure's rows, in their order, or of its stand-in; None where there are neither."""
    rows = rows_of(figure)
    if own := _of(rows, results):
        return Chosen(own, _missing(rows, own))
    if figure.stand_in and (spare := _of([_rows(figure.stand_in)], results)):
        return Chosen(spare, [_standing_in(figure, spare)])
    return None


def _standing_in(figure: Figure, runs: Sequence[Result]) -> str:
    recipes = ", ".join(dict.fromkeys(result.recipe or str(result.folder) for result in runs))
    return f"not the rows of {' and '.join(figure.recipes)}: runs of {recipes} stand in for them"


def _of(rows: Sequence[Rows], results: Sequence[Result]) -> list[Result]:
    wanted = [(each.recipe, name) for each in rows for name in each.names]
    own = [result for result in results if result.record and (result.recipe, result.row) in wanted]
    return sorted(own, key=lambda result: (wanted.index((result.recipe, result.row)), result.seed))


def refuse_mixtures(runs: Sequence[Result]) -> None:
    """Where means are taken over all runs on a text, runs of a row differ in nothing but the seed."""
    first: dict[tuple[str, str, str], Result] = {}
    for result in runs:
        assert result.record is not None
        other = first.setdefault((result.recipe, result.row, result.record.corpus.name), result)
        odd = differing([without_seed(each.settings) for each in (other, result)])
        if odd:
            raise DataError(
                f"{other.folder} and {result.folder} are of one row but differ in {odd[0]}; name runs of one kind"
            )


def _rows(name: str) -> Rows:
    path, known_as = find_recipe(name)
    file = read_file(path, name)
    return Rows(file.extends or known_as, name, tuple(row.name for row in file.rows if row.trained))


def _default(rows: Sequence[Rows]) -> list[Result]:
    folders = [folder for name in dict.fromkeys(each.recipe for each in rows) if (folder := RUNS / name).is_dir()]
    return collect(folders) if folders else []


def _missing(rows: Sequence[Rows], own: Sequence[Result]) -> list[str]:
    """Which rows there are no runs of, and what trains them."""
    there = {(result.recipe, result.row) for result in own}
    notes = []
    for each in rows:
        absent = [name for name in each.names if (each.recipe, name) not in there]
        if absent:
            named = ", ".join(f'"{name}"' for name in absent)
            notes.append(f"no run of {named}; this trains them: {_command(each, absent)}")
    return notes


def _command(rows: Rows, absent: Sequence[str] = ()) -> str:
    """What trains the rows, or those of them that are absent."""
    some = absent if len(absent) < len(rows.names) else ()
    return " ".join(["reefknot table", rows.asked, *(f"--row {shlex.quote(name)}" for name in some), "--data DIR"])
