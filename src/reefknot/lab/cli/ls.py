"""`reefknot ls`: list what a recipe can name, such as corpora and classifiers, or the rows of one recipe.

A recipe is a TOML file with experiments, which are called rows. A family is a list of choices, such as the corpora or
the classifiers. Most families are the registries of `lab/config/parts.py`: a part is anything that a recipe names by
its `kind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import JsonOption, print_result

if TYPE_CHECKING:
    from reefknot.lab.recipes.file import Row

EXAMPLES = """\b
Examples:
  reefknot ls
  reefknot ls classifiers
  reefknot ls inan2017/table1
  reefknot ls --json
"""


def ls(
    name: Annotated[
        str | None,
        typer.Argument(
            help="What to list: a category such as recipes, corpora or classifiers, or the name of a recipe to list "
            "its rows. [default: all categories]"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the available recipes, corpora and model parts, or the rows of one recipe.

    A row is one experiment of a recipe. Rows are listed with the paper's scores.
    """
    families = _collect_families()
    if name is not None and name not in families:
        _list_rows(name, list(families), as_json)
        return
    if name is not None:
        families = {name: families[name]}
    lines = []
    for family, descriptions in families.items():
        lines.append(family)
        lines += [f"  {entry:<24} {description}" for entry, description in descriptions.items()]
    print_result(families, "\n".join(lines), as_json)


def _collect_families() -> dict[str, dict[str, str]]:
    """Return the descriptions of all entries by family: {"corpora": {"ptb": "Penn Treebank ...", ...}, ...}."""
    from reefknot.lab.config.parts import FAMILIES, SETTING_CHOICES
    from reefknot.lab.recipes.file import list_shipped_recipes
    from reefknot.lab.text.corpora import known_corpora

    corpora = {}
    for name, corpus in known_corpora().items():
        data_note = "needs --data" if corpus.needs_data else "needs no data"
        corpora[name] = f"{corpus.description} ({data_note})"
    parts = {}
    for registry in FAMILIES:
        parts[registry.family] = {kind: registry.summary(kind) for kind in registry}
    return {"recipes": list_shipped_recipes(), "corpora": corpora, **parts, **SETTING_CHOICES}


def _list_rows(name: str, families: list[str], as_json: bool) -> None:
    """Print the rows of a recipe. `families` are the names of all families, for the error message."""
    from reefknot.errors import SettingsError, find_similar_name, shorten
    from reefknot.lab.recipes.file import find_recipe, get_string, read_recipe_file

    try:
        path, _ = find_recipe(name)
    except SettingsError as error:
        similar_family = find_similar_name(name, families)
        hint = f"did you mean {similar_family}?" if similar_family else f"`reefknot ls` lists the families; {error}"
        raise SettingsError(f"no family '{shorten(name, 60)}'; {hint}") from error
    recipe_file = read_recipe_file(path, name)

    # The corpus of a row is stated in the row, or for all rows at the top of the file.
    corpora = {}
    for row in recipe_file.rows:
        if not row.quoted:
            corpora[row.name] = row.corpus or get_string(recipe_file.base, "corpus", "name")
    has_several_corpora = len(set(corpora.values())) > 1

    records = []
    lines = [recipe_file.title]
    width = max(len(row.name) for row in recipe_file.rows)
    for row in recipe_file.rows:
        record = row.model_dump(include={"name", "quoted", "of", "by", "parameters", "paper", "paper_similarity"})
        corpus = corpora.get(row.name)
        records.append(record | {"start": row.start, "corpus": corpus})
        details = _describe_row(row)
        if corpus and has_several_corpora:
            details.append(corpus)
        lines.append(f"  {row.name:<{width}}  {'; '.join(details)}".rstrip())
    print_result(records, "\n".join(lines), as_json)


def _describe_row(row: Row) -> list[str]:
    """Return what a recipe states about a row, such as ["2,651,600 parameters", "paper: test 114.5"]."""
    details = []
    if row.parameters:
        details.append(f"{row.parameters:,} parameters")
    if row.paper:
        details.append(f"paper: {_format_scores(row.paper)}")
    for end, rhos in row.paper_similarity.items():
        details.append(f"paper's rho, {end}: {_format_scores(rhos)}")
    if row.quoted:
        details.append("quoted")
    if row.of:
        details.append(f'evaluates "{row.of}" by {row.by}')
    if row.start:
        details.append(f'starts from "{row.start}"')
    return details


def _format_scores(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {score:g}" for name, score in scores.items())
