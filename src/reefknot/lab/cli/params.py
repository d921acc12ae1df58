"""`reefknot params`: count the parameters of a recipe's rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reefknot.lab.cli.options import AsJson, Data, Overrides, Recipe, emit

if TYPE_CHECKING:
    from reefknot.lab.recipes.recipe import Recipe as LoadedRecipe

EXAMPLES = """\b
Examples:
  reefknot params press2017/table6
  reefknot params ends --row DRILL --data DIR --json
  reefknot params demo --row tied encoder.hidden_dim=256 tables.words.dim=256
"""

NEEDS_TEXT = "the vocabulary is made from the text"
"""The reason why a row cannot be counted without its corpus, unless the vocabulary size is published."""


def params(
    recipe: Recipe,
    overrides: Overrides = None,
    row: Annotated[str | None, typer.Option(help="Count this row only, and list all its parts.")] = None,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Count parameters by part, without building the model in memory.

    A table that two ends share is counted once, at the input. A row whose vocabulary is made from its text, such as a
    row with sub-words, is counted only if the corpus is on this machine.
    """
    from reefknot.lab.cli.options import check_data
    from reefknot.lab.recipes.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [], row)
    check_data(data, (experiment.corpus.name for experiment in loaded.experiments.values()), recipe)
    models, uncounted = _models(loaded, data, as_json)
    counts = {name: _with_total(model.parameter_counts()) for name, model in models.items()}
    record = {name: counts[name] | {"parts": model.parameter_counts_by_module()} for name, model in models.items()}
    width = max(map(len, counts))
    lines = [
        f"{name:<{width}}  " + "  ".join(f"{part} {count:>12,}" for part, count in by_part.items())
        for name, by_part in counts.items()
    ]
    if row is not None:
        (model,) = models.values()
        parts = _with_total(model.parameter_counts_by_module())
        width = max(map(len, parts))
        lines = [f"{part:<{width}}  {count:>13,}" for part, count in parts.items()]
    both = record | uncounted
    emit({name: both[name] for name in loaded.experiments}, "\n".join(lines), as_json)


def _models(recipe: LoadedRecipe, data: Path | None, as_json: bool) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Return the models of the rows that can be counted, and for JSON the reasons why other rows cannot be counted.

    For people, the reasons are printed on stderr. It is an error if no row can be counted, or if the user has set
    `--data` and a corpus is not in this folder.
    """
    from reefknot.errors import CorpusNotFound
    from reefknot.lab.cli.sizes import Texts, describe_missing, for_rows_with_text

    texts = Texts(data)
    required = () if data is None else tuple(recipe.experiments)
    models, missing = for_rows_with_text(recipe, lambda _, experiment: texts.unbuilt_model(experiment), required)
    reasons = {row: f"{NEEDS_TEXT}; {message}" for row, message in missing.items()}
    lines = describe_missing("not counted", reasons)
    if not models:
        raise CorpusNotFound("\n".join(lines))
    if not as_json:
        for line in lines:
            typer.echo(line, err=True)
    return models, {row: {"not_counted": reason} for row, reason in reasons.items()}


def _with_total(counts: dict[str, int]) -> dict[str, int]:
    return counts | {"total": sum(counts.values())}
