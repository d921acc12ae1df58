"""`reefknot validate`: check recipes without training them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import AsJson, Data, emit

if TYPE_CHECKING:
    from reefknot.lab.recipes.recipe import Recipe, Row

EXAMPLES = """\b
Examples:
  reefknot validate my_recipe.toml
  reefknot validate press2017/table6 demo --json
"""


def validate(
    recipes: Annotated[list[str], typer.Argument(help="Shipped recipes, or paths of TOML files.")],
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Check every setting of every row, and that every model has the number of parameters that its recipe states."""
    from reefknot.errors import ReefknotError
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.cli.sizes import Texts, for_each_row
    from reefknot.lab.recipes.recipe import load_recipe

    records, lines = [], []
    texts = Texts(data)
    corpora: list[str] = []
    problems: list[ReefknotError] = []
    # After a mistake in one recipe, the other recipes are still checked.
    for name in recipes:
        try:
            loaded = load_recipe(name)
            corpora += _corpora(loaded)
            sizes = for_each_row(loaded, texts.checked_size)
        except ReefknotError as error:
            problems.append(error)
        else:
            records += [{"recipe": name, "row": row, "parameters": size} for row, size in sizes.items()]
            lines += [f"{name}  {row}: valid, {_size(loaded.row(row), size)}" for row, size in sizes.items()]
            if others := len(loaded.rows) - len(sizes):
                lines.append(f"{name}  {others} other row{'s' * (others > 1)}: nothing to train")
    if problems:
        raise type(problems[0])("\n".join(dict.fromkeys(map(str, problems))))
    check_data(data, corpora, " and ".join(recipes))
    emit(records, "\n".join(lines), as_json)


def _corpora(recipe: Recipe) -> list[str]:
    return [experiment.corpus.name for experiment in recipe.experiments.values()]


def _size(row: Row, parameters: int | None) -> str:
    if parameters is None:
        return "size unknown, because the corpus is not on this machine"
    return f"{parameters:,} parameters" + (", as the recipe says" if row.parameters else "")
