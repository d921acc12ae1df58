"""`reefknot train`: one row of a recipe, or of several seeds of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from reefknot.lab.cli.options import Data, Device, Overrides, Recipe

EXAMPLES = """\b
Examples:
  reefknot train demo --row tied
  reefknot train press2017/table6 --row "Small + WT" --data DIR training.epochs=2 --out runs/short
  reefknot train demo --row tied --seeds 3
  reefknot train demo --row tied encoder.kind=gru       # keeps what a GRU has too; encoder="{...}" keeps nothing
  torchrun --nproc-per-node=2 -m reefknot train demo --row tied                        # a copy of the model each
  torchrun --nproc-per-node=2 -m reefknot train demo --row tied training.shard=true    # a part of the model each
"""


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    row: Annotated[str | None, typer.Option(help="Row to train; needed when there are several.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. [default: runs/RECIPE/ROW/seedN]")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Train seeds 0 to N-1, one run each.")] = 1,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Finished run to begin with, where training.start asks for one; with --seeds, the folder that holds "
            "one per seed. [default: its row's]"
        ),
    ] = None,
    data: Data = None,
    device: Device = "auto",
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard events.")] = False,
    withhold_test: Annotated[
        bool, typer.Option("--withhold-test", help="Do not say the test perplexity, while settings are being chosen.")
    ] = False,
) -> None:
    """Train one row of a recipe. A folder that exists is resumed where it stands."""
    from reefknot.lab.experiment import train as train_row
    from reefknot.lab.recipes.recipe import load_recipe
    from reefknot.lab.recipes.starts import default_folder
    from reefknot.lab.training.display import Silent, open_display
    from reefknot.lab.training.distributed import choose_device, join_world

    loaded = load_recipe(recipe, overrides or [], row)
    chosen = loaded.row(row)
    if seeds > 1:
        from reefknot.lab.cli.jobs import Job, run_jobs
        from reefknot.lab.cli.sizes import Texts, for_each_row

        _refuse_seeds(overrides or [], out)
        folders = [(out / f"seed{seed}" if out else default_folder(loaded, chosen, seed)) for seed in range(seeds)]
        starts = [(start / f"seed{seed}" if start else None) for seed in range(seeds)]
        same = (tuple(overrides or []), data, device, tensorboard)
        for_each_row(recipe, loaded, Texts(data).checked_size)
        jobs = [
            Job(recipe, chosen.name, seed, folders[seed], *same, starts[seed], withhold_test) for seed in range(seeds)
        ]
        run_jobs(jobs, at_once=1)
        return
    with join_world(choose_device(device)) as world:
        display = open_display() if world.first else Silent()
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


def _refuse_seeds(overrides: Sequence[str], out: Path | None) -> None:
    from reefknot.errors import SettingsError

    if any(text.startswith("training.seed=") for text in overrides):
        raise SettingsError("--seeds trains seeds 0 to N-1; leave training.seed out, or leave --seeds out")
    if out and (out / "config.json").exists():
        raise SettingsError(f"{out} is a run; with --seeds, --out is the folder that holds one run per seed")
