"""`reefknot sweep`: every combination of some settings, tried on the validation text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import Data, Device, Recipe

if TYPE_CHECKING:
    from reefknot.lab.cli.combinations import Combination
    from reefknot.lab.cli.jobs import Job
    from reefknot.lab.reports.sweep import Trial

EXAMPLES = """\b
Examples:
  reefknot sweep demo training.optimiser.learning_rate=0.5,1,2 --row tied
  reefknot sweep demo encoder.dropout=0.1,0.3 training.clip=1,5 training.epochs=2 --row tied --seeds 3
"""


def sweep(
    recipe: Recipe,
    settings: Annotated[
        list[str],
        typer.Argument(help="key=a,b,c: values to try, as TOML (a list in brackets is one); key=a: the same for all."),
    ],
    row: Annotated[str | None, typer.Option(help="Row to vary; needed when there are several.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs. [default: runs/sweeps/RECIPE/ROW]")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds per combination.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Runs side by side.")] = 1,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Finished run to begin with, where training.start asks for one; with --seeds, the folder that holds "
            "one per seed. [default: its row's]"
        ),
    ] = None,
    test: Annotated[bool, typer.Option("--test", help="Also show the test perplexity of the best.")] = False,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Try every combination of settings: a table with the best first, sweep.json and report.html.

    Settings are chosen on the validation text. Test perplexities are not shown, since a text that has helped to choose
    cannot test the choice. Run again, it goes on where it stopped; with more values, it adds theirs.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.cli.combinations import combine, parse
    from reefknot.lab.cli.jobs import Job, run_missing
    from reefknot.lab.cli.sizes import Texts, for_each
    from reefknot.lab.experiment import is_done
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.recipes.starts import start_folder
    from reefknot.lab.reports.sweep import Trial
    from reefknot.lab.tasks import load_task

    fixed, varied = parse(settings)
    plain = load_recipe(recipe, row=row)
    chosen = plain.row(row)
    if not load_task(plain.experiments[chosen.name].task).scores_text:
        raise SettingsError(
            f'{recipe}, row "{chosen.name}" gives no text a probability, so there is no validation score to choose '
            "settings by; train it with reefknot train"
        )
    root = out or Path("runs") / "sweeps" / plain.name / chosen.slug
    combinations = {each.name: each for each in combine(varied)}
    typer.echo(f"{plain.title}\n{chosen.name}: {len(combinations)} combinations of settings")

    texts = Texts(data, typer.echo)

    def plan(each: Combination) -> list[tuple[Job, bool]]:
        """A run for each seed, and whether it is done. What cannot be trained is told here, before others are."""
        overrides = (*fixed, *each.overrides)
        loaded = load_recipe(recipe, overrides, chosen.name)
        own = loaded.row(chosen.name)
        dataset = texts.open_checked(own, loaded.experiments[own.name])
        found = []
        for seed in range(seeds):
            folder = root / each.folder / f"seed{seed}"
            given = start / f"seed{seed}" if start and seeds > 1 else start
            first = given or start_folder(loaded, own, seed)
            job = Job(recipe, own.name, seed, folder, overrides, data, device, False, first, True, each.name)
            found.append((job, is_done(folder, loaded, own, seed, dataset, first)))
        return found

    planned = for_each(recipe, "combination", combinations, plan)
    trials = [
        Trial(name, combinations[name].settings, tuple(job.out for job, _ in runs)) for name, runs in planned.items()
    ]
    runs = [run for each in planned.values() for run in each]
    _check_starts([job for job, done in runs if not done], fixed)
    try:
        run_missing(runs, jobs, root)
    finally:
        _show(trials, root, f"{plain.title}: a sweep of {chosen.name}", test)


def _check_starts(jobs: Sequence[Job], fixed: Sequence[str]) -> None:
    """Refuse a sweep of a second stage without its first, once. Only what all combinations share is said of that."""
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.recipes.starts import find_start

    for job in jobs:
        if job.start:
            loaded = replace(load_recipe(job.recipe, job.overrides, job.row), overrides=tuple(fixed))
            find_start(loaded, loaded.row(job.row), job.seed, job.start, job.out, job.data)


def _show(trials: Sequence[Trial], root: Path, title: str, test: bool) -> None:
    """What there is of the sweep, whatever has ended its runs: on the terminal and in its two files."""
    from rich.console import Console

    from reefknot.lab.reports.cells import spread
    from reefknot.lab.reports.page import write_report
    from reefknot.lab.reports.sweep import figures, rank, summary
    from reefknot.lab.reports.table import print_table
    from reefknot.lab.runs.scores import PERPLEXITY
    from reefknot.storage.files import write_json

    ranked = rank(trials)
    if not ranked:
        return
    rows = [row for _, row in ranked]
    same_size = len({row.size for row in rows}) == 1
    print_table(rows, Console(), leave_out=("tokens/s", "memory", *(["parameters"] if same_size else [])))
    told: dict[str, Any] = {"title": title, "judged_by": "valid", "trials": summary(ranked, root)}
    best = ranked[0][0].row()
    if test and (found := best.figure(PERPLEXITY, "test")):
        typer.echo(f"test perplexity of the best ({best.name}): {spread(found)}")
        told["test_of_the_best"] = figures(found)
    write_json(root / "sweep.json", told)
    results = [result for row in rows for result in row.results]
    page = write_report(results, root / "report.html", rows=rows, title=title)
    typer.echo(f"report: {page.resolve()}")
