"""`reefknot params`: count the parameters of a recipe's models.

Every row (one experiment) of a recipe has a model. It is built on torch's meta device, which takes no memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import AsJson, Data, Overrides, Recipe, print_result

if TYPE_CHECKING:
    from reefknot.lab.recipes.recipe import Recipe as LoadedRecipe

EXAMPLES = """\b
Examples:
  reefknot params press2017/table6
  reefknot params ends --row DRILL --data DIR --json
  reefknot params demo --row tied encoder.hidden_dim=256 tables.words.dim=256
"""

NEEDS_TEXT = "the vocabulary is made from the text"
"""The reason why parameters cannot be counted without the corpus, unless the vocabulary size is published."""


def params(
    recipe: Recipe,
    overrides: Overrides = None,
    row: Annotated[
        str | None, typer.Option(help="Count only this row (experiment of the recipe), and list its parts in detail.")
    ] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Count the parameters of the input, the encoder and the output of every model in a recipe.

    A table that input and output share is counted once, at the input. If the size of a vocabulary depends on the text,
    as with sub-words, the parameters of its model are counted only if the corpus is on this machine.
    """
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.cli.sizes import format_missing
    from reefknot.lab.recipes.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [], row)
    check_data(data, (experiment.corpus.name for experiment in loaded.experiments.values()), recipe)
    models, missing = _build_models(loaded, data)
    if not as_json:
        for line in format_missing("not counted", missing):
            typer.echo(line, err=True)
    counts = {name: _add_total(model.parameter_counts()) for name, model in models.items()}
    records: dict[str, Any] = {}
    for name in loaded.experiments:
        if name in models:
            records[name] = counts[name] | {"parts": models[name].parameter_counts_by_module()}
        else:
            records[name] = {"not_counted": missing[name]}
    if row is None:
        lines = _format_rows(counts)
    else:
        (model,) = models.values()
        lines = _format_parts(_add_total(model.parameter_counts_by_module()))
    print_result(records, "\n".join(lines), as_json)


def _build_models(recipe: LoadedRecipe, data: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return two mappings from row names, to models and to reasons.

    The first has the models whose parameters can be counted. The second gives, for the other rows, the reason why not.
    It is an error if no parameters can be counted, or if the user has set `--data` and a corpus is not in this folder.
    """
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.cli.sizes import TextCache, format_missing, map_rows_with_text

    texts = TextCache(data)
    required = () if data is None else tuple(recipe.experiments)
    models, missing = map_rows_with_text(recipe, lambda _, experiment: texts.build_meta_model(experiment), required)
    reasons = {row: f"{NEEDS_TEXT}; {message}" for row, message in missing.items()}
    if not models:
        raise CorpusNotFound("\n".join(format_missing("not counted", reasons)))
    return models, reasons


def _format_rows(counts: dict[str, dict[str, int]]) -> list[str]:
    """Return one line per row: `tied  input 96  encoder 544  output 12  total 652`."""
    width = max(map(len, counts))
    lines = []
    for name, part_counts in counts.items():
        cells = "  ".join(f"{part} {count:>12,}" for part, count in part_counts.items())
        lines.append(f"{name:<{width}}  {cells}")
    return lines


def _format_parts(counts: dict[str, int]) -> list[str]:
    """Return one line per part of a single model."""
    width = max(map(len, counts))
    return [f"{part:<{width}}  {count:>13,}" for part, count in counts.items()]


def _add_total(counts: dict[str, int]) -> dict[str, int]:
    return counts | {"total": sum(counts.values())}
