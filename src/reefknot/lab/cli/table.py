"""`reefknot table`: every row of a recipe, ours beside the paper's."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import Data, Device, Overrides, Recipe

if TYPE_CHECKING:
    from reefknot.lab.recipes.recipe import Recipe as LoadedRecipe
    from reefknot.lab.recipes.recipe import Row
    from reefknot.lab.tasks.contract import Data as OpenedData
    from reefknot.lab.tasks.contract import Experiment

EXAMPLES = """\b
Examples:
  reefknot table demo
  reefknot table press2017/table6 --data DIR --seeds 3
  reefknot table press2017/table6 --data DIR --device cuda --jobs 4
  reefknot table inan2017/table1 --data DIR --row "*small*" --row "VD-LSTM medium"
"""


def table(
    recipe: Recipe,
    overrides: Overrides = None,
    row: Annotated[
        list[str] | None,
        typer.Option(help="A row, or several by *, with those that they start from; repeatable. [default: all]"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs. [default: runs/RECIPE]")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds per row.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Runs side by side.")] = 1,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Train every row of a recipe, print one table and write report.html. Run again, it goes on where it stopped.

    Rows whose corpus is not on this machine are left out, unless their very names are given.
    """
    from reefknot.lab.cli.jobs import Job, run_missing
    from reefknot.lab.experiment import is_done
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.recipes.starts import default_folder, start_folder

    loaded = load_recipe(recipe, overrides or [], row)
    root = out or Path("runs") / loaded.name
    typer.echo(loaded.title)
    named = {loaded.row(name).name for name in row or [] if "*" not in name}
    datasets = _open_texts(loaded, named, data)
    for description in dict.fromkeys(dataset.describe() for dataset in datasets.values()):
        typer.echo(description)
    planned = [
        Job(
            recipe,
            row.name,
            seed,
            default_folder(loaded, row, seed, root),
            tuple(overrides or []),
            data,
            device,
            start=start_folder(loaded, row, seed, root),
        )
        for row in loaded.rows
        if row.name in datasets
        for seed in range(seeds)
    ]
    finished = [
        is_done(job.out, loaded, loaded.row(job.row), job.seed, datasets[job.row], job.start) for job in planned
    ]
    try:
        run_missing(list(zip(planned, finished, strict=True)), jobs, root)
    finally:
        _show(loaded, [job.out for job in planned if (job.out / "config.json").exists()], root)


def _open_texts(recipe: LoadedRecipe, named: Collection[str], data: Path | None) -> dict[str, OpenedData]:
    """The texts of all rows that can be trained here; says which cannot.

    A recipe may hold rows over a corpus that one does not have: that is no failure of the others, so the table shows
    them as not run. It is an error of a row that was asked for by name, and where nothing is left to train.
    """
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.cli.sizes import Texts, for_each_row

    texts = Texts(data, typer.echo)
    absent: dict[str, list[str]] = {}

    def open_text(row: Row, experiment: Experiment) -> OpenedData | None:
        try:
            return texts.open_checked(row, experiment)
        except CorpusNotFound as error:
            if row.name in named:
                raise
            absent.setdefault(str(error), []).append(f'"{row.name}"')
            return None

    opened = for_each_row(recipe.given_name, recipe, open_text)
    told = [f"not run: {', '.join(rows)}: {why}" for why, rows in absent.items()]
    found = {row: dataset for row, dataset in opened.items() if dataset is not None}
    if not found:
        raise CorpusNotFound("\n".join(told))
    for line in told:
        typer.echo(line, err=True)
    return found


def _show(recipe: LoadedRecipe, runs: list[Path], root: Path) -> None:
    """What there is of the table, whatever has ended its runs."""
    from rich.console import Console

    from reefknot.lab.reports.page import write_report
    from reefknot.lab.reports.results import collect
    from reefknot.lab.reports.rows import join
    from reefknot.lab.reports.table import from_recipe, print_table

    if not runs:
        return
    results = collect(runs)
    rows = join(from_recipe(recipe.rows, recipe.name), results)
    print_table(rows, Console())
    page = write_report(results, root / "report.html", rows=rows, title=recipe.title)
    typer.echo(f"report: {page.resolve()}")
