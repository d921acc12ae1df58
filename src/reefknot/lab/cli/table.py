"""`reefknot table`: train every row (experiment) of a recipe, and print the scores next to the paper's scores.

A run is one training of a row with one seed. The steps are: open the texts of all rows, train the runs that are not
finished yet (`lab/cli/jobs.py`), then print the table and write report.html.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import (
    CheckOption,
    DataOption,
    DeviceOption,
    JobsOption,
    JsonOption,
    OverridesArgument,
    RecipeArgument,
    TrackOption,
)

if TYPE_CHECKING:
    from reefknot.lab.cli.jobs import PlannedJob, TrainOptions
    from reefknot.lab.recipes.recipe import Recipe, Row
    from reefknot.lab.tasks.contract import Data

EXAMPLES = """\b
Examples:
  reefknot table demo
  reefknot table press2017/table6 --data DIR --seeds 3
  reefknot table press2017/table6 --data DIR --device cuda --jobs 4
  reefknot table inan2017/table1 --data DIR --row "*small*" --row "VD-LSTM medium"
"""


def table(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
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
    jobs: JobsOption = 1,
    data: DataOption = None,
    check: CheckOption = False,
    device: DeviceOption = "auto",
    track: TrackOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train every row of a recipe, print a table of the scores next to the paper's, and write report.html.

    A row is one experiment of the recipe. Run the same command again to continue where it stopped. Rows whose corpus is
    not on this machine are left out. If --row names such a row exactly, without a *, that is an error.
    """
    from reefknot.lab.cli.jobs import TrainOptions, run_unfinished
    from reefknot.lab.cli.options import (
        JsonOutput,
        check_tracker_options,
        check_training_data,
        data_folder_for,
        describe_runs,
    )
    from reefknot.lab.recipes.recipe import load_recipe

    output = JsonOutput(as_json)
    loaded_recipe = load_recipe(recipe, overrides or [], row)
    check_training_data(data, loaded_recipe.experiments.values(), recipe)
    check_tracker_options(track)
    root = out or Path("runs") / loaded_recipe.name
    typer.echo(loaded_recipe.title)

    # Open the texts.
    required_rows = {loaded_recipe.row(name).name for name in row or [] if "*" not in name}
    datasets = _open_texts(loaded_recipe, required_rows, data)
    for description in dict.fromkeys(dataset.describe() for dataset in datasets.values()):
        typer.echo(description)

    # Plan the runs.
    planned_jobs: list[PlannedJob] = []
    for recipe_row in loaded_recipe.rows:
        if recipe_row.name in datasets:
            row_data = data_folder_for(loaded_recipe.experiments[recipe_row.name], data)
            options = TrainOptions(
                recipe, recipe_row.name, tuple(overrides or []), row_data, device, tuple(track or [])
            )
            dataset = datasets[recipe_row.name]
            planned_jobs += _plan_row(loaded_recipe, recipe_row, dataset, options, num_seeds=seeds, root=root)

    # Train them, and print the table even if training is stopped or fails.
    try:
        run_unfinished(planned_jobs, jobs, root)
    finally:
        run_folders = [planned.job.out for planned in planned_jobs]
        existing_runs = [folder for folder in run_folders if (folder / "config.json").exists()]
        print_and_write_table(loaded_recipe, existing_runs, root)
    output.print(lambda: {"report": str((root / "report.html").resolve()), "runs": describe_runs(existing_runs)})


def _open_texts(recipe: Recipe, required_rows: Collection[str], data: Path | None) -> dict[str, Data]:
    """Return the text of every row that can be trained on this machine, by row, and print which rows are left out.

    A row is left out if its corpus is missing. It is an error if such a row is in `required_rows`, or if all rows are
    left out.
    """
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.cli.sizes import TextCache, format_missing, map_rows_with_text

    texts = TextCache(data, typer.echo)
    datasets, missing = map_rows_with_text(recipe, texts.open_and_check_size, required_rows)
    messages = format_missing("not run", missing)
    if not datasets:
        raise CorpusNotFound("\n".join(messages))
    for message in messages:
        typer.echo(message, err=True)
    return datasets


def _plan_row(
    recipe: Recipe, row: Row, dataset: Data, options: TrainOptions, num_seeds: int, root: Path
) -> list[PlannedJob]:
    """Return the jobs of a row, one per seed."""
    from reefknot.lab.cli.jobs import PlannedJob
    from reefknot.lab.experiment import is_done
    from reefknot.lab.recipes.recipe import default_folder
    from reefknot.lab.recipes.starts import start_folder

    planned_jobs = []
    for seed in range(num_seeds):
        start = start_folder(recipe, row, seed, root)
        job = options.for_run(seed, default_folder(recipe, row, seed, root), start)
        is_finished = is_done(job.out, recipe, row, seed, dataset, start=start)
        planned_jobs.append(PlannedJob(job, is_finished))
    return planned_jobs


def print_and_write_table(recipe: Recipe, runs: list[Path], root: Path) -> None:
    """Print the table of some runs, and write report.html."""
    from reefknot.lab.reports.page import recipe_title, write_report
    from reefknot.lab.reports.rows import join_runs
    from reefknot.lab.reports.table import print_table, rows_from_recipe
    from reefknot.lab.runs.loading import collect_runs
    from reefknot.lab.training.display import open_console

    if not runs:
        return
    results = collect_runs(runs)
    rows = join_runs(rows_from_recipe(recipe.rows, recipe.name), results)
    print_table(rows, open_console())
    title = recipe_title(results, recipe.title)
    report_path = write_report(results, root / "report.html", rows=rows, title=title)
    typer.echo(f"report: {report_path.resolve()}")
