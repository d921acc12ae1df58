"""`reefknot ls`: list recipes, corpora, parts and rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import AsJson, emit

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
            help="A family, such as recipes or classifiers, or a recipe to list its rows. [default: all families]"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List recipes, corpora and parts, or the rows of a recipe with the paper's scores."""
    families = _families()
    if name is not None and name not in families:
        _list_rows(name, list(families), as_json)
        return
    shown = {family: entries for family, entries in families.items() if name in (None, family)}
    lines = []
    for family, entries in shown.items():
        lines.append(family)
        lines += [f"  {entry:<24} {text}" for entry, text in entries.items()]
    emit(shown, "\n".join(lines), as_json)


def _families() -> dict[str, dict[str, str]]:
    """Return the descriptions of all entries, by family and entry."""
    from reefknot.lab.config.parts import FAMILIES, SETTING_CHOICES
    from reefknot.lab.recipes.file import list_shipped_recipes
    from reefknot.lab.text.corpora import known_corpora

    corpora = {
        name: f"{corpus.description} ({'needs --data' if corpus.needs_data else 'needs no data'})"
        for name, corpus in known_corpora().items()
    }
    parts = {family.family: {kind: family.summary(kind) for kind in family} for family in FAMILIES}
    return {"recipes": list_shipped_recipes(), "corpora": corpora, **parts, **SETTING_CHOICES}


def _list_rows(name: str, families: list[str], as_json: bool) -> None:
    """Print the rows of a recipe."""
    from reefknot.errors import SettingsError
    from reefknot.lab.recipes.file import find_recipe, get_string, read_recipe_file

    try:
        path, _ = find_recipe(name)
    except SettingsError as error:
        raise SettingsError(f"no family '{name[:60]}'; the families are: {', '.join(families)}; {error}") from error
    file = read_recipe_file(path, name)
    corpora = {row.name: row.corpus or get_string(file.base, "corpus", "name") for row in file.rows if not row.quoted}
    several = len(set(corpora.values())) > 1
    records, lines = [], [file.title]
    width = max(len(row.name) for row in file.rows)
    for row in file.rows:
        record = row.model_dump(include={"name", "quoted", "of", "by", "parameters", "paper", "paper_similarity"})
        corpus = corpora.get(row.name)
        records.append(record | {"start": row.start, "corpus": corpus})
        facts = [*_facts(row), *([corpus] if corpus and several else [])]
        lines.append(f"  {row.name:<{width}}  {'; '.join(facts)}".rstrip())
    emit(records, "\n".join(lines), as_json)


def _facts(row: Row) -> list[str]:
    """Return the facts that a recipe states about a row."""
    facts = [f"{row.parameters:,} parameters"] if row.parameters else []
    facts += [f"paper: {_listed(row.paper)}"] if row.paper else []
    facts += [f"paper's rho, {end}: {_listed(rhos)}" for end, rhos in row.paper_similarity.items()]
    facts += ["quoted"] if row.quoted else []
    facts += [f'evaluates "{row.of}" by {row.by}'] if row.of else []
    return [*facts, *([f'starts from "{row.start}"'] if row.start else [])]


def _listed(scores: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {score:g}" for name, score in scores.items())
