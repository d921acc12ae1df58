"""Train runs of a recipe in float64 up to their last checkpoint, in one process or under torchrun.

    torchrun --nproc-per-node=2 tests/lab/training/train_together.py RECIPE OUT [key=value ...]

OUT contains folders of runs. In a folder whose name starts with `shards`, the model is sharded, and in a folder whose
name starts with `words`, its vocabulary. Runs that are already in a folder are resumed; an empty folder gets a run of
every row that can be trained so.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from reefknot.lab.experiment import build_run_config
from reefknot.lab.recipes.recipe import Recipe, Row, load_recipe
from reefknot.lab.runs.folder import RunFolder
from reefknot.lab.tasks import build_model, create_task
from reefknot.lab.text.batches import build_batches
from reefknot.lab.text.dataset import open_dataset
from reefknot.lab.training.distributed import World, join_world
from reefknot.lab.training.generators import seed_everything
from reefknot.lab.training.loop import Trainer
from reefknot.nn.models.language_model import LanguageModel, Losses


def train(recipe: Recipe, row: Row, out: Path, world: World) -> None:
    """Train as `experiments.train` does, but in float64, so that the order of sums does not matter."""
    experiment = recipe.experiments[row.name]
    dataset = open_dataset(experiment.corpus, experiment.vocabulary)
    text = dataset.splits["train"]
    batches = build_batches(experiment.training, text.ids, text.inputs, dataset.vocabulary.eos)
    seed_everything(0)
    model = build_model(experiment, dataset.vocabulary).double()
    if experiment.training.precision == "float16" and world.rank == world.size - 1:
        overflow(model)
    run = (
        RunFolder.open_for_training(out, build_run_config(recipe, row, experiment, dataset)) if world.is_first else None
    )
    world.barrier()
    with run or RunFolder.open(out) as opened:
        Trainer(
            model,
            batches.shard(world.rank, world.size),
            lambda: create_task(experiment).score_split(model, dataset, "valid").mean,
            experiment.training,
            opened,
            world=world,
        ).train()


def overflow(model: LanguageModel) -> None:
    """Make the loss of the second window infinite, and both loss and gradient of the third."""
    compute, numbers = model.loss, count(1)

    def loss(*window: Any) -> Losses:
        losses = compute(*window)
        nll, number = losses.parts["nll"], next(numbers)
        if number in (2, 3):
            losses.parts["nll"] = replace(nll, sum=nll.sum + math.inf if number == 2 else nll.sum * math.inf)
        return losses

    model.loss = loss  # type: ignore[method-assign]


if __name__ == "__main__":
    name, root, *overrides = sys.argv[1:]
    folders = {folder: {run.name for run in folder.iterdir()} for folder in sorted(Path(root).iterdir())}
    with join_world("cpu") as world:
        world.barrier()  # until all processes have listed the folders
        for folder, existing_run in folders.items():
            shard = {"copies": "false", "shards": "true", "words": "vocabulary"}[folder.name.split()[0]]
            recipe = load_recipe(name, [*overrides, f"training.shard={shard}"])
            for row in recipe.rows:
                needs_whole_table = "drill" in str(recipe.experiments[row.name].output)
                if needs_whole_table and shard == "vocabulary":
                    continue
                if not existing_run or row.slug in existing_run:
                    train(recipe, row, folder / row.slug, world)
