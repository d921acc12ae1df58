"""Which runs a figure is drawn from: those that were named, or those of its recipes where they lie by default."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reefknot.errors import DataError
from reefknot.lab.papers.figures.contract import Figure
from reefknot.lab.recipes.file import find_recipe, read_file
from reefknot.lab.reports.results import Result, collect, differing, distinguishing
from reefknot.lab.reports.rows import TableRow, group
from reefknot.lab.reports.table import changed_settings

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
    """The runs to draw from: those of the figure's rows, or of its stand-in, or else all that were named and that the
    figure can speak of."""
    there = collect(named) if named else _default(figure)
    finished = [result for result in there if result.record]
    unfinished = [f"left out, not finished: {result.folder}" for result in there if not result.record]
    chosen, reason = among(figure, finished), "not of its rows"
    if chosen is None:
        chosen, reason = _others(figure, finished, named), f"not {_plural(figure.kinds)}"
    taken = {result.folder for result in chosen.runs}
    unused = Counter(result.recipe or str(result.folder) for result in finished if result.folder not in taken)
    counts = ", ".join(f"{recipe} ({count} run{'s' * (count > 1)})" for recipe, count in unused.items())
    left_out = [f"left out, {reason}: {counts}"] if named and unused else []
    changed = changed_settings([TableRow(name, results=results) for name, results in group(chosen.runs).items()])
    return _with_weights(figure, Chosen(chosen.runs, [*chosen.notes, *changed, *left_out, *unfinished]))


def _others(figure: Figure, finished: Sequence[Result], named: Sequence[Path]) -> Chosen:
    """Runs that are not of the figure's rows but were named: those that it can speak of."""
    runs = [result for result in finished if named and _kind(result) in figure.kinds]
    if not runs:
        if not named:
            what = f"no runs of it under {RUNS}/"
        elif not finished:
            what = "the runs that were named are not finished"
        else:
            what = f"it is about {_plural(figure.kinds)}, and {finished[0].folder} is a {_kind(finished[0])}"
        commands = "; ".join(map(_command, rows_of(figure)))
        raise DataError(f"{figure.name}: {what}; name run folders, or train them: {commands}")
    return Chosen(runs, [_standing_in(figure.recipes, runs)])


_KINDS = {"skip_gram": "skip-gram", "translation": "translator", "language_model": "language model"}


def _kind(result: Result) -> str:
    """What was trained, in words."""
    return _KINDS[result.task]


def _plural(kinds: Sequence[str]) -> str:
    return " and ".join(f"{kind}s" for kind in kinds)


def _with_weights(figure: Figure, chosen: Chosen) -> Chosen:
    """Refuse records of runs where the figure opens their models."""
    bare = [str(run.folder) for run in chosen.runs if not (run.folder / "checkpoints").is_dir()]
    if figure.needs == "weights" and bare:
        raise DataError(f"{figure.name} reads weights, and {bare[0]} has none; name the folder it was trained in")
    return chosen


def among(figure: Figure, results: Sequence[Result]) -> Chosen | None:
    """The finished runs of the figure's rows, in their order, with those of its stand-in where the last of its recipes
    has none; None where there are neither."""
    *others, last = rows_of(figure)
    spare = [_rows(figure.stand_in)] if figure.stand_in and not _of([last], results) else []
    stand_ins = _of(spare, results)
    rows = others if stand_ins else [*others, last]
    runs = [*_of(rows, results), *stand_ins]
    notes = [_standing_in([last.asked], stand_ins)] if stand_ins else []
    return Chosen(runs, [*notes, *_missing(rows, runs)]) if runs else None


def _standing_in(recipes: Sequence[str], runs: Sequence[Result]) -> str:
    ours = ", ".join(dict.fromkeys(result.recipe or str(result.folder) for result in runs))
    return f"not the rows of {' and '.join(recipes)}: runs of {ours} stand in for them"


def _of(rows: Sequence[Rows], results: Sequence[Result]) -> list[Result]:
    wanted = [(each.recipe, name) for each in rows for name in each.names]
    own = [result for result in results if result.record and (result.recipe, result.row) in wanted]
    return sorted(own, key=lambda result: (wanted.index((result.recipe, result.row)), result.seed))


def refuse_mixtures(runs: Sequence[Result]) -> None:
    """Runs whose mean is taken are of one row and differ in the seed, and in nothing else."""
    seeds: dict[int, Result] = {}
    for result in runs:
        first = next(iter(seeds.values()), result)
        pair = f"{first.folder} and {result.folder}"
        if (first.recipe, first.row) != (result.recipe, result.row):
            raise DataError(f"{pair} are of different rows, not seeds of one; name runs of one of them")
        if odd := differing([distinguishing(each.settings) for each in (first, result)]):
            raise DataError(f"{pair} are of one row but differ in {odd[0]}; name runs of one kind")
        twin = seeds.setdefault(result.seed, result)
        if twin is not result:
            raise DataError(f"{twin.folder} and {result.folder} are one row with one seed; name one of them")


def _rows(name: str) -> Rows:
    path, known_as = find_recipe(name)
    file = read_file(path, name)
    return Rows(file.extends or known_as, name, tuple(row.name for row in file.rows if row.trained))


def _default(figure: Figure) -> list[Result]:
    rows = [*rows_of(figure), *([_rows(figure.stand_in)] if figure.stand_in else [])]
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
