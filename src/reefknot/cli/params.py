"""`reefknot params`: where the parameters are."""

from __future__ import annotations

from typing import Annotated

import typer

from reefknot.cli.options import AsJson, Data, Overrides, Recipe, emit

EXAMPLES = """\b
Examples:
  reefknot params press2017/table6
  reefknot params demo --row tied encoder.hidden_dim=256 tables.words.dim=256
"""


def params(
    recipe: Recipe,
    overrides: Overrides = None,
    row: Annotated[str | None, typer.Option(help="One row only.")] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Count parameters by part, without building the model in memory. A shared table counts once, at the input."""
    from reefknot.cli.sizes import model_size
    from reefknot.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [], row)
    sizes = {name: model_size(experiment, data) for name, experiment in loaded.experiments.items()}
    sizes = {name: parts | {"total": sum(parts.values())} for name, parts in sizes.items()}
    width = max(map(len, sizes))
    lines = [
        f"{name:<{width}}  " + "  ".join(f"{part} {count:>12,}" for part, count in parts.items())
        for name, parts in sizes.items()
    ]
    emit(sizes, "\n".join(lines), as_json)
