"""`reefknot table`: every row of a recipe, ours beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.cli.options import Data, Device, Overrides, Recipe

if TYPE_CHECKING:
    from reefknot.recipe import Recipe as LoadedRecipe

EXAMPLES = """\b
Examples:
  reefknot table demo
  reefknot table press2017/table6 --data DIR --seeds 3
  reefknot table press2017/table6 --data DIR --device cuda --jobs 4
"""


def table(
    recipe: Recipe,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs. [default: runs/RECIPE]")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds per row.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Runs side by side.")] = 1,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Train every row of a recipe, print one table and write report.html. Run again, it goes on where it stopped."""
    from reefknot.cli.jobs import Job, run_missing
    from reefknot.cli.sizes import for_each_row, open_checked
    from reefknot.experiments import default_folder, is_done, start_folder
    from reefknot.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    root = out or Path("runs") / loaded.name
    typer.echo(loaded.title)
    datasets = for_each_row(recipe, loaded, lambda row, each: open_checked(row, each, data))
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
        if not row.quoted
        for seed in range(seeds)
    ]
    finished = [
        is_done(job.out, loaded, loaded.row(job.row), job.seed, datasets[job.row], job.start) for job in planned
    ]
    try:
        run_missing(list(zip(planned, finished, strict=True)), jobs, root)
    finally:
        _show(loaded, [job.out for job in planned if (job.out / "config.json").exists()], root)


def _show(recipe: LoadedRecipe, runs: list[Path], root: Path) -> None:
    """What there is of the table, whatever has ended its runs."""
    from rich.console import Console

    from reefknot.reports.page import write_report
    from reefknot.reports.results import collect
    from reefknot.reports.rows import join
    from reefknot.reports.table import from_recipe, print_table

    if not runs:
        return
    results = collect(runs)
    rows = join(from_recipe(recipe.rows, recipe.name), results)
    print_table(rows, Console())
    page = write_report(results, root / "report.html", rows=rows, title=recipe.title)
    typer.echo(f"report: {page.resolve()}")
