"""`reefknot train`: train one row of a recipe (one experiment), with one seed or several.

A recipe is a TOML file with experiments. Training a row with one seed is a run, which has its own folder. One seed is
trained in this process. Several seeds are trained one after another, each by a `reefknot train` of its own
(`lab/cli/jobs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from reefknot.lab.cli.options import (
    RECIPE_HELP,
    CheckOption,
    DataOption,
    DeviceOption,
    JsonOption,
    OverridesArgument,
    RowOption,
    StartOption,
    TrackOption,
)
from reefknot.lab.cli.own_text import EncodingOption, FieldOption, TextOption, TokensOption, WorkersOption

if TYPE_CHECKING:
    from reefknot.lab.cli.jobs import TrainOptions
    from reefknot.lab.recipes.recipe import Recipe, Row

EXAMPLES = """\b
Examples:
  reefknot train --text docs/                                      # any text, without a recipe; writes a page
  reefknot train --text articles.jsonl.gz --field body training.epochs=2 --out runs/articles
  reefknot train demo --row tied
  reefknot train press2017/table6 --row "Small + WT" --data DIR training.epochs=2 --out runs/short
  reefknot train demo --row tied --seeds 3
  reefknot train demo --row tied encoder.kind=gru       # keeps all settings that a GRU also has
  reefknot train runs/demo/tied/seed0 training.epochs=20    # train a finished run longer
  reefknot train demo --row tied --track tensorboard
  torchrun --nproc-per-node=2 -m reefknot train demo --row tied                        # DDP
  torchrun --nproc-per-node=2 -m reefknot train demo --row tied training.shard=true    # FSDP2
"""


def train(
    ctx: typer.Context,
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="RECIPE|RUN", help=f"{RECIPE_HELP} Or a finished run folder, to train it longer."),
    ] = None,
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
    check: CheckOption = False,
    device: DeviceOption = "auto",
    track: TrackOption = None,
    withhold_test: Annotated[
        bool,
        typer.Option("--withhold-test", help="Do not print the test score, for example while you choose settings."),
    ] = False,
    accept_difference: Annotated[
        bool,
        typer.Option(
            "--accept-difference",
            help="Train a finished run longer even if the outcome differs from a run of the new length from the start.",
        ),
    ] = False,
    workers: WorkersOption = None,
    text: TextOption = None,
    field: FieldOption = "text",
    encoding: EncodingOption = None,
    tokens: TokensOption = "bpe",
    as_json: JsonOption = False,
) -> None:
    """Train one row of a recipe, or continue its training if the run folder exists.

    A row is one experiment of the recipe; `reefknot ls RECIPE` lists the rows. With --text, a recipe is chosen for the
    text and written next to the run, and a page about the run is written at the end. In place of a recipe, give the
    folder of a finished run and a new training.epochs or training.updates to train it longer.
    """
    from reefknot.errors import SettingsError
    from reefknot.lab.cli.options import (
        JsonOutput,
        check_tracker_options,
        check_training_data,
        describe_runs,
        is_run_folder,
        reject_options,
    )
    from reefknot.lab.cli.own_text import is_first_process, recipe_path_for, remove_new_recipe_on_error
    from reefknot.lab.experiment import train as train_row
    from reefknot.lab.recipes.recipe import default_folder, load_recipe
    from reefknot.lab.text.workers import set_num_workers
    from reefknot.lab.training.display import SilentDisplay, open_display
    from reefknot.lab.training.distributed import choose_device, join_world

    output = JsonOutput(as_json)
    set_num_workers(workers)
    with remove_new_recipe_on_error(None if text is None else recipe_path_for(text, out)):
        if text is not None:
            overrides = [*([recipe] if recipe else []), *(overrides or [])]
            recipe = _choose_recipe(
                text, out, row, overrides, device=device, field=field, encoding=encoding, tokens=tokens
            )
        else:
            reject_options(ctx, ("field", "encoding", "tokens"), "without --text; add --text, or leave {option} out")
        if recipe is None:
            raise SettingsError("train needs a recipe or a text: reefknot train RECIPE, or reefknot train --text FILE")
        is_longer = text is None and is_run_folder(Path(recipe))
        if is_longer:
            reject_options(ctx, ("row", "out", "seeds", "start"), "on a run, which has its own; leave {option} out")
            out = Path(recipe)
            loaded_recipe, chosen_row = _load_run(out, overrides or [], accept_difference=accept_difference)
        else:
            reject_options(ctx, ("accept_difference",), "on a recipe; give the folder of a finished run")
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
        if text is not None and not withhold_test:
            _write_page(loaded_recipe, out)
        output.print(lambda: {"runs": describe_runs(run_folders, withhold_test=withhold_test)})
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
                longer=is_longer,
            )
        finally:
            display.close()
    if text is not None and not withhold_test and is_first_process():
        _write_page(loaded_recipe, out)
    if is_longer and is_first_process():
        _rewrite_page(loaded_recipe, chosen_row, Path(recipe), withhold_test=withhold_test)
    if is_first_process():
        run_folder = out or default_folder(loaded_recipe, chosen_row, loaded_recipe.experiments[chosen_row.name].seed)
        output.print(lambda: {"runs": describe_runs([run_folder], withhold_test=withhold_test)})


def _choose_recipe(
    text: str,
    out: Path | None,
    row: str | None,
    overrides: Sequence[str],
    *,
    device: str,
    field: str,
    encoding: str | None,
    tokens: Literal["bpe", "words"],
) -> str:
    """Choose a recipe for a text, write it next to the run, and return its path."""
    from reefknot.errors import SettingsError
    from reefknot.lab.cli.own_text import is_first_process, recipe_path_for, write_recipe
    from reefknot.storage.progress import silent

    if row is not None:
        raise SettingsError("--row has no effect with --text, whose recipe has only one row; leave --row out")
    if overrides and "=" not in overrides[0]:
        raise SettingsError(f"{overrides[0]} and --text were given, but --text chooses a recipe; leave one of them out")
    if out is not None and out.is_file():
        raise SettingsError(f"{out} is a file, not a folder; use another --out")
    recipe_path = recipe_path_for(text, out)
    print_line = typer.echo if is_first_process() else silent
    write_recipe(text, recipe_path, field=field, encoding=encoding, tokens=tokens, device=device, print_line=print_line)
    return str(recipe_path)


def _write_page(recipe: Recipe, out: Path | None) -> None:
    """Print the scores of the runs of a text, and write a page about them."""
    from reefknot.lab.cli.table import print_and_write_table
    from reefknot.lab.runs.loading import collect_runs

    root = out or Path("runs") / recipe.name
    print_and_write_table(recipe, [result.folder for result in collect_runs([root])], root)


def _rewrite_page(recipe: Recipe, row: Row, run: Path, *, withhold_test: bool) -> None:
    """Write the page about a run again after it was trained longer, with the same heading. Not every run has a page.

    The page is in the run folder, in the folder that holds one run per seed, or in the folder of the recipe.
    """
    import html
    import re
    from dataclasses import replace

    run = run.resolve()
    folders = [run]
    if re.fullmatch(r"seed\d+", run.name):
        folders.append(run.parent)
        if run.parent.name == row.slug:
            folders.append(run.parent.parent)
    for folder in folders:
        page = folder / "report.html"
        if not page.is_file():
            continue
        if withhold_test:
            typer.echo(
                f"{page} shows the earlier result; `reefknot report {folder} -o {page}` writes it again, with the test "
                "score"
            )
            return
        heading = re.search("<title>(.*?)</title>", page.read_text(encoding="utf-8", errors="replace"))
        title = html.unescape(heading[1]) if heading else recipe.title
        _write_page(replace(recipe, title=title), folder)
        return


def _load_run(path: Path, overrides: Sequence[str], *, accept_difference: bool) -> tuple[Recipe, Row]:
    """Return a recipe with the settings of a run. Raise an error if the run cannot be trained to a new length."""
    from reefknot.lab.recipes.longer import check_longer, load_run_recipe
    from reefknot.lab.runs.folder import RunFolder

    recipe, row = load_run_recipe(path, overrides)
    for note in check_longer(RunFolder.open(path), recipe.experiments[row.name], accept_difference=accept_difference):
        typer.echo(note, err=True)
    return recipe, row


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
