"""`reefknot ls`: what can be built and run."""

from __future__ import annotations

from typing import Annotated

import typer

from reefknot.cli.options import AsJson, emit

EXAMPLES = """\b
Examples:
  reefknot ls
  reefknot ls labels
  reefknot ls --json
"""


def ls(
    family: Annotated[str | None, typer.Argument(help="Show one family only, such as recipes or labels.")] = None,
    as_json: AsJson = False,
) -> None:
    """List recipes, corpora and parts, one line each."""
    from reefknot.errors import SettingsError

    found = _families()
    if family is not None and family not in found:
        raise SettingsError(f"no family '{family}'; there are: {', '.join(found)}")
    shown = {name: entries for name, entries in found.items() if family in (None, name)}
    lines = []
    for name, entries in shown.items():
        lines.append(name)
        lines += [f"  {entry:<20} {text}" for entry, text in entries.items()]
    emit(shown, "\n".join(lines), as_json)


def _families() -> dict[str, dict[str, str]]:
    from reefknot.parts import FAMILIES
    from reefknot.recipes import shipped
    from reefknot.text.corpora import BUILT_IN, KNOWN, PREPARED

    corpora = {BUILT_IN: "made from the documentation in this Python installation; needs no data"}
    titles = {name: corpus.title for name, corpus in KNOWN.items()}
    titles |= {name: corpus.title for name, corpus in PREPARED.items()}
    corpora |= {name: f"{title} (needs --data)" for name, title in titles.items()}
    parts = {family.family: {kind: family.summary(kind) for kind in family} for family in FAMILIES}
    return {"recipes": shipped(), "corpora": corpora, **parts}
