"""`reefknot train`: train one row of a recipe, with one seed or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import Data, Device, Overrides, Recipe

if TYPE_CHECKING:
    from reefknot.lab.cli.jobs import Job
    from reefknot.lab.recipes.recipe import Recipe as LoadedRecipe

EXAMPLES = """\b
Examples:
  reefknot train demo --row tied
  reefknot train press2017/table6 --row "Small + WT" --data DIR training.epochs=2 --out runs/short
  reefknot train demo --row tied --seeds 3
  reefknot train demo --row tied encoder.kind=gru       # keeps all settings that a GRU also has
  torchrun --nproc-per-node=2 -m reefknot train demo --row tied                        # DDP
  torchrun --nproc-per-node=2 -m reefknot train demo --row tied training.shard=true    # FSDP2
"""


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    row: Annotated[str | None, typer.Option(help="Row to train. Required if the recipe has several rows.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Run folder. With --seeds, the folder in which every run has its own folder. "
            "[default: runs/RECIPE/ROW/seedN]",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Number N of seeds. Seeds 0 to N-1 are trained, one run per seed.")
    ] = 1,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Finished run to start from, for a row with training.start. With --seeds, the folder that has one run "
            "per seed. [default: the run of the row that training.start names]"
        ),
    ] = None,
    data: Data = None,
    device: Device = "auto",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")] = False,
    withhold_test: Annotated[
        bool,
        typer.Option("--withhold-test", help="Do not print the test score. Use this while you choose settings."),
    ] = False,
) -> None:
    """Train one row of a recipe, or resume it if its run folder exists."""
    from reefknot.lab.cli.options import check_training_data
    from reefknot.lab.experiment import train as train_row
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.training.display import SilentDisplay, open_display
    from reefknot.lab.training.distributed import choose_device, join_world

    loaded = load_recipe(recipe, overrides or [], row)
    chosen = loaded.row(row)
    check_training_data(data, [loaded.experiments[chosen.name]], recipe)
    if seeds > 1:
        from reefknot.lab.cli.jobs import Job

        _check_seeds(overrides or [], out)
        job = Job(
            recipe,
            chosen.name,
            seed=0,
            out=out or Path(),
            overrides=tuple(overrides or []),
            data=data,
            device=device,
            tensorboard=tensorboard,
            withhold_test=withhold_test,
        )
        _train_seeds(loaded, job, seeds, out, start)
        return
    with join_world(choose_device(device)) as world:
        display = open_display() if world.is_first else SilentDisplay()
        try:
            train_row(
                loaded,
                chosen,
                out,
                data=data,
                world=world,
                display=display,
                track=tensorboard,
                start=start,
                show_test=not withhold_test,
            )
        finally:
            display.close()


def _check_seeds(overrides: Sequence[str], out: Path | None) -> None:
    """Raise an error if --seeds contradicts another option."""
    from reefknot.errors import SettingsError

    if any(text.startswith("training.seed=") for text in overrides):
        raise SettingsError("--seeds trains seeds 0 to N-1; leave training.seed out, or leave --seeds out")
    if out and (out / "config.json").exists():
        raise SettingsError(f"{out} is a run; with --seeds, --out is the folder that holds one run per seed")


def _train_seeds(recipe: LoadedRecipe, job: Job, seeds: int, out: Path | None, start: Path | None) -> None:
    """Train seeds 0 to `seeds` - 1 of a job, one after another."""
    from reefknot.lab.cli.jobs import run_jobs
    from reefknot.lab.cli.sizes import Texts, for_each_row
    from reefknot.lab.recipes.recipe import default_folder

    row = recipe.row(job.row)
    for_each_row(recipe, Texts(job.data).checked_size)
    jobs = [
        replace(
            job,
            seed=seed,
            out=out / f"seed{seed}" if out else default_folder(recipe, row, seed),
            start=start / f"seed{seed}" if start else None,
        )
        for seed in range(seeds)
    ]
    run_jobs(jobs, at_once=1)
