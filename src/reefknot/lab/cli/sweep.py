"""`reefknot sweep`: train every combination of some settings and rank them on the validation text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import Data, Device, Recipe

if TYPE_CHECKING:
    from reefknot.lab.cli.combinations import Combination
    from reefknot.lab.cli.jobs import Job
    from reefknot.lab.recipes.recipe import Recipe as LoadedRecipe
    from reefknot.lab.recipes.recipe import Row
    from reefknot.lab.reports.sweep import Trial
    from reefknot.lab.tasks.contract import Experiment

EXAMPLES = """\b
Examples:
  reefknot sweep demo training.optimiser.learning_rate=0.5,1,2 --row tied
  reefknot sweep demo encoder.dropout=0.1,0.3 training.clip=1,5 training.epochs=2 --row tied --seeds 3
"""


def sweep(
    recipe: Recipe,
    settings: Annotated[
        list[str],
        typer.Argument(
            help="Settings: key=a,b,c tries several values, and key=a sets one value for all runs. Values are TOML; a "
            "list in brackets is one value."
        ),
    ],
    row: Annotated[str | None, typer.Option(help="Row to train. Required if the recipe has several rows.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write the runs to. [default: runs/sweeps/RECIPE/ROW]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Number of seeds of every combination.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Number of runs to train at the same time.")] = 1,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Finished run to start from, for a row with training.start. With --seeds, the folder that has one run "
            "per seed. [default: the run of the row that training.start names]"
        ),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Also print the test perplexity of the best combination.")
    ] = False,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Train every combination of settings, print a table with the best first, and write sweep.json and report.html.

    Combinations are ranked on the validation text. Test perplexities are not shown, because a text that has helped to
    choose settings cannot test the choice. Run the same command again to resume where it stopped. Add values to the
    command to train only the new combinations.
    """
    from reefknot.lab.cli.combinations import combine, parse
    from reefknot.lab.cli.jobs import Job, run_missing
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.reports.sweep import Trial

    fixed, varied = parse(settings)
    unchanged = load_recipe(recipe, row=row)
    chosen = unchanged.row(row)
    _check_scored(unchanged, chosen)
    root = out or Path("runs") / "sweeps" / unchanged.name / chosen.slug
    combinations = {combination.name: combination for combination in combine(varied)}
    typer.echo(f"{unchanged.title}\n{chosen.name}: {len(combinations)} combinations of settings")
    job = Job(recipe, chosen.name, 0, root, tuple(fixed), data, device, start=start, withhold_test=True)
    planned = _plan(job, combinations, seeds)
    trials = [
        Trial(name, combinations[name].settings, tuple(job.out for job, _ in runs)) for name, runs in planned.items()
    ]
    runs = [run for seed_runs in planned.values() for run in seed_runs]
    _check_starts([job for job, done in runs if not done], fixed)
    try:
        run_missing(runs, jobs, root)
    finally:
        _show(trials, root, f"{unchanged.title}: a sweep of {chosen.name}", test)


def _check_scored(recipe: LoadedRecipe, row: Row) -> None:
    """Raise an error if runs of the row do not have a validation perplexity, by which combinations are ranked."""
    from reefknot.errors import SettingsError
    from reefknot.lab.tasks import load_task

    if not load_task(recipe.experiments[row.name].task).scores_text:
        raise SettingsError(
            f'{recipe.given_name}, row "{row.name}" has no validation perplexity to choose settings by; train it with '
            "reefknot train"
        )


def _plan(job: Job, combinations: Mapping[str, Combination], seeds: int) -> dict[str, list[tuple[Job, bool]]]:
    """Return for every combination the jobs of all seeds, and whether each job is done.

    Args:
        job: The common part of all jobs. Its overrides are the fixed settings, its folder is the folder of the sweep,
            and its start is the value of --start.
        combinations: The combinations of settings, by name.
        seeds: Number of seeds.

    Raises:
        ReefknotError: Some combinations cannot be trained. The error is raised before any combination is trained.
    """
    from reefknot.lab.cli.options import check_training_data, data_for
    from reefknot.lab.cli.sizes import Texts, for_each
    from reefknot.lab.experiment import is_done
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.recipes.starts import start_folder

    texts = Texts(job.data, typer.echo)
    experiments: list[Experiment] = []

    def plan(combination: Combination) -> list[tuple[Job, bool]]:
        overrides = (*job.overrides, *combination.overrides)
        loaded = load_recipe(job.recipe, overrides, job.row)
        row = loaded.row(job.row)
        experiment = loaded.experiments[row.name]
        experiments.append(experiment)
        dataset = texts.open_checked(row, experiment)
        common = replace(job, overrides=overrides, data=data_for(experiment, job.data), label=combination.name)
        planned = []
        for seed in range(seeds):
            out = job.out / combination.folder / f"seed{seed}"
            requested = job.start / f"seed{seed}" if job.start and seeds > 1 else job.start
            start = requested or start_folder(loaded, row, seed)
            done = is_done(out, loaded, row, seed, dataset, start)
            planned.append((replace(common, seed=seed, out=out, start=start), done))
        return planned

    planned = for_each(job.recipe, "combination", combinations, plan)
    check_training_data(job.data, experiments, job.recipe)  # not earlier, because the corpus may vary
    return planned


def _check_starts(jobs: Sequence[Job], fixed: Sequence[str]) -> None:
    """Raise one error if the runs that the jobs start from are missing.

    The command in its message has only the settings that all combinations share, because the run to start from is
    trained once for all combinations.
    """
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.recipes.starts import find_start

    for job in jobs:
        if job.start:
            loaded = replace(load_recipe(job.recipe, job.overrides, job.row), overrides=tuple(fixed))
            find_start(loaded, loaded.row(job.row), job.seed, job.start, job.out, job.data)


def _show(trials: Sequence[Trial], root: Path, title: str, test: bool) -> None:
    """Print and write the table of the runs that exist, even if training was stopped or failed."""
    from rich.console import Console

    from reefknot.lab.reports.cells import format_spread
    from reefknot.lab.reports.page import write_report
    from reefknot.lab.reports.sweep import rank_trials, spread_to_dict, summarise_trials
    from reefknot.lab.reports.table import print_table
    from reefknot.lab.runs.scores import PERPLEXITY
    from reefknot.storage.files import write_json

    ranked = rank_trials(trials)
    if not ranked:
        return
    rows = [row for _, row in ranked]
    same_size = len({row.parameter_count for row in rows}) == 1
    print_table(rows, Console(), leave_out=("tokens/s", "memory", *(["parameters"] if same_size else [])))
    record: dict[str, Any] = {"title": title, "judged_by": "valid", "trials": summarise_trials(ranked, root)}
    best = ranked[0][0].row()
    if test and (perplexities := best.mean_score(PERPLEXITY, "test")):
        typer.echo(f"test perplexity of the best ({best.name}): {format_spread(perplexities)}")
        record["test_of_the_best"] = spread_to_dict(perplexities)
    write_json(root / "sweep.json", record)
    results = [result for row in rows for result in row.results]
    page = write_report(results, root / "report.html", rows=rows, title=title)
    typer.echo(f"report: {page.resolve()}")
