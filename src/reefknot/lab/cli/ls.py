"""`reefknot ls`: what can be built and run."""

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
        typer.Argument(help="One family only, such as recipes or classifiers; or a recipe, to see its rows."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List recipes, corpora, parts and rules, one line each; or the rows of a recipe with the paper's figures."""
    found = _families()
    if name is not None and name not in found:
        _list_rows(name, list(found), as_json)
        return
    shown = {family: entries for family, entries in found.items() if name in (None, family)}
    lines = []
    for family, entries in shown.items():
        lines.append(family)
        lines += [f"  {entry:<24} {text}" for entry, text in entries.items()]
    emit(shown, "\n".join(lines), as_json)


def _families() -> dict[str, dict[str, str]]:
    from reefknot.lab.config.parts import FAMILIES, VALUES
    from reefknot.lab.recipes.file import shipped
    from reefknot.lab.text.corpora import known_corpora

    corpora = {
        name: f"{corpus.description} ({'needs --data' if corpus.needs_data else 'needs no data'})"
        for name, corpus in known_corpora().items()
    }
    parts = {family.family: {kind: family.summary(kind) for kind in family} for family in FAMILIES}
    return {"recipes": shipped(), "corpora": corpora, **parts, **VALUES}


def _list_rows(name: str, families: list[str], as_json: bool) -> None:
    from reefknot.errors import SettingsError
    from reefknot.lab.recipes.file import find_recipe, read_file, setting

    try:
        path, _ = find_recipe(name)
    except SettingsError as error:
        raise SettingsError(f"no family '{name[:60]}'; there are: {', '.join(families)}; and {error}") from error
    file = read_file(path, name)
    corpora = {row.name: row.corpus or setting(file.base, "corpus", "name") for row in file.rows if not row.quoted}
    several = len(set(corpora.values())) > 1
    records, lines = [], [file.title]
    width = max(len(row.name) for row in file.rows)
    for row in file.rows:
        own = row.model_dump(include={"name", "quoted", "of", "by", "parameters", "paper", "paper_similarity"})
        corpus = corpora.get(row.name)
        records.append(own | {"start": row.start, "corpus": corpus})
        told = [*_facts(row), *([corpus] if corpus and several else [])]
        lines.append(f"  {row.name:<{width}}  {'; '.join(told)}".rstrip())
    emit(records, "\n".join(lines), as_json)


def _facts(row: Row) -> list[str]:
    """What a recipe says of a row, in a few words."""
    told = [f"{row.parameters:,} parameters"] if row.parameters else []
    told += [f"paper: {_listed(row.paper)}"] if row.paper else []
    told += [f"paper's rho, {end}: {_listed(rhos)}" for end, rhos in row.paper_similarity.items()]
    told += ["quoted"] if row.quoted else []
    told += [f'"{row.of}" scored by {row.by}'] if row.of else []
    return [*told, *([f'starts from "{row.start}"'] if row.start else [])]


def _listed(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in figures.items())
