"""`reefknot sweep`: train every combination of some settings, and rank the combinations on the validation text.

`lab/cli/combinations.py` parses the settings, `_plan_jobs` checks all combinations before any is trained, and
`lab/cli/jobs.py` trains them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import (
    CheckOption,
    DataOption,
    DeviceOption,
    JobsOption,
    JsonOption,
    RecipeArgument,
    RowOption,
    StartOption,
    TrackOption,
)

if TYPE_CHECKING:
    from reefknot.lab.cli.combinations import Combination
    from reefknot.lab.cli.jobs import Job, PlannedJob, TrainOptions
    from reefknot.lab.recipes.recipe import Recipe, Row
    from reefknot.lab.reports.sweep import Trial
    from reefknot.lab.tasks.contract import Experiment

EXAMPLES = """\b
Examples:
  reefknot sweep demo training.optimiser.learning_rate=0.5,1,2 --row tied
  reefknot sweep demo encoder.dropout=0.1,0.3 training.clip=1,5 training.epochs=2 --row tied --seeds 3
  reefknot sweep demo encoder.dropout=0.1,0.3 --row tied --seeds 3 --first-seed 100    # seeds that you do not report
"""


def sweep(
    recipe: RecipeArgument,
    settings: Annotated[
        list[str],
        typer.Argument(
            help="Settings of the recipe. key=a,b,c tries three values, and key=a uses one value for all runs. Values "
            "are written as in TOML; a list in brackets is one value."
        ),
    ],
    row: RowOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write the runs to. [default: runs/sweeps/RECIPE/ROW]")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of runs to train per combination, each with a different seed.")
    ] = 1,
    first_seed: Annotated[
        int, typer.Option(min=0, help="Seed of the first run; the following runs use the next seeds.")
    ] = 0,
    jobs: JobsOption = 1,
    start: StartOption = None,
    test: Annotated[
        bool, typer.Option("--test", help="Also print the test perplexity of the best combination.")
    ] = False,
    data: DataOption = None,
    check: CheckOption = False,
    device: DeviceOption = "auto",
    track: TrackOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train every combination of some settings, and print a table with the best combination first.

    The table is also written to sweep.json and report.html. Combinations are ranked by their validation perplexity.
    Test perplexities are hidden, so that they cannot influence your choice of settings. --test prints the test
    perplexity of the best combination. The best validation perplexity of many runs is partly luck, so report the chosen
    settings with other seeds: --first-seed keeps the seeds of a sweep apart. Run the same command again to continue
    where it stopped. If you add values to the command, only the new combinations are trained.
    """
    from reefknot.lab.cli.combinations import combine, parse_settings
    from reefknot.lab.cli.jobs import TrainOptions, run_unfinished
    from reefknot.lab.cli.options import JsonOutput, check_tracker_options
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.reports.sweep import Trial

    output = JsonOutput(as_json)

    # Read the settings and the recipe.
    sweep_settings = parse_settings(settings)
    loaded_recipe = load_recipe(recipe, row=row)
    chosen_row = loaded_recipe.row(row)
    _check_scored(loaded_recipe, chosen_row)
    check_tracker_options(track)
    root = out or Path("runs") / "sweeps" / loaded_recipe.name / chosen_row.slug
    combinations = {combination.name: combination for combination in combine(sweep_settings.varied)}
    typer.echo(f"{loaded_recipe.title}\n{chosen_row.name}: {len(combinations)} combinations of settings")

    # Plan the runs.
    options = TrainOptions(
        recipe, chosen_row.name, tuple(sweep_settings.fixed), data, device, tuple(track or []), withhold_test=True
    )
    seed_range = range(first_seed, first_seed + seeds)
    jobs_by_combination = _plan_jobs(options, combinations, seed_range, root, start)
    trials = []
    for name, planned_jobs in jobs_by_combination.items():
        run_folders = tuple(planned.job.out for planned in planned_jobs)
        trials.append(Trial(name, combinations[name].settings, run_folders))
    all_jobs = list(chain.from_iterable(jobs_by_combination.values()))
    unfinished_jobs = [planned.job for planned in all_jobs if not planned.is_finished]
    _check_starts(unfinished_jobs, sweep_settings.fixed)

    # Train them, and print the table even if training is stopped or fails.
    try:
        run_unfinished(all_jobs, jobs, root)
    finally:
        record = _print_and_write_table(trials, root, loaded_recipe.title, chosen_row.name, test)
    output.print(lambda: record)


def _check_scored(recipe: Recipe, row: Row) -> None:
    """Raise an error if runs of the row do not have a validation perplexity, by which combinations are ranked."""
    from reefknot.errors import SettingsError
    from reefknot.lab.tasks import load_task

    if not load_task(recipe.experiments[row.name].task).scores_text:
        raise SettingsError(
            f'{recipe.given_name}, row "{row.name}" has no validation perplexity to choose settings by; train it with '
            "reefknot train"
        )


def _plan_jobs(
    options: TrainOptions, combinations: Mapping[str, Combination], seeds: Sequence[int], root: Path, start: Path | None
) -> dict[str, list[PlannedJob]]:
    """Return the jobs of every combination, one per seed.

    Args:
        options: The options that all jobs share. Their overrides are the settings that do not vary.
        combinations: The combinations of settings, by name.
        seeds: The seeds.
        root: The folder of the sweep.
        start: The value of --start: a run, or with several seeds a folder that holds one run per seed.

    Raises:
        ReefknotError: Some combinations cannot be trained. The error is raised before any combination is trained.
    """
    from reefknot.lab.cli.jobs import PlannedJob
    from reefknot.lab.cli.options import check_training_data, data_folder_for
    from reefknot.lab.cli.sizes import TextCache, map_items
    from reefknot.lab.experiment import is_done
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.recipes.starts import start_folder

    texts = TextCache(options.data, typer.echo)
    experiments: list[Experiment] = []

    def plan_combination(combination: Combination) -> list[PlannedJob]:
        # Check the settings and open the text.
        overrides = (*options.overrides, *combination.overrides)
        recipe = load_recipe(options.recipe, overrides, options.row)
        row = recipe.row(options.row)
        experiment = recipe.experiments[row.name]
        experiments.append(experiment)
        dataset = texts.open_and_check_size(row, experiment)

        combination_options = replace(options, overrides=overrides, data=data_folder_for(experiment, options.data))
        planned_jobs = []
        for seed in seeds:
            out = root / combination.folder / f"seed{seed}"
            if start is None:
                start_run = start_folder(recipe, row, seed)
            elif len(seeds) > 1:
                start_run = start / f"seed{seed}"
            else:
                start_run = start
            job = combination_options.for_run(seed, out, start_run, label=combination.name)
            is_finished = is_done(out, recipe, row, seed, dataset, start=start_run)
            planned_jobs.append(PlannedJob(job, is_finished))
        return planned_jobs

    jobs_by_combination = map_items(options.recipe, "combination", combinations, plan_combination)
    check_training_data(options.data, experiments, options.recipe)  # not earlier, because the corpus may vary
    return jobs_by_combination


def _check_starts(jobs: Sequence[Job], fixed: Sequence[str]) -> None:
    """Raise an error if a run that a job starts from is missing.

    Its message suggests a command that trains the missing run. The command has only the `fixed` settings, because all
    combinations start from the same run.
    """
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.recipes.starts import find_start

    for job in jobs:
        if job.start:
            recipe = load_recipe(job.recipe, job.overrides, job.row)
            recipe = replace(recipe, overrides=tuple(fixed))
            find_start(recipe, recipe.row(job.row), job.seed, folder=job.start, out=job.out, data=job.data)


def _print_and_write_table(
    trials: Sequence[Trial], root: Path, recipe: str, row: str, test: bool
) -> dict[str, Any] | None:
    """Print the table of the runs that exist, and write it to sweep.json and report.html.

    Returns the content of sweep.json, or None if no run exists.

    Args:
        trials: The combinations of settings, with their run folders.
        root: The folder of the sweep.
        recipe: Title of the recipe.
        row: Name of the row.
        test: Whether to print the test perplexity of the best combination.
    """
    from reefknot.lab.reports.cells import format_row_perplexity
    from reefknot.lab.reports.page import recipe_title, write_report
    from reefknot.lab.reports.sweep import rank_trials, spread_to_dict, summarise_trials
    from reefknot.lab.reports.table import print_table
    from reefknot.lab.runs.scores import PERPLEXITY
    from reefknot.lab.training.display import open_console
    from reefknot.storage.files import write_json

    ranked_trials = rank_trials(trials)
    if not ranked_trials:
        return None

    # Print the table.
    rows = [trial_row for _, trial_row in ranked_trials]
    results = list(chain.from_iterable(trial_row.results for trial_row in rows))
    title = f"{recipe_title(results, recipe)}: a sweep of {row}"
    hidden_columns = ["tokens/s", "memory"]
    if len({trial_row.parameter_count for trial_row in rows}) == 1:
        hidden_columns.append("parameters")
    print_table(rows, open_console(), leave_out=hidden_columns)
    record: dict[str, Any] = {"title": title, "judged_by": "valid", "trials": summarise_trials(ranked_trials, root)}

    # The rows hide test scores. The row of the best trial itself has them.
    if test:
        best_trial, _ = ranked_trials[0]
        best_row = best_trial.row()
        perplexities = best_row.mean_score(PERPLEXITY, "test")
        if perplexities:
            typer.echo(f"test perplexity of the best ({best_row.name}): {format_row_perplexity(best_row, 'test')}")
            record["test_of_the_best"] = spread_to_dict(perplexities)

    write_json(root / "sweep.json", record)
    report_path = write_report(results, root / "report.html", rows=rows, title=title)
    typer.echo(f"report: {report_path.resolve()}")
    return record
