"""`reefknot validate`: check recipes without running them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.cli.options import AsJson, Data, emit

if TYPE_CHECKING:
    from reefknot.recipe import Experiment, Row

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
    from reefknot.errors import ReefknotError
    from reefknot.recipe import load_recipe

    checked = []
    problems: dict[str, ReefknotError] = {}
    for name in recipes:
        try:
            recipe = load_recipe(name)
        except ReefknotError as error:
            problems.setdefault(str(error), error)
            continue
        for row in recipe.rows:
            if row.quoted:
                continue
            try:
                size = _size(recipe.experiments[row.name], row, data)
            except ReefknotError as error:
                # What several rows have in common is told once, of the first.
                problems.setdefault(str(error), type(error)(f'{name}, row "{row.name}": {error}'))
            else:
                checked.append({"recipe": name, "row": row.name, "parameters": size})
    if problems:
        first, *others = problems.values()
        raise type(first)("\n".join(map(str, [first, *others])))
    sizes = [f"{c['parameters']:,} parameters" if c["parameters"] else "size unknown: corpus not here" for c in checked]
    lines = [f"{c['recipe']}  {c['row']}: valid, {size}" for c, size in zip(checked, sizes, strict=True)]
    emit(checked, "\n".join(lines), as_json)


def _size(experiment: Experiment, row: Row, data: Path | None) -> int | None:
    """Parameters; None where only the text of a known corpus could tell and it is not here."""
    from reefknot.cli.sizes import unbuilt_model
    from reefknot.errors import CorpusNotHere, SettingsError

    try:
        total = sum(unbuilt_model(experiment, data).parameter_counts().values())
    except CorpusNotHere:
        return None
    if row.parameters not in (None, total):
        raise SettingsError(f"{total:,} parameters, not {row.parameters:,}")
    return total
