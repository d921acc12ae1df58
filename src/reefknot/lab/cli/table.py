"""`reefknot table`: train every row of a recipe and print our scores next to the paper's."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import Data, Device, Overrides, Recipe

if TYPE_CHECKING:
    from reefknot.lab.recipes.recipe import Recipe as LoadedRecipe
    from reefknot.lab.tasks.contract import Data as OpenedData

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
        typer.Option(
            help="Row to train, or a pattern with * for several rows. The rows that they start from are trained too. "
            "Can be repeated. [default: all rows]"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write the runs to. [default: runs/RECIPE]")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Number of seeds of every row.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Number of runs to train at the same time.")] = 1,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Train every row of a recipe, print one table and write report.html.

    Run the same command again to resume where it stopped. Rows whose corpus is not on this machine are left out, unless
    --row names them without a *.
    """
    from reefknot.lab.cli.jobs import Job, run_missing
    from reefknot.lab.cli.options import check_training_data, data_for
    from reefknot.lab.experiment import is_done
    from reefknot.lab.recipes.recipe import default_folder, load_recipe
    from reefknot.lab.recipes.starts import start_folder

    loaded = load_recipe(recipe, overrides or [], row)
    check_training_data(data, loaded.experiments.values(), recipe)
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
            data_for(loaded.experiments[row.name], data),
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
    """Return the texts of all rows that can be trained on this machine, and print which rows cannot be trained.

    A row cannot be trained if its corpus is missing. The table shows it as not run. It is an error if such a row is
    named on the command line, or if no row can be trained.
    """
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.cli.sizes import Texts, describe_missing, for_rows_with_text

    datasets, missing = for_rows_with_text(recipe, Texts(data, typer.echo).open_checked, named)
    lines = describe_missing("not run", missing)
    if not datasets:
        raise CorpusNotFound("\n".join(lines))
    for line in lines:
        typer.echo(line, err=True)
    return datasets


def _show(recipe: LoadedRecipe, runs: list[Path], root: Path) -> None:
    """Print and write the table of the runs that exist, even if training was stopped or failed."""
    from rich.console import Console

    from reefknot.lab.reports.page import write_report
    from reefknot.lab.reports.results import collect_runs
    from reefknot.lab.reports.rows import join_runs
    from reefknot.lab.reports.table import print_table, rows_from_recipe

    if not runs:
        return
    results = collect_runs(runs)
    rows = join_runs(rows_from_recipe(recipe.rows, recipe.name), results)
    print_table(rows, Console())
    page = write_report(results, root / "report.html", rows=rows, title=recipe.title)
    typer.echo(f"report: {page.resolve()}")
