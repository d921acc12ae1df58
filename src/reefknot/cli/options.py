"""Arguments and options that several verbs share, so that they read and behave alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Recipe = Annotated[str, typer.Argument(help="A shipped recipe (see `reefknot ls`) or the path of a TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, spelled as in the recipe: training.epochs=3")
]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder with the corpora; otherwise REEFKNOT_DATA names it.", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def emit(value: Any, text: str, as_json: bool) -> None:
    """What a reading verb says: for a person, or for a program."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2) if as_json else text)
