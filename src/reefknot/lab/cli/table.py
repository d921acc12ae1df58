"""`reefknot table`: train every row (experiment) of a recipe, and print the scores next to the paper's scores.

The steps are: open the texts of all rows, train the runs that are not finished yet (`lab/cli/jobs.py`), then print the
table and write report.html.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import Data, Device, MaxParallel, Overrides, Recipe

if TYPE_CHECKING:
    from reefknot.lab.cli.jobs import Job, TrainOptions
    from reefknot.lab.recipes.recipe import Recipe as LoadedRecipe
    from reefknot.lab.recipes.recipe import Row
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
            help="Row to train, or a pattern with * for several rows. Can be repeated. If a row starts from another "
            "row, that row is trained too. [default: all rows]"
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write the runs to. [default: runs/RECIPE]")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of runs to train per row, each with a different seed.")
    ] = 1,
    jobs: MaxParallel = 1,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Train every row of a recipe, print a table with the paper's scores, and write report.html.

    A row is one experiment of the recipe. Run the same command again to continue where it stopped. Rows whose corpus is
    not on this machine are left out. If --row names such a row exactly, without a *, that is an error.
    """
    from reefknot.lab.cli.jobs import TrainOptions, run_unfinished
    from reefknot.lab.cli.options import check_training_data, data_folder_for
    from reefknot.lab.recipes.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [], row)
    check_training_data(data, loaded.experiments.values(), recipe)
    root = out or Path("runs") / loaded.name
    typer.echo(loaded.title)
    required_rows = {loaded.row(name).name for name in row or [] if "*" not in name}
    datasets = _open_texts(loaded, required_rows, data)
    for description in dict.fromkeys(dataset.describe() for dataset in datasets.values()):
        typer.echo(description)
    planned: list[tuple[Job, bool]] = []
    for recipe_row in loaded.rows:
        if recipe_row.name in datasets:
            row_data = data_folder_for(loaded.experiments[recipe_row.name], data)
            options = TrainOptions(recipe, recipe_row.name, tuple(overrides or []), row_data, device)
            planned += _plan_row(loaded, recipe_row, datasets[recipe_row.name], options, seeds=seeds, root=root)
    try:
        run_unfinished(planned, jobs, root)
    finally:
        _print_and_write_table(loaded, [job.out for job, _ in planned if (job.out / "config.json").exists()], root)


def _plan_row(
    recipe: LoadedRecipe, row: Row, dataset: OpenedData, options: TrainOptions, seeds: int, root: Path
) -> list[tuple[Job, bool]]:
    """Return the job of every seed of a row, with True if its run is already finished."""
    from reefknot.lab.experiment import is_done
    from reefknot.lab.recipes.recipe import default_folder
    from reefknot.lab.recipes.starts import start_folder

    planned = []
    for seed in range(seeds):
        start = start_folder(recipe, row, seed, root)
        job = options.for_run(seed, default_folder(recipe, row, seed, root), start)
        planned.append((job, is_done(job.out, recipe, row, seed, dataset, start=start)))
    return planned


def _open_texts(recipe: LoadedRecipe, required_rows: Collection[str], data: Path | None) -> dict[str, OpenedData]:
    """Return the text of every row that can be trained on this machine, and print which rows are left out.

    A row is left out if its corpus is missing. It is an error if such a row is in `required_rows`, or if all rows are
    left out.
    """
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.cli.sizes import TextCache, format_missing, map_rows_with_text

    datasets, missing = map_rows_with_text(recipe, TextCache(data, typer.echo).open_and_check_size, required_rows)
    lines = format_missing("not run", missing)
    if not datasets:
        raise CorpusNotFound("\n".join(lines))
    for line in lines:
        typer.echo(line, err=True)
    return datasets


def _print_and_write_table(recipe: LoadedRecipe, runs: list[Path], root: Path) -> None:
    """Print the table of the runs that exist, and write report.html. Called even if training was stopped or failed."""
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
