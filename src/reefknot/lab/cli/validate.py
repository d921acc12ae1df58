"""`reefknot validate`: check the settings and model sizes of recipes (TOML files with experiments), without training.

`lab/cli/sizes.py` counts the parameters of the models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import DataOption, JsonOption, print_result

if TYPE_CHECKING:
    from reefknot.lab.recipes.recipe import Row
    from reefknot.lab.text.corpus import CorpusSettings

EXAMPLES = """\b
Examples:
  reefknot validate my_recipe.toml
  reefknot validate press2017/table6 demo --json
"""


def validate(
    recipes: Annotated[list[str], typer.Argument(help="Names of built-in recipes, or paths of TOML files.")],
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check recipes without training: all settings, and the number of parameters of every model.

    A model must have the number of parameters that its recipe states, if it states one.
    """
    from reefknot.errors import ReefknotError
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.cli.sizes import TextCache, map_rows
    from reefknot.lab.recipes.recipe import load_recipe

    records: list[dict[str, Any]] = []
    lines: list[str] = []
    corpora: list[CorpusSettings] = []
    errors: list[ReefknotError] = []
    texts = TextCache(data)
    # After an error in one recipe, the other recipes are still checked.
    for name in recipes:
        try:
            recipe = load_recipe(name)
            corpora += [experiment.corpus for experiment in recipe.experiments.values()]
            parameters_by_row = map_rows(recipe, texts.check_size)
        except ReefknotError as error:
            errors.append(error)
            continue

        for row, parameters in parameters_by_row.items():
            records.append({"recipe": name, "row": row, "parameters": parameters})
            lines.append(f"{name}  {row}: valid, {_format_size(recipe.row(row), parameters)}")
        num_untrained = len(recipe.rows) - len(parameters_by_row)
        if num_untrained:
            plural = "s" if num_untrained > 1 else ""
            lines.append(f"{name}  {num_untrained} other row{plural}: nothing to train")

    if errors:
        messages = dict.fromkeys(str(error) for error in errors)
        raise type(errors[0])("\n".join(messages))
    check_data(data, corpora, " and ".join(recipes))
    print_result(records, "\n".join(lines), as_json)


def _format_size(row: Row, parameters: int | None) -> str:
    if parameters is None:
        return "size unknown, because the corpus is not on this machine"
    if row.parameters:
        return f"{parameters:,} parameters, as the recipe says"
    return f"{parameters:,} parameters"
