"""`reefknot figure`: a figure of a paper, measured in runs of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reefknot.lab.cli.options import Data, Device

if TYPE_CHECKING:
    from reefknot.lab.papers.figures.contract import Figure, Measured

EXAMPLES = """\b
Examples:
  reefknot figure                                            list them
  reefknot figure inan2017/2 -o figure2.svg                  from runs/inan2017/table1
  reefknot figure baevski2019/2 results/baevski2019/enwiki   from runs or records of runs
  reefknot figure press2017/table3 RUN RUN -o table3.png --json table3.json
"""

SUFFIXES = (".svg", ".png", ".html")


def figure(
    name: Annotated[str | None, typer.Argument(help="Such as inan2017/1. [default: list all]")] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Run folders, or folders that hold runs. [default: where its recipe's runs lie]"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Draw it into this .svg, .png or .html.", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the record of it to this file.", show_default=False)] = None,
    data: Data = None,
    device: Device = "auto",
) -> None:
    """Measure a figure of a paper in runs of ours, print it as a table, and draw it beside the paper's numbers."""
    from reefknot.storage.files import write_json

    if name is None:
        _list()
        return
    _refuse_places(output, json)
    from reefknot.lab.papers.figures import open_figure
    from reefknot.lab.papers.figures.record import record_of
    from reefknot.lab.papers.figures.runs import choose
    from reefknot.lab.training.distributed import choose_device

    found = open_figure(name)
    chosen = choose(found, runs or [])
    for note in chosen.notes:
        typer.echo(f"{name}: {note}", err=True)
    measured = found.measure(chosen.runs, data=data, device=choose_device(device))
    typer.echo(f"{found.title}\n{found.shows}\n")
    typer.echo("\n".join(found.lines(measured)))
    if json is not None:
        write_json(json, record_of(found, measured, chosen.runs, chosen.notes))
        typer.echo(f"record: {json.resolve()}")
    if output is not None:
        _write(output, found, measured, chosen.notes)
        typer.echo(f"figure: {output.resolve()}")


def _list() -> None:
    from reefknot.lab.papers.figures import FIGURES, open_figure

    for name in FIGURES:
        needs = open_figure(name).needs
        typer.echo(f"{name:<20} {open_figure(name).title}{f' (reads {needs})' if needs else ''}")


def _refuse_places(output: Path | None, json: Path | None) -> None:
    """Before anything is measured."""
    from reefknot.errors import SettingsError

    if output is not None and output.suffix not in SUFFIXES:
        raise SettingsError(f"-o {output}: must end with {', '.join(SUFFIXES)}")
    for option, path in (("-o", output), ("--json", json)):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            fault = "is a folder; name a file" if path.is_dir() else f"there is no folder {path.resolve().parent}"
            raise SettingsError(f"{option} {path}: {fault}")


def _write(path: Path, found: Figure, measured: Measured, notes: list[str]) -> None:
    from reefknot.lab.papers.figures.section import page
    from reefknot.storage.files import write_bytes, write_text

    if path.suffix == ".png":
        write_bytes(path, found.draw(measured).png)
    else:
        write_text(path, found.draw(measured).file if path.suffix == ".svg" else page(found, measured, notes))
