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
    from reefknot.cli.sizes import checked_size, for_each_row
    from reefknot.errors import ReefknotError
    from reefknot.recipe import load_recipe

    checked = []
    problems: list[ReefknotError] = []
    for name in recipes:
        try:
            sizes = for_each_row(name, load_recipe(name), lambda row, experiment: checked_size(row, experiment, data))
        except ReefknotError as error:
            problems.append(error)
        else:
            checked += [{"recipe": name, "row": row, "parameters": size} for row, size in sizes.items()]
    if problems:
        raise type(problems[0])("\n".join(dict.fromkeys(map(str, problems))))
    known = [f"{c['parameters']:,} parameters" if c["parameters"] else "size unknown: corpus not here" for c in checked]
    lines = [f"{c['recipe']}  {c['row']}: valid, {size}" for c, size in zip(checked, known, strict=True)]
    emit(checked, "\n".join(lines), as_json)
