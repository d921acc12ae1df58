"""`reefknot params`: where the parameters are."""

from __future__ import annotations

from typing import Annotated

import typer

from reefknot.lab.cli.options import AsJson, Data, Overrides, Recipe, emit

EXAMPLES = """\b
Examples:
  reefknot params press2017/table6
  reefknot params ends --row DRILL --data DIR --json
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
    from reefknot.lab.cli.sizes import Texts, for_each_row
    from reefknot.lab.recipes.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [], row)
    texts = Texts(data)
    models = for_each_row(recipe, loaded, lambda row, experiment: texts.unbuilt_model(experiment))
    sizes = {name: _with_total(model.parameter_counts()) for name, model in models.items()}
    found = {name: sizes[name] | {"parts": model.parameter_parts()} for name, model in models.items()}
    width = max(map(len, sizes))
    lines = [
        f"{name:<{width}}  " + "  ".join(f"{part} {count:>12,}" for part, count in counts.items())
        for name, counts in sizes.items()
    ]
    if row is not None:
        parts = _with_total(next(iter(models.values())).parameter_parts())
        width = max(map(len, parts))
        lines = [f"{part:<{width}}  {count:>13,}" for part, count in parts.items()]
    emit(found, "\n".join(lines), as_json)


def _with_total(counts: dict[str, int]) -> dict[str, int]:
    return counts | {"total": sum(counts.values())}
