"""`reefknot validate`: check recipes without running them."""

from __future__ import annotations

from typing import Annotated

import typer

from reefknot.cli.options import AsJson, Data, emit

EXAMPLES = """\b
Examples:
  reefknot validate my_recipe.toml
  reefknot validate press2017/table6 demo --json
"""


def validate(
    recipes: Annotated[list[str], typer.Argument(help="Shipped recipes or paths.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Check every setting of every row, build the models without memory, and compare their sizes with the paper's."""
    from reefknot.cli.sizes import model_size
    from reefknot.errors import DataError, SettingsError
    from reefknot.recipe import load_recipe

    checked = []
    for name in recipes:
        recipe = load_recipe(name)
        for row in recipe.rows:
            if row.quoted:
                continue
            try:
                total = sum(model_size(recipe.experiments[row.name], data).values())
            except DataError:
                total = None  # the text is not here, and only it knows the size of the vocabulary
            if None not in (total, row.parameters) and total != row.parameters:
                raise SettingsError(f'{name}, row "{row.name}": {total:,} parameters, not {row.parameters:,}')
            checked.append({"recipe": name, "row": row.name, "parameters": total})
    sizes = [f"{c['parameters']:,} parameters" if c["parameters"] else "corpus not here, size unknown" for c in checked]
    lines = [f"{c['recipe']}  {c['row']}: valid, {size}" for c, size in zip(checked, sizes, strict=True)]
    emit(checked, "\n".join(lines), as_json)
