"""Train all rows of a recipe in float64, in the processes started by torchrun.

torchrun --nproc-per-node=2 tests/lab/training/train_rows.py RECIPE OUT [key=value ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from reefknot.lab import experiment as experiments
from reefknot.lab.recipes.recipe import load_recipe
from reefknot.lab.training.display import SilentDisplay
from reefknot.lab.training.distributed import join_world

name, out, *overrides = sys.argv[1:]
recipe = load_recipe(name, overrides)
torch.set_default_dtype(torch.float64)
with join_world("cpu") as world:
    for row in recipe.rows:
        experiments.train(recipe, row, Path(out) / row.slug, world=world, display=SilentDisplay())
