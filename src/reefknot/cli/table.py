"""`reefknot table`: every row of a recipe, ours beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.cli.options import Data, Device, Overrides, Recipe

if TYPE_CHECKING:
    from reefknot.recipe import Experiment, Row
    from reefknot.text.dataset import Dataset

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
    from rich.console import Console

    from reefknot.cli.jobs import Job, run_jobs
    from reefknot.cli.sizes import checked_size, for_each_row
    from reefknot.errors import ReefknotError
    from reefknot.experiments import is_done
    from reefknot.recipe import load_recipe
    from reefknot.reports.page import write_report
    from reefknot.reports.results import collect
    from reefknot.reports.rows import join
    from reefknot.reports.table import from_recipe, print_table
    from reefknot.text.dataset import open_dataset

    loaded = load_recipe(recipe, overrides or [])
    root = out or Path("runs") / loaded.name
    planned = [
        Job(recipe, row.name, seed, root / row.slug / f"seed{seed}", tuple(overrides or []), data, device)
        for row in loaded.rows
        if not row.quoted
        for seed in range(seeds)
    ]
    typer.echo(loaded.title)

    def opened(row: Row, each: Experiment) -> Dataset:
        """A row that cannot be trained is told before the others are trained for hours."""
        dataset = open_dataset(each.corpus, each.vocabulary, data=data, say=typer.echo)
        checked_size(row, each, data)
        return dataset

    datasets = for_each_row(recipe, loaded, opened)
    for description in dict.fromkeys(dataset.describe() for dataset in datasets.values()):
        typer.echo(description)
    waiting = [job for job in planned if not is_done(job.out, loaded, loaded.row(job.row), job.seed, datasets[job.row])]
    typer.echo(f"{len(planned)} runs in {root}, {len(planned) - len(waiting)} of them done")
    trouble: ReefknotError | None = None
    try:
        run_jobs(waiting, jobs)
    except ReefknotError as error:
        trouble = error
    done = [job.out for job in planned if (job.out / "config.json").exists()]
    if done:
        rows = join(from_recipe(loaded.rows, loaded.name), collect(done))
        print_table(rows, Console())
        page = write_report(collect(done), root / "report.html", rows=rows, title=loaded.title)
        typer.echo(f"report: {page.resolve()}")
    if trouble:
        raise trouble
