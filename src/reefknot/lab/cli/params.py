"""`reefknot params`: count the parameters of a recipe's models.

Every row (one experiment) of a recipe has a model. It is built on torch's meta device, which takes no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import DataOption, JsonOption, OverridesArgument, RecipeArgument, print_result

if TYPE_CHECKING:
    from reefknot.lab.recipes.recipe import Recipe, Row
    from reefknot.lab.tasks.contract import Experiment

EXAMPLES = """\b
Examples:
  reefknot params press2017/table6
  reefknot params ends --row DRILL --data DIR --json
  reefknot params demo --row tied encoder.hidden_dim=256 tables.words.dim=256
"""

NEEDS_TEXT = "the vocabulary is made from the text"
"""The reason why parameters cannot be counted without the corpus, unless the vocabulary size is published."""


def params(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    row: Annotated[
        str | None, typer.Option(help="Count only this row (experiment of the recipe), and list its parts in detail.")
    ] = None,
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count the parameters of the input, the encoder and the output of every model in a recipe.

    A table that input and output share is counted once, at the input. If the size of a vocabulary depends on the text,
    as with sub-words, the parameters of its model are counted only if the corpus is on this machine.
    """
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.cli.sizes import format_missing
    from reefknot.lab.recipes.recipe import load_recipe

    loaded_recipe = load_recipe(recipe, overrides or [], row)
    check_data(data, (experiment.corpus for experiment in loaded_recipe.experiments.values()), recipe)
    models, missing_reasons = _build_models(loaded_recipe, data)
    if not as_json:
        for message in format_missing("not counted", missing_reasons):
            typer.echo(message, err=True)

    counts_by_row = {name: _add_total(model.parameter_counts()) for name, model in models.items()}
    records: dict[str, Any] = {}
    for name in loaded_recipe.experiments:
        if name in models:
            records[name] = counts_by_row[name] | {"parts": models[name].parameter_counts_by_module()}
        else:
            records[name] = {"not_counted": missing_reasons[name]}

    if row is None:
        lines = _format_rows(counts_by_row)
    else:
        (model,) = models.values()
        lines = _format_parts(_add_total(model.parameter_counts_by_module()))
    print_result(records, "\n".join(lines), as_json)


def _build_models(recipe: Recipe, data: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the models whose parameters can be counted, by row, and for the other rows the reason why not.

    It is an error if no parameters can be counted, or if the user has set `--data` and a corpus is not in this folder.
    """
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.cli.sizes import TextCache, format_missing, map_rows_with_text

    texts = TextCache(data)

    def build_model(_: Row, experiment: Experiment) -> Any:
        return texts.build_meta_model(experiment)

    required_rows = () if data is None else tuple(recipe.experiments)
    models, missing = map_rows_with_text(recipe, build_model, required_rows)
    reasons = {row: f"{NEEDS_TEXT}; {message}" for row, message in missing.items()}
    if not models:
        raise CorpusNotFound("\n".join(format_missing("not counted", reasons)))
    return models, reasons


def _format_rows(counts_by_row: dict[str, dict[str, int]]) -> list[str]:
    """Return one line per row: `tied  input 96  encoder 544  output 12  total 652`."""
    width = max(len(name) for name in counts_by_row)
    lines = []
    for name, counts in counts_by_row.items():
        cells = "  ".join(f"{part} {count:>12,}" for part, count in counts.items())
        lines.append(f"{name:<{width}}  {cells}")
    return lines


def _format_parts(counts: dict[str, int]) -> list[str]:
    """Return one line per part of a single model."""
    width = max(len(part) for part in counts)
    return [f"{part:<{width}}  {count:>13,}" for part, count in counts.items()]


def _add_total(counts: dict[str, int]) -> dict[str, int]:
    return counts | {"total": sum(counts.values())}
