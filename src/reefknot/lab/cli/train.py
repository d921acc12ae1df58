"""`reefknot train`: train one row of a recipe (one experiment), with one seed or several.

A recipe is a TOML file with experiments. Training a row with one seed is a run, which has its own folder. One seed is
trained in this process. Several seeds are trained one after another, each by a `reefknot train` of its own
(`lab/cli/jobs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import (
    DataOption,
    DeviceOption,
    JsonOption,
    OverridesArgument,
    RecipeArgument,
    RowOption,
    StartOption,
    TrackOption,
)

if TYPE_CHECKING:
    from reefknot.lab.cli.jobs import TrainOptions
    from reefknot.lab.recipes.recipe import Recipe

EXAMPLES = """\b
Examples:
  reefknot train demo --row tied
  reefknot train press2017/table6 --row "Small + WT" --data DIR training.epochs=2 --out runs/short
  reefknot train demo --row tied --seeds 3
  reefknot train demo --row tied encoder.kind=gru       # keeps all settings that a GRU also has
  reefknot train demo --row tied --track tensorboard
  torchrun --nproc-per-node=2 -m reefknot train demo --row tied                        # DDP
  torchrun --nproc-per-node=2 -m reefknot train demo --row tied training.shard=true    # FSDP2
"""


def train(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    row: RowOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder to write, or with --seeds the folder that will hold one run folder per seed. "
            "[default: runs/RECIPE/ROW/seedN]",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of runs to train. They use seeds 0, 1, 2 and so on.")
    ] = 1,
    start: StartOption = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    track: TrackOption = None,
    withhold_test: Annotated[
        bool,
        typer.Option("--withhold-test", help="Do not print the test score, for example while you choose settings."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train one row of a recipe, or continue its training if the run folder exists.

    A row is one experiment of the recipe; `reefknot ls RECIPE` lists the rows.
    """
    from reefknot.lab.cli.options import JsonOutput, check_tracker_options, check_training_data, describe_runs
    from reefknot.lab.experiment import train as train_row
    from reefknot.lab.recipes.recipe import default_folder, load_recipe
    from reefknot.lab.training.display import SilentDisplay, open_display
    from reefknot.lab.training.distributed import choose_device, join_world

    output = JsonOutput(as_json)
    loaded_recipe = load_recipe(recipe, overrides or [], row)
    chosen_row = loaded_recipe.row(row)
    check_training_data(data, [loaded_recipe.experiments[chosen_row.name]], recipe)
    check_tracker_options(track)

    # Several seeds: one process per run.
    if seeds > 1:
        from reefknot.lab.cli.jobs import TrainOptions

        _check_seeds(overrides or [], out)
        options = TrainOptions(
            recipe,
            chosen_row.name,
            overrides=tuple(overrides or []),
            data=data,
            device=device,
            track=tuple(track or ()),
            withhold_test=withhold_test,
        )
        run_folders = _train_seeds(loaded_recipe, options, seeds, out, start)
        output.print({"runs": describe_runs(run_folders, withhold_test=withhold_test)})
        return

    # One seed: train in this process.
    with join_world(choose_device(device)) as world:
        display = open_display() if world.is_first else SilentDisplay()
        try:
            train_row(
                loaded_recipe,
                chosen_row,
                out,
                data=data,
                world=world,
                display=display,
                track=track or (),
                start=start,
                show_test=not withhold_test,
            )
        finally:
            display.close()
        if world.is_first:
            run_folder = out or default_folder(
                loaded_recipe, chosen_row, loaded_recipe.experiments[chosen_row.name].seed
            )
            output.print({"runs": describe_runs([run_folder], withhold_test=withhold_test)})


def _check_seeds(overrides: Sequence[str], out: Path | None) -> None:
    """Raise an error if --seeds contradicts another option."""
    from reefknot.errors import SettingsError

    if any(override.startswith("training.seed=") for override in overrides):
        raise SettingsError("--seeds trains seeds 0 to N-1; leave training.seed out, or leave --seeds out")
    if out and (out / "config.json").exists():
        raise SettingsError(f"{out} is a run; with --seeds, --out is the folder that holds one run per seed")


def _train_seeds(
    recipe: Recipe, options: TrainOptions, num_seeds: int, out: Path | None, start: Path | None
) -> list[Path]:
    """Train one run for each of the seeds 0 to `num_seeds` - 1, one after another. Return the run folders.

    Args:
        recipe: The loaded recipe.
        options: The options that all runs share.
        num_seeds: Number of runs.
        out: The folder that will hold one run folder per seed, or None for the default folders.
        start: Folder with the runs to start from, one per seed, or None.
    """
    from reefknot.lab.cli.jobs import run_jobs
    from reefknot.lab.cli.sizes import TextCache, map_rows
    from reefknot.lab.recipes.recipe import default_folder

    row = recipe.row(options.row)
    # A model of the wrong size is reported before the first run starts.
    map_rows(recipe, TextCache(options.data).check_size)
    jobs = []
    for seed in range(num_seeds):
        run_folder = out / f"seed{seed}" if out else default_folder(recipe, row, seed)
        start_run = start / f"seed{seed}" if start else None
        jobs.append(options.for_run(seed, run_folder, start_run))
    run_jobs(jobs, max_parallel=1)
    return [job.out for job in jobs]
