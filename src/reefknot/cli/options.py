"""Arguments and options that several verbs share, so that they read and behave alike."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from reefknot.experiments import TrainedRun
    from reefknot.text.vocabulary import Vocabulary

Recipe = Annotated[str, typer.Argument(help="A shipped recipe (see `reefknot ls`) or the path of a TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, spelled as in the recipe: training.epochs=3")
]
Run = Annotated[Path, typer.Argument(help="A run folder.")]
Data = Annotated[
    Path | None,
    typer.Option(help="Folder of corpora or text; else REEFKNOT_DATA.", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def open_trained(run: Path, device: str = "cpu") -> TrainedRun:
    """A run's model, computing as it did in training; says so when training has not come to its end."""
    from reefknot.experiments import open_run
    from reefknot.training.generators import set_determinism

    trained = open_run(run, device)
    set_determinism(trained.experiment.training.determinism)
    if trained.run.result is None and not trained.run.imported:
        typer.echo(f"{run}: training is not finished; these are its best weights so far", err=True)
    return trained


def tell_unknown(words: Iterable[str], vocabulary: Vocabulary) -> None:
    """Name the words of a prompt that the model cannot tell from <unk>."""
    strange = dict.fromkeys(word for word in words if not vocabulary.reads(word))
    if strange:
        typer.echo(f"not in the vocabulary, read as <unk>: {', '.join(strange)}", err=True)


def emit(value: Any, text: str, as_json: bool) -> None:
    """What a reading verb says: for a person, or for a program."""
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2) if as_json else text)
